"""The reference backend `torch`: does everything, simply and exactly, and is the truth for the kernels.

A sequence's keys are gathered token by token through its block table: unused slots are never read, nothing is padded. Of
quantized K and V only what is gathered for one sequence is expanded, to float32, in which it is then attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from treadle_plugins.attention.batch import PackedBatch, ragged_arange
from treadle_plugins.attention.layout import unreadable
from treadle_plugins.attention.spec import AttentionSpec, LayerAttention
from treadle_plugins.attention.storage import Slots, open_sides

_DTYPES = ("float32", "bfloat16", "float16")
_QUERY_TILE = 256
"""Queries whose scores are held at once where they are written out in float32."""


class _Sequence(NamedTuple):
    """What one sequence's attention needs, the same for every layer with the same window."""

    tokens: slice  # its queries within the step
    first_key: int  # position of the first key that any of its queries sees
    slots: Slots  # where its keys lie
    mask: torch.Tensor | None  # [queries, keys], True where a query sees a key; None where `causal` says it all
    causal: bool  # queries and keys are the same tokens, and a query sees all up to itself


class TorchAttention:
    """Attention in plain torch, over K and V in every form that storage.py knows."""

    name = "torch"

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """None when it can do what `spec` asks for, else the reason why it cannot."""
        if spec.dtype not in _DTYPES:
            return f"precision {spec.dtype!r} is none of {', '.join(_DTYPES)}"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly"
        return unreadable(spec)

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self._device = torch.device(spec.device)
        self._keys, self._values = open_sides(spec)
        quantized = self._keys.layout is not None or self._values.layout is not None
        self._dtype = torch.float32 if quantized else spec.torch_dtype
        self._prepared: dict[int | None, list[_Sequence]] = {}
        self._slopes: dict[tuple[float, ...], torch.Tensor] = {}

    def block_bytes(self) -> int:
        """Bytes that one block takes, over all layers, scales included."""
        return self._keys.block_bytes + self._values.block_bytes

    def allocate(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks, with any content; gives up what was allocated before."""
        for side in (self._keys, self._values):
            side.allocate(0)
        for side in (self._keys, self._values):
            side.allocate(num_blocks)

    def tensors(self) -> Sequence[torch.Tensor]:
        """K and V, their scales included, as views [block, layer, ...]."""
        return self._keys.tensors() + self._values.tensors()

    @torch.inference_mode()
    def poison(self) -> None:
        """Fill all slots with NaN, in whatever form they hold it."""
        self._keys.poison()
        self._values.poison()

    def prepare(self, batch: PackedBatch) -> None:  # noqa: ARG002  # what is needed depends on the layers' windows
        """Forget the last step's slots and masks; `attend` makes this step's, once for each window."""
        self._prepared = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch) -> None:
        """Store `keys` and `values` [tokens, kv_heads, head_dim] in the slots that `batch` names."""
        self._keys.write(layer, keys, batch)
        self._values.write(layer, values, batch)

    def attend(self, layer: int, queries: torch.Tensor, batch: PackedBatch, how: LayerAttention) -> torch.Tensor:
        """[tokens, heads, head_dim] for `queries` of that shape, each over its own sequence up to its own position."""
        if how.window not in self._prepared:
            self._prepared[how.window] = self._sequences(batch, how.window)
        turned = self._keys.turn_queries(layer, queries).to(self._dtype)
        out = torch.empty_like(turned)
        for sequence in self._prepared[how.window]:
            keys, values = (side.gather(layer, sequence.slots).to(self._dtype) for side in (self._keys, self._values))
            attended = self._attend_one(self._grouped(turned[sequence.tokens]), keys, values, sequence, how)
            out[sequence.tokens] = attended.permute(2, 0, 1, 3).flatten(1, 2)
        return self._values.turn_back(layer, out).to(queries.dtype)

    def _grouped(self, queries: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] as [kv_heads, queries per KV head, tokens, head_dim]."""
        shape = (self.spec.num_kv_heads, self.spec.queries_per_kv_head)
        return queries.view(len(queries), *shape, -1).permute(1, 2, 0, 3)

    def _attend_one(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequence: _Sequence, how: LayerAttention
    ) -> torch.Tensor:
        """Queries [kv_heads, group, queries, head_dim] over one sequence's keys, values [kv_heads, keys, head_dim]."""
        keys, values = keys[:, None], values[:, None]
        if how.soft_cap is not None or how.alibi_slopes is not None:
            return self._attend_in_float32(queries, keys, values, sequence, how)
        if queries.shape[2] == 1:  # the group's queries see the same keys: attend with them as if they were tokens
            attended = functional.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, scale=how.scale)
            return attended.transpose(1, 2)
        heads = (-1, queries.shape[1], -1, -1)
        return functional.scaled_dot_product_attention(
            queries,
            keys.expand(heads),
            values.expand(heads),
            attn_mask=sequence.mask,
            is_causal=sequence.causal,
            scale=how.scale,
        )

    def _attend_in_float32(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sequence: _Sequence, how: LayerAttention
    ) -> torch.Tensor:
        """The same with every score written out, for what torch's own function has no argument for."""
        first_query = sequence.first_key + keys.shape[2] - queries.shape[2]
        key_positions = torch.arange(keys.shape[2], device=keys.device) + sequence.first_key
        tiles = []
        for number, tile in enumerate(torch.split(queries, _QUERY_TILE, dim=2)):
            positions = torch.arange(tile.shape[2], device=keys.device) + first_query + number * _QUERY_TILE
            scores = tile.float() @ keys.float().transpose(-1, -2) * how.scale
            if how.soft_cap is not None:
                scores = how.soft_cap * torch.tanh(scores / how.soft_cap)
            distances = positions[:, None] - key_positions
            if how.alibi_slopes is not None:
                scores = scores - self._slopes_of(how.alibi_slopes) * distances
            scores = scores.masked_fill(~_sees(distances, how.window), float("-inf"))
            tiles.append((scores.softmax(dim=-1) @ values.float()).to(queries.dtype))
        return torch.cat(tiles, dim=2)

    def _sequences(self, batch: PackedBatch, window: int | None) -> list[_Sequence]:
        """Slots and masks of every sequence of the step."""
        first_keys = [0 if window is None else max(0, start - window + 1) for start in batch.starts]
        counts = [context - first for context, first in zip(batch.contexts, first_keys, strict=True)]
        slots = self._slots(batch, first_keys, counts)
        sequences = []
        for index, (first, count) in enumerate(zip(first_keys, counts, strict=True)):
            tokens = slice(batch.bounds[index], batch.bounds[index + 1])
            num_queries = tokens.stop - tokens.start
            causal = num_queries == count and (window is None or count <= window)
            mask = None if causal or num_queries == 1 else self._mask(num_queries, count, window)
            sequences.append(_Sequence(tokens, first, slots[index], mask, causal and num_queries > 1))
        return sequences

    def _slots(self, batch: PackedBatch, first_keys: list[int], counts: list[int]) -> list[Slots]:
        """Where each sequence's keys lie."""
        lengths = torch.tensor(counts, device=self._device)
        firsts = torch.tensor(first_keys, device=self._device)
        owners = torch.arange(len(counts), device=self._device).repeat_interleave(lengths, output_size=sum(counts))
        positions = ragged_arange(lengths) + firsts[owners]
        blocks = batch.tables[batch.table_bounds[owners] + positions // batch.block_size]
        parts = zip(torch.split(blocks, counts), torch.split(positions % batch.block_size, counts), strict=True)
        return [Slots(*part, batch.block_size) for part in parts]

    def _mask(self, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
        """[queries, keys], True where a query sees a key; the last query stands at the last key."""
        queries = torch.arange(num_keys - num_queries, num_keys, device=self._device)
        return _sees(queries[:, None] - torch.arange(num_keys, device=self._device), window)

    def _slopes_of(self, slopes: tuple[float, ...]) -> torch.Tensor:
        """[kv_heads, queries per KV head, 1, 1] in float32."""
        if slopes not in self._slopes:
            shape = (self.spec.num_kv_heads, self.spec.queries_per_kv_head, 1, 1)
            self._slopes[slopes] = torch.tensor(slopes, dtype=torch.float32, device=self._device).view(shape)
        return self._slopes[slopes]


def _sees(distances: torch.Tensor, window: int | None) -> torch.Tensor:
    """Where a query sees a key that lies `distances` tokens before it."""
    seen = distances >= 0
    return seen if window is None else seen & (distances < window)
