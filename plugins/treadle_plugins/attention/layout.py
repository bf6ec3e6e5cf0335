"""From a KVFormat to what it asks of storage: which formats can be read, and where things lie in a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from treadle.contracts import KVFormat, StaticChannels
from treadle_plugins.attention.codecs import Channels, Codec
from treadle_plugins.attention.spec import AttentionSpec

BITS = (8, 4, 2)
SCHEME = "linear"


@dataclass(frozen=True)
class ChunkLayout:
    """Where things lie in one chunk, in bytes."""

    block_size: int
    codec: Codec
    static: bool
    """Scales are static: a chunk holds codes only."""

    @property
    def scales_at(self) -> int:
        """Offset of the scales."""
        return self.block_size * self.codec.row_bytes

    @property
    def minima_at(self) -> int:
        """Offset of the minima."""
        return self.scales_at + (0 if self.static else self._numbers)

    @property
    def chunk_bytes(self) -> int:
        """Size of the chunk."""
        return self.minima_at + (0 if self.static or self.codec.symmetric else self._numbers)

    @property
    def _numbers(self) -> int:
        return 2 * self.block_size * self.codec.num_groups

    def codes(self, chunks: torch.Tensor) -> torch.Tensor:
        """View [..., token, row_bytes] of chunks [..., chunk_bytes]."""
        return torch.unflatten(chunks[..., : self.scales_at], -1, (self.block_size, self.codec.row_bytes))

    def scales(self, chunks: torch.Tensor) -> torch.Tensor | None:
        """View [..., token, groups] in float16; None where scales are static."""
        return None if self.static else self._half(chunks, self.scales_at)

    def minima(self, chunks: torch.Tensor) -> torch.Tensor | None:
        """View [..., token, groups] in float16; None where there are none."""
        return None if self.static or self.codec.symmetric else self._half(chunks, self.minima_at)

    def _half(self, chunks: torch.Tensor, first: int) -> torch.Tensor:
        numbers = chunks[..., first : first + self._numbers].view(torch.float16)
        return torch.unflatten(numbers, -1, (self.block_size, self.codec.num_groups))


class SideFormat(NamedTuple):
    """The half of a KVFormat that concerns keys, or values."""

    bits: int | None
    group: int | None
    symmetric: bool
    channels: StaticChannels | None

    def layout(self, block_size: int, head_dim: int) -> ChunkLayout:
        """Of one chunk, for a side that is quantized."""
        assert self.bits is not None, "a side kept whole has no chunks"
        symmetric = self.symmetric if self.channels is None else self.channels.minima is None
        codec = Codec(self.bits, head_dim, self.group or head_dim, symmetric)
        return ChunkLayout(block_size, codec, static=self.channels is not None)


def side_of_keys(form: KVFormat) -> SideFormat:
    """How keys are quantized."""
    return SideFormat(form.key_bits, form.key_group, form.key_symmetric, form.key_channels)


def side_of_values(form: KVFormat) -> SideFormat:
    """How values are quantized."""
    return SideFormat(form.value_bits, form.value_group, form.value_symmetric, form.value_channels)


def unreadable(spec: AttentionSpec) -> str | None:
    """Why storage cannot keep what `spec.kv_format` describes; None when it can."""
    form = spec.kv_format
    if form.scheme != SCHEME:
        return f"KV scheme {form.scheme!r} is not {SCHEME!r}"
    if form.history_dependent:
        return f"KV format {form.name!r} depends on tokens stored before"
    size = form.rotation
    if size is not None and (size < 1 or size & (size - 1) or spec.head_dim % size):
        return f"a rotation of {size} is no power of two that divides the head size {spec.head_dim}"
    for label, side in (("keys", side_of_keys(form)), ("values", side_of_values(form))):
        reason = None if side.bits is None else _side_unreadable(side, spec)
        if reason:
            return f"{label}: {reason}"
    return None


def channels_of(static: StaticChannels, heads: Sequence[Sequence[int]], device: torch.device) -> tuple[Channels, ...]:
    """Static scales of each layer's `heads` as tensors."""

    def chosen(table: Sequence[Sequence[Sequence[float]]], layer: int) -> torch.Tensor:
        return torch.tensor(table[layer], dtype=torch.float32, device=device)[list(heads[layer])]

    minima = static.minima
    return tuple(
        Channels(chosen(static.scales, layer), None if minima is None else chosen(minima, layer)) for layer in range(len(heads))
    )


def _side_unreadable(side: SideFormat, spec: AttentionSpec) -> str | None:
    if side.bits not in BITS:
        return f"{side.bits} bits are none of {', '.join(map(str, BITS))}"
    if spec.head_dim % (8 // side.bits):
        return f"codes of {side.bits} bits do not fill whole bytes of a head of {spec.head_dim}"
    if side.group is not None and (side.group < 1 or spec.head_dim % side.group):
        return f"groups of {side.group} do not divide the head size {spec.head_dim}"
    if side.channels is None:
        return None
    shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    tables = [side.channels.scales] + ([] if side.channels.minima is None else [side.channels.minima])
    if any(not _has_shape(table, shape) for table in tables):
        return f"static scales are not [{shape[0]} layers][{shape[1]} heads][{shape[2]} channels]"
    return None


def _has_shape(table: Sequence[Sequence[Sequence[float]]], shape: tuple[int, int, int]) -> bool:
    layers, heads, channels = shape
    return len(table) == layers and all(len(rows) == heads and all(len(row) == channels for row in rows) for rows in table)
