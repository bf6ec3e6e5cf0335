"""What a set of kernels is compiled for, and how their working memory is laid out.

The context is cut at fixed positions: into tiles of TILE tokens, and segments of SEGMENT tokens. A query's result is computed
tile by tile within a segment, and the segments' results are joined in order. None of it depends on the batch, on how the queries
are cut into chunks, on threads or on the block size, so neither does a single bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle_plugins.kernels.cpu import Cpu

TILE = 64
"""Tokens whose scores are computed at once."""
SEGMENT = 256
"""Tokens after which a softmax starts anew, to be joined later: the smallest piece of a context that a thread takes."""
ROWS = 48
"""Rows, one for each query head of each query token, that share a packed tile: enough to make packing cheap beside them."""
LINE = 64
"""Bytes of a cache line; whatever is laid out here starts on one."""
PARAMETERS = 128
"""Bytes for numbers that belong to a row of queries."""


@dataclass(frozen=True)
class PackedForm:
    """How packed keys, or values, lie in a chunk (see storage.py), and what was done to them before."""

    bits: int
    head_dim: int
    group: int
    symmetric: bool
    static: bool
    row_bytes: int
    scales_at: int
    """Offset of the scales in a chunk."""
    minimum_after: int
    """Bytes from a scale to its minimum."""
    rotation: int | None
    balanced: bool
    """Keys were divided by factors."""
    centered: bool
    """Centres were taken from keys."""

    @property
    def num_groups(self) -> int:
        """Scales of a row."""
        return self.head_dim // self.group

    @property
    def middle(self) -> int:
        """The code of 0, where codes are symmetric."""
        return 1 << (self.bits - 1)

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1


@dataclass(frozen=True)
class SideForm:
    """How keys, or values, are stored: some heads whole, some packed."""

    whole: bool = True
    """Some head is kept whole."""
    packed: PackedForm | None = None
    """How the other heads are stored, if there are any."""


@dataclass(frozen=True)
class KernelShape:
    """What is constant in the compiled code."""

    dtype: str
    """Precision of queries, outputs, and of keys and values that are kept whole."""
    head_dim: int
    cpu: Cpu
    keys: SideForm = SideForm()
    values: SideForm = SideForm()

    @property
    def pairs(self) -> bool:
        """Whole rows are multiplied as bf16 pairs, not as float32 numbers."""
        return self.dtype == "bfloat16" and self.cpu.has_bf16_dot

    @property
    def quads(self) -> bool:
        """Packed rows are multiplied as quads of bytes, not as float32 numbers."""
        return self.dtype != "float32" and self.cpu.has_byte_dot

    @property
    def item_bytes(self) -> int:
        """Bytes of one number in `dtype`."""
        return 4 if self.dtype == "float32" else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's whole keys of one head."""
        return self.head_dim * self.item_bytes

    @property
    def query_bytes(self) -> int:
        """Bytes of a row of queries, as it is multiplied, and its parameters."""
        return 4 * self.head_dim + PARAMETERS

    @property
    def state_bytes(self) -> int:
        """One row's softmax so far: maximum, last factor, sums [lanes], then the weighted values [head_dim]."""
        return self.values_at + 4 * self.head_dim

    @property
    def sums_at(self) -> int:
        """Offset of the sums in a state."""
        return LINE

    @property
    def values_at(self) -> int:
        """Offset of the weighted values in a state."""
        return 2 * LINE

    @property
    def name(self) -> str:
        """For logs and file names, such as `bfloat16-d64-k8v4`."""
        sides = (str(side.packed.bits) if side.packed else "w" for side in (self.keys, self.values))
        return f"{self.dtype}-d{self.head_dim}-" + "".join(f"{label}{bits}" for label, bits in zip("kv", sides, strict=True))


class Scratch:
    """Offsets in bytes of one thread's working memory."""

    def __init__(self, shape: KernelShape) -> None:
        self._end = 0
        groups = [side.packed.num_groups if side.packed else 0 for side in (shape.keys, shape.values)]
        self.queries = self._take(ROWS * shape.query_bytes)
        self.scores = self._take(4 * ROWS * TILE)  # [rows, TILE], then probabilities at the start of each row
        self.shares = self._take(ROWS * groups[1] * SHARE_BYTES)  # [rows, groups], probabilities times scales, as bytes
        self.keys = self._take(4 * shape.head_dim * TILE)  # [at most head_dim, TILE] lanes
        self.key_scales = self._take(2 * 4 * groups[0] * TILE)  # [groups, TILE], then what goes with them: [groups, TILE]
        self.values = self._take(4 * shape.head_dim * TILE)  # [at most TILE, head_dim] lanes
        self.value_scales = self._take(2 * 4 * groups[1] * TILE)
        self.total = self._take(ROWS * shape.state_bytes)  # states, all segments joined
        self.part = self._take(ROWS * shape.state_bytes)  # states of one segment
        self.places = (self._take(PLACES_BYTES), self._take(PLACES_BYTES))  # of this tile and of the next
        scales = (side.packed.minimum_after + 2 * side.packed.num_groups for side in (shape.keys, shape.values) if side.packed)
        self.zeros = self._take(max(4 * shape.head_dim, *scales, LINE))  # a row of zeros, or scales and minima
        self.num_bytes = self._take(0) + 2 * LINE  # lines between two threads

    def _take(self, num_bytes: int) -> int:
        place = self._end
        self._end += -(-num_bytes // LINE) * LINE
        return place


KEY_ROWS, VALUE_ROWS, KEY_SCALES, VALUE_SCALES = range(4)
"""What a tile's places hold: four times TILE addresses, ..."""
PLACES_COUNT = 4 * TILE
"""... and the number of tokens, as a word."""
PLACES_BYTES = 8 * (PLACES_COUNT + 1)
SHARE_BYTES = 2 * TILE + LINE
"""One row's probabilities of a tile as two bytes each, the upper ones first, then their scale and what is added."""
