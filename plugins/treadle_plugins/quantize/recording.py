"""A plugin that watches what attention reads and writes, for `treadle calibrate`. Imports torch.

It stands around whatever attention backend was chosen. While a text is computed it either gathers statistics of keys, values and
queries, or lets backends of other KV formats attend in the shadow and compares what comes out, head by head.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import treadle
from treadle import Executor, KVFormat, hookimpl
from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec, LayerAttention


@dataclass
class LayerStatistics:
    """Sums over the tokens of one layer; per KV head and channel, in float64."""

    num_tokens: int
    key_sum: torch.Tensor  # [kv_heads, head_dim]
    key_squares: torch.Tensor  # [kv_heads, head_dim]
    query_squares: torch.Tensor  # [kv_heads, head_dim], mean over the queries that share a head
    lows: torch.Tensor  # [2, kv_heads, head_dim] of keys and values
    highs: torch.Tensor  # [2, kv_heads, head_dim] of keys and values

    @classmethod
    def empty(cls, spec: AttentionSpec) -> LayerStatistics:
        """Of no token."""
        shape = (spec.num_kv_heads, spec.head_dim)
        zeros = torch.zeros(shape, dtype=torch.float64, device=spec.device)
        bounds = torch.full((2, *shape), float("inf"), device=spec.device)
        return cls(0, zeros, zeros.clone(), zeros.clone(), bounds, -bounds)

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Count rows [tokens, kv_heads, head_dim]."""
        self.num_tokens += len(keys)
        self.key_sum += keys.double().sum(0)
        self.key_squares += keys.double().square().sum(0)
        rows = torch.stack((keys, values)).float()
        self.lows = torch.minimum(self.lows, rows.amin(1))
        self.highs = torch.maximum(self.highs, rows.amax(1))

    def add_queries(self, queries: torch.Tensor) -> None:
        """Count queries [tokens, heads, head_dim]."""
        grouped = torch.unflatten(queries.double(), 1, (len(self.key_sum), -1))
        self.query_squares += grouped.square().mean(2).sum(0)


@dataclass
class Shadow:
    """A backend of another format, and how far its outputs are off: per layer and KV head."""

    backend: AttentionBackend
    error: torch.Tensor  # [layers, kv_heads] float64, sum of squares
    exact: torch.Tensor  # [layers, kv_heads] float64, sum of squares of what is right

    @property
    def relative(self) -> torch.Tensor:
        """[layers, kv_heads]: size of the error against that of the output."""
        return (self.error / self.exact.clamp_min(torch.finfo(torch.float64).tiny)).sqrt()


class RecordingBackend:
    """An AttentionBackend that does what `inner` does, and watches."""

    def __init__(self, inner: AttentionBackend, spec: AttentionSpec) -> None:
        self.inner = inner
        self.spec = spec
        self.statistics: list[LayerStatistics] | None = None
        """None while none are gathered."""
        self.shadows: dict[str, Shadow] = {}
        self._num_blocks = 0

    @property
    def name(self) -> str:
        """That of the backend within."""
        return self.inner.name

    def block_bytes(self) -> int:
        """As within."""
        return self.inner.block_bytes()

    def allocate(self, num_blocks: int) -> None:
        """As within."""
        self._num_blocks = num_blocks
        self.inner.allocate(num_blocks)

    def tensors(self) -> Sequence[torch.Tensor]:
        """As within."""
        return self.inner.tensors()

    def poison(self) -> None:
        """As within."""
        self.inner.poison()

    def prepare(self, batch: PackedBatch) -> None:
        """As within, for the shadows too."""
        for backend in (self.inner, *(shadow.backend for shadow in self.shadows.values())):
            backend.prepare(batch)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch) -> None:
        """Store, and watch."""
        self.inner.write(layer, keys, values, batch)
        if self.statistics is not None:
            self.statistics[layer].add(keys, values)
        for shadow in self.shadows.values():
            shadow.backend.write(layer, keys, values, batch)

    def attend(self, layer: int, queries: torch.Tensor, batch: PackedBatch, how: LayerAttention) -> torch.Tensor:
        """What the backend within gives."""
        exact = self.inner.attend(layer, queries, batch, how)
        if self.statistics is not None:
            self.statistics[layer].add_queries(queries)
        for shadow in self.shadows.values():
            error = shadow.backend.attend(layer, queries, batch, how).double() - exact.double()
            shadow.error[layer] += self._squares(error)
            shadow.exact[layer] += self._squares(exact.double())
        return exact

    def gather(self) -> None:
        """Begin to gather statistics."""
        self.statistics = [LayerStatistics.empty(self.spec) for _ in range(self.spec.num_layers)]

    def compare(self, backends: Mapping[str, AttentionBackend]) -> None:
        """Stop gathering, and let `backends` attend in the shadow. They get a pool each."""
        self.statistics = None
        for name, backend in backends.items():
            backend.allocate(self._num_blocks)
            zeros = [torch.zeros(self.spec.num_layers, self.spec.num_kv_heads, dtype=torch.float64) for _ in range(2)]
            self.shadows[name] = Shadow(backend, *zeros)

    def _squares(self, outputs: torch.Tensor) -> torch.Tensor:
        """[kv_heads]: sum of squares of outputs [tokens, heads, head_dim]."""
        return torch.unflatten(outputs, 1, (self.spec.num_kv_heads, -1)).square().sum((0, 2, 3)).cpu()


class Recording:
    """The plugin. After the engine has started, `backend` is there."""

    name = "recording"

    def __init__(self) -> None:
        self.backend: RecordingBackend | None = None
        self._hooks: Any = None

    @hookimpl(wrapper=True)
    def execute(self, settings: treadle.Settings, hooks: Any) -> Generator[None, Executor, Executor]:  # noqa: ARG002  # hook's
        """Remember the hooks, by which further backends are made."""
        self._hooks = hooks
        return (yield)

    @hookimpl(wrapper=True)
    def attention(self, spec: AttentionSpec) -> Generator[None, AttentionBackend, AttentionBackend]:
        """Stand around the backend that was chosen."""
        inner = yield
        if self.backend is not None:
            return inner
        self.backend = RecordingBackend(inner, spec)
        return self.backend

    def backend_for(self, kv_format: KVFormat) -> AttentionBackend:
        """The backend that would be chosen for another format. Raises ConfigError when there is none."""
        assert self.backend is not None, "the engine has started"
        made: AttentionBackend = self._hooks.attention(spec=replace(self.backend.spec, kv_format=kv_format))
        return made
