"""Attention with rows multiplied as float32 numbers or as bf16 pairs.

A packed tile of keys is [lanes of a row, TILE], of values [lanes of a tile's tokens, head_dim]: what is multiplied with one lane
lies side by side, so both products are the same small matrix kernel, which keeps its sums in registers.
"""

from __future__ import annotations

from typing import NamedTuple

from treadle_plugins.attention.numba_backend.forms import Place, Reader, WholePairs, load_floats, store_floats
from treadle_plugins.attention.numba_backend.shape import (
    KEY_ROWS,
    KEY_SCALES,
    TILE,
    VALUE_ROWS,
    VALUE_SCALES,
    KernelShape,
    PackedForm,
    Scratch,
)
from treadle_plugins.attention.numba_backend.sides import fetch, for_each_count, num_steps, num_tokens, row_at
from treadle_plugins.attention.numba_backend.states import result
from treadle_plugins.attention.numba_backend.transform import rotate, transform_query
from treadle_plugins.kernels.vectors import COARSE, F32, FINE, I32, I64, Value, Vectors

_TOGETHER = 6


class _Product(NamedTuple):
    """A matrix product: out [rows, columns] = left [rows, depth] @ right [depth, columns]."""

    left_row_bytes: int
    columns: int
    out_row_bytes: int
    pairs: bool


class MatrixKeys:
    """Keys that `reader` reads; `form` says how packed ones were turned."""

    together = _TOGETHER

    def __init__(self, shape: KernelShape, reader: Reader, form: PackedForm | None = None) -> None:
        self._shape, self._scratch, self._reader, self._form = shape, Scratch(shape), reader, form
        self._pairs = isinstance(reader, WholePairs)
        self._row_bytes = form.row_bytes if form else shape.row_bytes
        self._depth = shape.head_dim // 2 if self._pairs else shape.head_dim

    def pack_query(self, v: Vectors, scratch: Value, row: Value, address: Value, side: Value) -> None:
        shape = self._shape
        target = row_at(v, scratch, self._scratch.queries, row, shape.query_bytes)
        if self._pairs:
            for first in range(0, self._depth, v.lanes):
                count = min(v.lanes, self._depth - first)
                v.store(v.cut(v.load_lanes(address, 4 * first, count), count), target, 4 * first)
            return
        row_now = load_row(v, shape, address)
        for place, vector in enumerate(row_now if self._form is None else transform_query(v, self._form, row_now, side)):
            v.store(vector, target, 4 * v.lanes * place)

    def pack(self, v: Vectors, scratch: Value, places: Value, following: Value, side: Value) -> None:
        def one(group: Value, _: list[Value]) -> list[Value]:
            here, later = (row_at(v, area, 0, group, 8 * v.lanes) for area in (places, following))
            for n in range(v.lanes):
                fetch(v, v.at(later, 8 * n), KEY_ROWS, self._row_bytes)
            tokens = [Place(*_at(v, here, 8 * n, KEY_ROWS, KEY_SCALES), side) for n in range(v.lanes)]
            rows = [self._reader.opened(v, place) for place in tokens]
            target = row_at(v, scratch, self._scratch.keys, group, 4 * v.lanes)
            for lane in range(0, self._depth, v.lanes):
                width = min(v.lanes, self._depth - lane)
                columns = v.transpose([self._reader.key_lanes(v, row, lane, width) for row in rows])
                for column in range(width):
                    v.store(columns[column], target, 4 * TILE * (lane + column))
            return []

        v.loop(num_steps(v, num_tokens(v, places), v.lanes), [], one)

    def scores(self, v: Vectors, scratch: Value, first: Value, rows: Value) -> None:
        product = _Product(self._shape.query_bytes, TILE, 4 * TILE, self._pairs)
        left = row_at(v, scratch, self._scratch.queries, first, product.left_row_bytes)
        out = row_at(v, scratch, self._scratch.scores, first, product.out_row_bytes)
        right = v.at(scratch, self._scratch.keys)

        def emit(count: int) -> None:
            _multiply(v, product, count, (left, right, out), I64(self._depth), None)

        for_each_count(v, rows, self.together, emit)


