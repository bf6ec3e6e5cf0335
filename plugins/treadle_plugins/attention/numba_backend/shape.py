"""What a set of kernels is compiled for, and how their working memory is laid out.

The context is cut at fixed positions: into tiles of TILE tokens, and segments of SEGMENT tokens. A query's result is computed
tile by tile within a segment, and the segments' results are joined in order. None of it depends on the batch, on how the queries
are cut into chunks, on threads or on the block size, so neither does a single bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle_plugins.attention.numba_backend.cpu import Cpu

TILE = 64
"""Tokens whose scores are computed at once."""
SEGMENT = 256
"""Tokens after which a softmax starts anew, to be joined later: the smallest piece of a context that a thread takes."""
ROWS = 48
"""Rows, one for each query head of each query token, that share a packed tile: enough to make packing cheap beside them."""
_ALIGNMENT = 64


@dataclass(frozen=True)
class KernelShape:
    """Sizes that are constants in the compiled code."""

    dtype: str
    """Precision of queries, outputs, and of keys and values that are kept whole."""
    head_dim: int
    group: int
    """Query heads that share a KV head."""
    cpu: Cpu

    @property
    def pairs(self) -> bool:
        """Products are taken of bf16 pairs, not of float32 numbers."""
        return self.dtype == "bfloat16" and self.cpu.has_bf16_dot

    @property
    def item_bytes(self) -> int:
        """Bytes of one number in `dtype`."""
        return 4 if self.dtype == "float32" else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys of one head, in `dtype`."""
        return self.head_dim * self.item_bytes

    @property
    def depth(self) -> int:
        """32-bit lanes, of one float32 or two bf16 numbers, in a row to be multiplied."""
        return self.head_dim // 2 if self.pairs else self.head_dim

    @property
    def steps(self) -> int:
        """The same for a row of a tile's probabilities."""
        return TILE // 2 if self.pairs else TILE

    @property
    def tokens(self) -> int:
        """Query tokens that share a packed tile."""
        return max(1, ROWS // self.group)

    @property
    def rows(self) -> int:
        """Rows that share a packed tile."""
        return self.tokens * self.group

    @property
    def state_bytes(self) -> int:
        """One row's softmax so far: maximum, last factor, sums [lanes], then the weighted values [head_dim]."""
        return self.values_at + 4 * self.head_dim

    @property
    def sums_at(self) -> int:
        """Offset of the sums in a state."""
        return _ALIGNMENT

    @property
    def values_at(self) -> int:
        """Offset of the weighted values in a state."""
        return 2 * _ALIGNMENT

    @property
    def name(self) -> str:
        """For logs and file names, such as `bfloat16-d64-g3`."""
        return f"{self.dtype}-d{self.head_dim}-g{self.group}"


class Scratch:
    """Offsets in bytes of one thread's working memory."""

    def __init__(self, shape: KernelShape) -> None:
        self._end = 0
        self.queries = self._take(4 * shape.rows * shape.depth)  # [rows, depth]
        self.scores = self._take(4 * shape.rows * TILE)  # [rows, TILE], then probabilities at the start of each row
        self.keys = self._take(4 * shape.depth * TILE)  # [depth, TILE]
        self.values = self._take(4 * shape.steps * shape.head_dim)  # [steps, head_dim]
        self.total = self._take(shape.rows * shape.state_bytes)  # states, all segments joined
        self.part = self._take(shape.rows * shape.state_bytes)  # states of one segment
        self.places = tuple(self._take(2 * 8 * TILE) for _ in range(2))  # of this tile and the next: addresses [side, TILE]
        self.zeros = self._take(4 * shape.head_dim)  # a row of zeros
        self.num_bytes = self._take(0) + 2 * _ALIGNMENT  # a line between two threads

    def _take(self, num_bytes: int) -> int:
        place = self._end
        self._end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return place
