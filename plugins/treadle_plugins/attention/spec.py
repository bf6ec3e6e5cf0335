"""What an attention backend is asked for, and what it has to offer.

K and V of a layer      [block, kv_head, token, head_dim]        one head's tokens of a block lie side by side
keys, values, queries   [tokens of the step, heads, head_dim]    packed: one sequence's behind the other's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from treadle.contracts import KVFormat
from treadle.errors import ConfigError
from treadle_plugins.attention.batch import PackedBatch


@dataclass(frozen=True)
class LayerAttention:
    """How one layer attends."""

    scale: float
    """Factor on the product of query and key."""
    window: int | None = None
    """A query sees the last `window` tokens, itself included; None means all up to itself."""
    soft_cap: float | None = None
    """Scores become `soft_cap * tanh(score / soft_cap)`."""
    alibi_slopes: tuple[float, ...] | None = None
    """For each query head: the score falls by this for each token of distance."""


@dataclass(frozen=True)
class AttentionSpec:
    """All that a backend must be able to do for one model and one pool."""

    device: str
    """Type of the device, such as `cpu` or `cuda`."""
    dtype: str
    """Precision of queries, keys and values, such as `bfloat16`."""
    kv_format: KVFormat
    block_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    alibi: bool = False
    window: int | None = None
    """The narrowest window of any layer; None when every layer sees everything."""
    soft_cap: float | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch knows it."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"precision {self.dtype!r} is none that torch knows")
        return dtype

    @property
    def queries_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@runtime_checkable
class AttentionBackend(Protocol):
    """Keeps the pool's K and V and attends over them. Made for one AttentionSpec.

    For each step: `prepare`, then for each layer `write` and `attend`. All K and V of the step are written before the
    layer attends, and `attend` reads the stored form of every token, those of the step included. What lies in unused
    slots, NaN too, never reaches a result.
    """

    @property
    def name(self) -> str:
        """Name for `treadle explain`."""
        ...

    def block_bytes(self) -> int:
        """Bytes that one block takes, over all layers, scales included."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks, with any content; gives up what was allocated before."""
        ...

    def tensors(self) -> Sequence[torch.Tensor]:
        """All that belongs to a block, block id first, as views: copying row `b` of each copies block `b`."""
        ...

    def poison(self) -> None:
        """For tests: fill all slots with what spoils every result that it reaches."""
        ...

    def prepare(self, batch: PackedBatch) -> None:
        """Work out once what all layers of this step share."""
        ...

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch) -> None:
        """Store `keys` and `values` [tokens, kv_heads, head_dim] in the slots that `batch` names."""
        ...

    def attend(self, layer: int, queries: torch.Tensor, batch: PackedBatch, how: LayerAttention) -> torch.Tensor:
        """[tokens, heads, head_dim] for `queries` of that shape, each over its own sequence up to its own position."""
        ...


class AttentionBackendType(Protocol):
    """A class of backends: what it can do, and how one is made."""

    @property
    def name(self) -> str:
        """Name for errors and configs."""
        ...

    def supports(self, spec: AttentionSpec) -> str | None:
        """None when it can do what `spec` asks for, else the reason why it cannot."""
        ...

    def __call__(self, spec: AttentionSpec) -> AttentionBackend:
        """A backend for `spec`, which it supports; nothing is allocated yet."""
        ...


def choose(candidates: Sequence[AttentionBackendType], spec: AttentionSpec) -> AttentionBackend:
    """The first of `candidates` that can do what `spec` asks for; ConfigError with each one's reason when none can."""
    reasons = []
    for candidate in candidates:
        reason = candidate.supports(spec)
        if reason is None:
            return candidate(spec)
        reasons.append(f"{candidate.name}: {reason}")
    raise ConfigError("no attention backend can serve this model: " + "; ".join(reasons or ["none is installed"]))