class MatrixValues:
    """Values that `reader` reads; `form` says how packed ones were turned."""

    together = _TOGETHER

    def __init__(self, shape: KernelShape, reader: Reader, form: PackedForm | None = None) -> None:
        self._shape, self._scratch, self._reader, self._form = shape, Scratch(shape), reader, form
        self._pairs = isinstance(reader, WholePairs)
        self.exp2: tuple[float, ...] = COARSE if self._pairs else FINE
        self._row_bytes = form.row_bytes if form else shape.row_bytes

    def store_probability(self, v: Vectors, probability: Value, place: Value, start: int) -> Value:
        if not self._pairs:
            v.store(probability, place, 4 * start)
            return probability
        rounded = v.to_bf16(probability)
        v.store(rounded, place, 2 * start)
        return v.as_floats(v.builder.shl(v.builder.zext(rounded, v.ints), v.int_constant([16] * v.lanes)))

    def pack(self, v: Vectors, scratch: Value, places: Value, following: Value, side: Value) -> None:
        shape, tokens = self._shape, self._reader.tokens

        def one(step: Value, _: list[Value]) -> list[Value]:
            here, later = (row_at(v, area, 0, step, 8 * tokens) for area in (places, following))
            for n in range(tokens):
                fetch(v, v.at(later, 8 * n), VALUE_ROWS, self._row_bytes)
            found = [Place(*_at(v, here, 8 * n, VALUE_ROWS, VALUE_SCALES), side) for n in range(tokens)]
            rows = [self._reader.opened(v, place) for place in found]
            target = row_at(v, scratch, self._scratch.values, step, 4 * shape.head_dim)
            element = 0
            while element < shape.head_dim:
                for lanes in self._reader.value_lanes(v, rows, element):
                    v.store(lanes, target, 4 * element)
                    element += v.lanes
            return []

        v.loop(num_steps(v, num_tokens(v, places), tokens), [], one)

    def share(self, v: Vectors, scratch: Value, row: Value) -> None:
        """Nothing is left to do."""

    def weigh(self, v: Vectors, scratch: Value, state: Value, first: Value, rows: Value, places: Value) -> None:
        shape = self._shape
        product = _Product(4 * TILE, shape.head_dim, shape.state_bytes, self._pairs)
        left = row_at(v, scratch, self._scratch.scores, first, product.left_row_bytes)
        states = row_at(v, state, 0, first, shape.state_bytes)
        right, steps = v.at(scratch, self._scratch.values), num_steps(v, num_tokens(v, places), self._reader.tokens)

        def emit(now: int) -> None:
            factors = [v.splat(v.load(F32, states, shape.state_bytes * row + 4)) for row in range(now)]
            _multiply(v, product, now, (left, right, v.at(states, shape.values_at)), steps, factors)

        for_each_count(v, rows, self.together, emit)

    def finish(self, v: Vectors, state: Value, row: Value, out: Value, side: Value) -> None:  # noqa: ARG002  # others read there
        values = result(v, self._shape, state, row)
        if self._form is not None and self._form.rotation is not None:
            values = list(rotate(v, values, self._form.rotation))
        store_row(v, self._shape, values, out)


def load_row(v: Vectors, shape: KernelShape, address: Value) -> list[Value]:
    """A head's elements at `address` as vectors of float32."""
    return [load_floats(v, shape.dtype, address, shape.item_bytes * first) for first in range(0, shape.head_dim, v.lanes)]


def store_row(v: Vectors, shape: KernelShape, row: list[Value], address: Value) -> None:
    """The reverse, rounded."""
    for place, vector in enumerate(row):
        store_floats(v, vector, shape.dtype, address, shape.item_bytes * v.lanes * place)


def _at(v: Vectors, places: Value, offset: int, rows: int, scales: int) -> tuple[Value, Value]:
    """Addresses of a token's row and of its scales."""
    row, scale = (v.load(I64, places, 8 * TILE * kind + offset) for kind in (rows, scales))
    return row, scale


def _multiply(
    v: Vectors,
    product: _Product,
    rows: int,
    where: tuple[Value, Value, Value],
    depth: Value,
    factors: list[Value] | None,
) -> None:
    """`rows` rows of a product, some columns at a time; with `factors`, added to what `out` holds times the row's factor."""
    left, right, out = where
    together = v.lanes * (4 if v.cpu.registers >= 32 else 2)
    for first in range(0, product.columns, together):
        columns = [4 * column for column in range(first, min(first + together, product.columns), v.lanes)]
        places = [(row, row * product.out_row_bytes + column) for row in range(rows) for column in columns]
        if factors is None:
            start = [v.constant(0.0) for _ in places]
        else:
            start = [v.builder.fmul(v.load(v.floats, out, place), factors[row]) for row, place in places]

        def one(index: Value, sums: list[Value], columns: list[int] = columns) -> list[Value]:
            line, here = row_at(v, right, 0, index, 4 * product.columns), row_at(v, left, 0, index, 4)
            others = [v.load(v.ints, line, column) for column in columns]
            results = []
            for row in range(rows):
                mine = v.splat(v.load(I32, here, row * product.left_row_bytes))
                totals = sums[row * len(columns) : (row + 1) * len(columns)]
                results += [_add(v, product, mine, other, total) for other, total in zip(others, totals, strict=True)]
            return results

        for (_, place), total in zip(places, v.loop(depth, start, one), strict=True):
            v.store(total, out, place)


def _add(v: Vectors, product: _Product, one: Value, two: Value, total: Value) -> Value:
    return v.dot_pairs(one, two, total) if product.pairs else v.fma(v.as_floats(one), v.as_floats(two), total)
