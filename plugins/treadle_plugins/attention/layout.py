"""From a KVFormat to what it asks of storage: which formats can be read, and where things lie in a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from treadle.contracts import KeyBalance, KVFormat, StaticChannels
from treadle_plugins.attention.codecs import Codec
from treadle_plugins.attention.spec import AttentionSpec

Table = Sequence[Sequence[Sequence[float]]]
"""[layer][head][channel]"""
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
    balance: KeyBalance | None = None

    def layout(self, block_size: int, head_dim: int) -> ChunkLayout:
        """Of one chunk, for a side that is quantized."""
        assert self.bits is not None, "a side kept whole has no chunks"
        symmetric = self.symmetric if self.channels is None else self.channels.minima is None
        codec = Codec(self.bits, head_dim, self.group or head_dim, symmetric)
        return ChunkLayout(block_size, codec, static=self.channels is not None)


def side_of_keys(form: KVFormat) -> SideFormat:
    """How keys are quantized."""
    return SideFormat(form.key_bits, form.key_group, form.key_symmetric, form.key_channels, form.key_balance)


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
    keys = (f"keys: {reason}" for reason in _side_faults(side_of_keys(form), spec))
    values = (f"values: {reason}" for reason in _side_faults(side_of_values(form), spec))
    return next(chain(_turn_faults(form, spec), keys, values), None)


def _turn_faults(form: KVFormat, spec: AttentionSpec) -> Iterator[str]:
    size, balance = form.rotation, form.key_balance
    if size is not None and (size < 1 or size & (size - 1) or spec.head_dim % size):
        yield f"a rotation of {size} is no power of two that divides the head size {spec.head_dim}"
    if balance is None:
        return
    if balance.centers is not None and spec.soft_cap is not None:
        yield "keys are stored without their centers, but the model caps its scores, which must be whole for that"
    if not _fits(spec, balance.factors, balance.centers):
        yield f"the balance of keys is not {_shape(spec)}"


def _side_faults(side: SideFormat, spec: AttentionSpec) -> Iterator[str]:
    if side.bits is None:
        return
    if side.bits not in BITS:
        yield f"{side.bits} bits are none of {', '.join(map(str, BITS))}"
    elif spec.head_dim % (8 // side.bits):
        yield f"codes of {side.bits} bits do not fill whole bytes of a head of {spec.head_dim}"
    if side.group is not None and (side.group < 1 or spec.head_dim % side.group):
        yield f"groups of {side.group} do not divide the head size {spec.head_dim}"
    if side.channels is not None and not _fits(spec, side.channels.scales, side.channels.minima):
        yield f"static scales are not {_shape(spec)}"


def _shape(spec: AttentionSpec) -> str:
    return f"[{spec.num_layers} layers][{spec.num_kv_heads} heads][{spec.head_dim} channels]"


def _fits(spec: AttentionSpec, *tables: Table | None) -> bool:
    """Whether each table has a number for each channel of each head of each layer."""
    return all(
        len(table) == spec.num_layers
        and all(len(rows) == spec.num_kv_heads and all(len(row) == spec.head_dim for row in rows) for rows in table)
        for table in tables
        if table is not None
    )
