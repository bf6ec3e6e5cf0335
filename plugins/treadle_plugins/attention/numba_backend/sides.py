"""What the inner parts of attention are made of: one side for keys, one for values, for each way in which heads are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from treadle_plugins.attention.numba_backend.shape import LINE, PLACES_COUNT, TILE
from treadle_plugins.kernels.vectors import I64, Value, Vectors


class Keys(Protocol):
    """Scores from stored keys. `side`: address of what the job says of the head's keys."""

    together: int
    """Rows that `scores` takes at once."""

    def pack_query(self, v: Vectors, scratch: Value, row: Value, address: Value, side: Value) -> None:
        """Put the query at `address` in its row, as it will be multiplied."""
        ...

    def pack(self, v: Vectors, scratch: Value, places: Value, following: Value, side: Value) -> None:
        """Lay a tile's keys out for multiplication, and fetch the next one's."""
        ...

    def scores(self, v: Vectors, scratch: Value, first: Value, rows: Value) -> None:
        """Products of some queries with the packed keys."""
        ...


class Values(Protocol):
    """Weighted sums of stored values. `side`: address of what the job says of the head's values."""

    together: int
    """Rows that `weigh` takes at once."""
    exp2: tuple[float, ...]
    """Coefficients that are exact enough for probabilities."""

    def store_probability(self, v: Vectors, probability: Value, place: Value, start: int) -> Value:
        """Put probabilities of columns from `start` on into the row at `place`, and return them as they will weigh."""
        ...

    def pack(self, v: Vectors, scratch: Value, places: Value, following: Value, side: Value) -> None:
        """Lay a tile's values out for multiplication, and fetch the next one's."""
        ...

    def share(self, v: Vectors, scratch: Value, row: Value) -> None:
        """Once values are packed: make a row's probabilities ready to be multiplied."""
        ...

    def weigh(self, v: Vectors, scratch: Value, state: Value, first: Value, rows: Value, places: Value) -> None:
        """Take a tile's values into some rows' states."""
        ...

    def finish(self, v: Vectors, state: Value, row: Value, out: Value, side: Value) -> None:
        """Write a row's result to the address `out`."""
        ...


def row_at(v: Vectors, base: Value, offset: int, row: Value, row_bytes: int) -> Value:
    """Address of a row in an array at `base + offset`."""
    return v.at(v.at(base, offset), v.builder.mul(row, I64(row_bytes)))


def num_tokens(v: Vectors, places: Value) -> Value:
    """Tokens of the tile at these places."""
    return v.load(I64, places, 8 * PLACES_COUNT)


def num_steps(v: Vectors, count: Value, step: int) -> Value:
    """How many steps of `step`, a power of two, cover `count`."""
    return v.builder.lshr(v.at(count, step - 1), I64(step.bit_length() - 1))


def fetch(v: Vectors, places: Value, rows: int, row_bytes: int) -> None:
    """Ask for a row of which the address lies at `places`, among those of kind `rows`."""
    address = v.load(I64, places, 8 * TILE * rows)
    for line in range(0, row_bytes, LINE):
        v.prefetch(address, line)


def for_each_count(v: Vectors, rows: Value, most: int, emit: Callable[[int], None]) -> None:
    """`emit(n)` for whichever n from 1 to `most` is the number of rows."""
    for count in range(1, most + 1):
        with v.builder.if_then(v.builder.icmp_signed("==", rows, I64(count))):
            emit(count)


def chunks(v: Vectors) -> range:
    """First columns of a tile's vectors."""
    return range(0, TILE, v.lanes)


def tree(vectors: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """All combined, neighbours first."""
    while len(vectors) > 1:
        vectors = [combine(*vectors[n : n + 2]) if n + 1 < len(vectors) else vectors[n] for n in range(0, len(vectors), 2)]
    return vectors[0]
