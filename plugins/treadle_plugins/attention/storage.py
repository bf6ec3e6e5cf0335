"""Where the pool keeps K and V, as every backend reads and writes it.

Keys and values are two sides, stored alike. A layer's heads on one side are either packed (quantized) or kept whole:

    packed(layer)   uint8        [block, packed head, chunk_bytes]
    whole(layer)    model dtype  [block, whole head, token, head_dim]

Heads keep their order in both; `places` and `is_whole` lead from a KV head to its place. A chunk is what one packed head has in
one block of T tokens. R bytes hold a row of codes, G scales belong to it:

    byte 0                     scales_at = T * R             minima_at = scales_at + 2 * T * G       chunk_bytes
    | codes   uint8 [T, R]     | scales   float16 [T, G]     | minima   float16 [T, G]               |

Minima are there for asymmetric codes only; with static scales, which lie with the backend, a chunk is codes alone. Within a row,
R = head_dim * bits / 8 and byte j holds elements j, j + R, ... with the lowest bits first:

    8 bits    byte j = code[j]
    4 bits    byte j = code[j] | code[j + head_dim / 2] << 4
    2 bits    byte j = code[j] | code[j + head_dim / 4] << 2 | code[j + head_dim / 2] << 4 | code[j + 3 * head_dim / 4] << 6

What codes mean, and how rows become codes, stands in codecs.py. So all that belongs to a block lies under its id and goes with it
through copies, swap, sharing and eviction.

Rows of packed heads may be turned before they are quantized: keys are balanced, `(key - center) / factor`, then keys and values
are rotated. A backend turns queries alike before they meet packed keys (`turn_queries`: times factor, rotated; what the centre
would add is the same for all keys and falls out of softmax), and rotates outputs back where values are packed (`turn_back`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch

from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.codecs import Channels, Encoded, Turn
from treadle_plugins.attention.layout import ChunkLayout, SideFormat, Table, side_of_keys, side_of_values
from treadle_plugins.attention.spec import AttentionSpec

POISON_BYTE = 0xFF
"""Fills a poisoned chunk: its scales and minima are NaN then."""


class Slots:
    """Tokens of one sequence in the pool: `blocks[i]` and `offsets[i]` say where token `i` lies."""

    def __init__(self, blocks: torch.Tensor, offsets: torch.Tensor, block_size: int) -> None:
        self.blocks = blocks
        self.offsets = offsets
        self._block_size = block_size
        self._rows: dict[int, torch.Tensor] = {}

    def rows(self, num_heads: int) -> torch.Tensor:
        """[heads, tokens]: rows of a tensor [block, head, token, ...] of so many heads seen as [block * head * token, ...]."""
        if num_heads not in self._rows:
            firsts = self.blocks * (num_heads * self._block_size) + self.offsets
            heads = torch.arange(num_heads, device=firsts.device) * self._block_size
            self._rows[num_heads] = firsts + heads[:, None]
        return self._rows[num_heads]


class SideStorage:
    """Keys or values of all layers."""

    def __init__(self, spec: AttentionSpec, side: SideFormat, keeps: Callable[[int, int], bool]) -> None:
        """`keeps` says whether a layer's head is kept whole."""
        self._spec = spec
        heads, layers = range(spec.num_kv_heads), range(spec.num_layers)
        self.whole_heads = tuple(tuple(head for head in heads if keeps(layer, head)) for layer in layers)
        self.packed_heads = tuple(tuple(head for head in heads if not keeps(layer, head)) for layer in layers)
        self.layout: ChunkLayout | None = side.layout(spec.block_size, spec.head_dim) if any(self.packed_heads) else None
        self.channels: tuple[Channels, ...] | None = None
        """Static scales of each layer's packed heads; None where scales are stored with the tokens."""
        if side.channels is not None:
            scales, minima = self._of_packed(side.channels.scales), self._per_layer(side.channels.minima)
            self.channels = tuple(Channels(*parts) for parts in zip(scales, minima, strict=True))
        self.turns = self._turns(side)
        """How rows of each layer's packed heads are turned."""
        self._packed: dict[int, torch.Tensor] = {}
        self._whole: dict[int, torch.Tensor] = {}
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return torch.device(self._spec.device)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        packed = sum(map(len, self.packed_heads)) * (self.layout.chunk_bytes if self.layout else 0)
        elements = sum(map(len, self.whole_heads)) * self._spec.block_size * self._spec.head_dim
        return packed + elements * self._spec.torch_dtype.itemsize

    @cached_property
    def places(self) -> torch.Tensor:
        """[layers, kv_heads] int64: place of a head among its layer's packed heads, or among its whole ones."""
        spec = self._spec
        table = torch.empty(spec.num_layers, spec.num_kv_heads, dtype=torch.int64)
        for layer in range(spec.num_layers):
            for heads in (self.packed_heads[layer], self.whole_heads[layer]):
                table[layer, list(heads)] = torch.arange(len(heads))
        return table.to(self.device)

    @cached_property
    def is_whole(self) -> torch.Tensor:
        """[layers, kv_heads] bool: which of the two `places` refers to."""
        table = torch.zeros(self._spec.num_layers, self._spec.num_kv_heads, dtype=torch.bool)
        for layer, heads in enumerate(self.whole_heads):
            table[layer, list(heads)] = True
        return table.to(self.device)

    def packed(self, layer: int) -> torch.Tensor:
        """[block, packed heads, chunk_bytes] uint8, contiguous."""
        return self._views[layer][0]

    def whole(self, layer: int) -> torch.Tensor:
        """[block, whole heads, token, head_dim], contiguous."""
        return self._views[layer][1]

    def allocate(self, num_blocks: int) -> None:
        """Make room, with any content. Layers with as many heads of a kind share a tensor: a copy of blocks is a few calls."""
        spec, chunk_bytes = self._spec, self.layout.chunk_bytes if self.layout else 0
        self._views, self._packed, self._whole = [], {}, {}
        for count, layers in _counted(self.packed_heads):
            self._packed[count] = torch.empty(layers, num_blocks, count, chunk_bytes, dtype=torch.uint8, device=self.device)
        for count, layers in _counted(self.whole_heads):
            shape = (layers, num_blocks, count, spec.block_size, spec.head_dim)
            self._whole[count] = torch.empty(shape, dtype=spec.torch_dtype, device=self.device)
        packed, whole = _handed_out(self._packed), _handed_out(self._whole)
        self._views = [
            (next(packed[len(packed_heads)]), next(whole[len(whole_heads)]))
            for packed_heads, whole_heads in zip(self.packed_heads, self.whole_heads, strict=True)
        ]

    def tensors(self) -> list[torch.Tensor]:
        """All of it as views with the block id first."""
        parts = [*self._packed.items(), *self._whole.items()]
        return [tensor.transpose(0, 1) for count, tensor in parts if count]

    def poison(self) -> None:
        """Fill with what spoils every result that it reaches; codes under static scales can only be made wrong."""
        for tensor in self._packed.values():
            tensor.fill_(POISON_BYTE)
        for tensor in self._whole.values():
            tensor.fill_(float("nan"))

    def write(self, layer: int, rows: torch.Tensor, batch: PackedBatch) -> None:
        """Store `rows` [tokens, kv_heads, head_dim] in the slots that `batch` names, each quantized by itself."""
        slots = (batch.slot_blocks, slice(None), batch.slot_offsets)
        if self.whole_heads[layer]:
            self.whole(layer)[slots] = self._heads(rows, self.whole_heads[layer])
        if self.packed_heads[layer]:
            self._write_packed(layer, self._heads(rows, self.packed_heads[layer]), slots)

    def gather(self, layer: int, slots: Slots) -> torch.Tensor:
        """[kv_heads, tokens, head_dim] of one sequence: in float32 where any head of the layer is packed."""
        whole_heads, packed_heads = self.whole_heads[layer], self.packed_heads[layer]
        whole = self.whole(layer).view(-1, self._spec.head_dim)[slots.rows(len(whole_heads))] if whole_heads else None
        if not packed_heads:
            assert whole is not None, "a head is either packed or whole"
            return whole
        unpacked = self._gather_packed(layer, slots)
        if whole is None:
            return unpacked
        rows = unpacked.new_empty(self._spec.num_kv_heads, *unpacked.shape[1:])
        rows[list(packed_heads)], rows[list(whole_heads)] = unpacked, whole.float()
        return rows

    def turn_queries(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Queries [tokens, heads, head_dim] as they meet the stored keys; in float32 where anything is turned."""
        return self._on_packed(layer, queries, self.turns[layer].queries)

    def turn_back(self, layer: int, outputs: torch.Tensor) -> torch.Tensor:
        """Sums of stored values [tokens, heads, head_dim] as sums of values; in float32 where anything is turned."""
        return self._on_packed(layer, outputs, self.turns[layer].outputs)

    def _on_packed(self, layer: int, rows: torch.Tensor, turn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`turn` [tokens, KV heads, queries of each, head_dim] of those heads whose KV is packed."""
        heads = self.packed_heads[layer]
        if self.turns[layer].is_none or not heads:
            return rows
        grouped = torch.unflatten(rows.float(), 1, (self._spec.num_kv_heads, -1))
        if len(heads) == self._spec.num_kv_heads:
            return turn(grouped).flatten(1, 2)
        turned = grouped.clone()
        turned[:, list(heads)] = turn(grouped[:, list(heads)])
        return turned.flatten(1, 2)

    def _write_packed(self, layer: int, rows: torch.Tensor, slots: tuple[torch.Tensor, slice, torch.Tensor]) -> None:
        assert self.layout is not None, "packed heads have a layout"
        rows = self.turns[layer].rows(rows)
        codec, chunks = self.layout.codec, self.packed(layer)
        encoded = codec.encode(rows) if self.channels is None else codec.encode_static(rows, self.channels[layer])
        self.layout.codes(chunks)[slots] = encoded.codes
        for target, source in ((self.layout.scales(chunks), encoded.scales), (self.layout.minima(chunks), encoded.minima)):
            if target is not None and source is not None:
                target[slots] = source

    def _gather_packed(self, layer: int, slots: Slots) -> torch.Tensor:
        """[packed heads, tokens, head_dim] in float32, as they were turned."""
        assert self.layout is not None, "packed heads have a layout"
        codec, chunks, where = self.layout.codec, self.packed(layer), (slots.blocks, slice(None), slots.offsets)
        scales, minima = self.layout.scales(chunks), self.layout.minima(chunks)
        stored = Encoded(
            self.layout.codes(chunks)[where],
            None if scales is None else scales[where],
            None if minima is None else minima[where],
        )
        rows = codec.decode(stored) if self.channels is None else codec.decode_static(stored, self.channels[layer])
        return rows.transpose(0, 1)

    def _turns(self, side: SideFormat) -> tuple[Turn, ...]:
        factors = self._per_layer(side.balance.factors if side.balance else None)
        centers = self._per_layer(side.balance.centers if side.balance else None)
        return tuple(Turn(self._spec.kv_format.rotation, *parts) for parts in zip(factors, centers, strict=True))

    def _per_layer(self, table: Table | None) -> Sequence[torch.Tensor | None]:
        """The same; None for each layer where there is no table."""
        return [None] * self._spec.num_layers if table is None else self._of_packed(table)

    def _of_packed(self, table: Table) -> list[torch.Tensor]:
        """For each layer [packed heads, head_dim] in float32."""
        tensors = (torch.tensor(rows, dtype=torch.float32, device=self.device) for rows in table)
        return [rows[list(heads)] for rows, heads in zip(tensors, self.packed_heads, strict=True)]

    def _heads(self, rows: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        return rows if len(heads) == rows.shape[1] else rows[:, list(heads)]


def open_sides(spec: AttentionSpec) -> tuple[SideStorage, SideStorage]:
    """Storage of keys and of values for a format that `unreadable` finds nothing against; nothing is allocated yet."""
    form = spec.kv_format
    return SideStorage(spec, side_of_keys(form), form.keeps_keys), SideStorage(spec, side_of_values(form), form.keeps_values)


def _counted(heads: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """How many layers have so many heads, for each number of heads: (heads, layers)."""
    return sorted(Counter(map(len, heads)).items())


def _handed_out(tensors: dict[int, torch.Tensor]) -> dict[int, Iterator[torch.Tensor]]:
    """For each number of heads, the layers' tensors one after another."""
    return {count: iter(tensor.unbind(0)) for count, tensor in tensors.items()}
