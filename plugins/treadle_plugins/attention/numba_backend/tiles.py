"""The inner parts of attention, each written once in vector instructions for one KernelShape.

A packed tile of keys is [depth, TILE], of values [steps, head_dim]: what is multiplied with one row element lies side by side, so
both products are the same small matrix kernel, which keeps its sums in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from treadle_plugins.attention.numba_backend import jobs
from treadle_plugins.attention.numba_backend.forms import Reader, load_floats, store_floats
from treadle_plugins.attention.numba_backend.shape import TILE, KernelShape, Scratch
from treadle_plugins.attention.numba_backend.vectors import F32, I32, I64, LOWEST, Value, Vectors

_MOST_ROWS = 6
_LINE = 64
_TWO_LOG2E = 2.8853900817779268


class _Product(NamedTuple):
    """A matrix product: out [rows, columns] = left [rows, depth] @ right [depth, columns]. Sizes in bytes and lanes."""

    left_row_bytes: int
    right_row_bytes: int
    out_row_bytes: int
    columns: int


class Tiles:
    """Emits each part; `v` writes at the caller's place, arguments are int64 values."""

    def __init__(self, shape: KernelShape, keys: Reader, values: Reader) -> None:
        self.shape, self.scratch = shape, Scratch(shape)
        self._keys, self._values = keys, values
        self._starts = range(0, TILE, shape.cpu.lanes)

    def pack_query(self, v: Vectors, scratch: Value, row: Value, address: Value) -> None:
        """Put the query at `address` in its row."""
        shape = self.shape
        target = v.at(v.at(scratch, self.scratch.queries), v.builder.mul(row, I64(4 * shape.depth)))
        for first in range(0, shape.depth, v.lanes):
            if shape.pairs:
                count = min(v.lanes, shape.depth - first)
                v.store(_cut(v, v.load_lanes(address, 4 * first, count), count), target, 4 * first)
            else:
                v.store(load_floats(v, shape.dtype, address, shape.item_bytes * first), target, 4 * first)

    def clear(self, v: Vectors, state: Value, rows: Value) -> None:
        """States of rows that have seen nothing."""
        shape = self.shape

        def one(row: Value, _: list[Value]) -> list[Value]:
            place = v.at(state, v.builder.mul(row, I64(shape.state_bytes)))
            v.store(F32(LOWEST), place)
            for offset in (shape.sums_at, *range(shape.values_at, shape.state_bytes, 4 * v.lanes)):
                v.store(v.constant(0.0), place, offset)
            return []

        v.loop(rows, [], one)

    def ask(self, v: Vectors, places: Value, first: Value, count: Value) -> None:
        """Fetch keys and values `first` to `first + count` of a tile at the addresses in `places`; none if `count` is below 1."""
        b = v.builder

        def one(index: Value, _: list[Value]) -> list[Value]:
            place = v.at(places, b.mul(b.add(first, index), I64(8)))
            for offset, form in ((0, self._keys), (8 * TILE, self._values)):
                address = v.load(I64, place, offset)
                for line in range(0, form.row_bytes, _LINE):
                    v.prefetch(address, line)
            return []

        with b.if_then(b.icmp_signed(">", count, I64(0))):
            v.loop(count, [], one)

    def pack_keys(self, v: Vectors, scratch: Value, places: Value, count: Value) -> None:
        """Transpose the keys at the addresses in `places`."""
        shape, b = self.shape, v.builder
        groups = b.lshr(v.at(count, v.lanes - 1), I64(v.lanes.bit_length() - 1))

        def one(group: Value, _: list[Value]) -> list[Value]:
            first = b.mul(group, I64(8 * v.lanes))
            addresses = [v.load(I64, v.at(places, first), 8 * row) for row in range(v.lanes)]
            target = v.at(v.at(scratch, self.scratch.keys), b.mul(group, I64(4 * v.lanes)))
            for lane in range(0, shape.depth, v.lanes):
                width = min(v.lanes, shape.depth - lane)
                columns = v.transpose([self._keys.key_lanes(v, address, lane, width) for address in addresses])
                for column in range(width):
                    v.store(columns[column], target, 4 * TILE * (lane + column))
            return []

        v.loop(groups, [], one)

    def pack_values(self, v: Vectors, scratch: Value, places: Value, count: Value) -> None:
        """Lay the values at the addresses in `places` side by side."""
        shape, b = self.shape, v.builder
        tokens = 2 if shape.pairs else 1
        width = tokens * v.lanes

        def one(step: Value, _: list[Value]) -> list[Value]:
            first = b.mul(step, I64(8 * tokens))
            addresses = [v.load(I64, v.at(places, first), 8 * (TILE + token)) for token in range(tokens)]
            target = v.at(v.at(scratch, self.scratch.values), b.mul(step, I64(4 * shape.head_dim)))
            for element in range(0, shape.head_dim, width):
                wanted = min(width, shape.head_dim - element)
                for place, lanes in enumerate(self._values.value_lanes(v, addresses, element, wanted)):
                    v.store(lanes, target, 4 * (element + place * v.lanes))
            return []

        v.loop(self._num_steps(v, count), [], one)

    def scores(self, v: Vectors, scratch: Value, first: Value, rows: Value) -> None:
        """Products of a few queries with the packed keys."""
        product = _Product(4 * self.shape.depth, 4 * TILE, 4 * TILE, TILE)
        left = v.at(v.at(scratch, self.scratch.queries), v.builder.mul(first, I64(product.left_row_bytes)))
        out = v.at(v.at(scratch, self.scratch.scores), v.builder.mul(first, I64(product.out_row_bytes)))
        right = v.at(scratch, self.scratch.keys)

        def emit(count: int) -> None:
            self._multiply(v, product, count, left, right, out, I64(self.shape.depth), None)

        self._for_each_count(v, rows, emit)

    def weigh(self, v: Vectors, scratch: Value, state: Value, first: Value, rows: Value, count: Value) -> None:
        """Take a tile's values into a few rows' states, by their probabilities."""
        shape = self.shape
        product = _Product(4 * TILE, 4 * shape.head_dim, shape.state_bytes, shape.head_dim)
        left = v.at(v.at(scratch, self.scratch.scores), v.builder.mul(first, I64(product.left_row_bytes)))
        states = v.at(state, v.builder.mul(first, I64(shape.state_bytes)))
        right, steps = v.at(scratch, self.scratch.values), self._num_steps(v, count)

        def emit(rows_now: int) -> None:
            factors = [v.splat(v.load(F32, states, shape.state_bytes * row + 4)) for row in range(rows_now)]
            self._multiply(v, product, rows_now, left, right, v.at(states, shape.values_at), steps, factors)

        self._for_each_count(v, rows, emit)

    def cap(self, v: Vectors, scratch: Value, job: Value, row: Value) -> None:
        """Bend a row of scores: out * tanh(in * score)."""
        b = v.builder
        place = v.at(v.at(scratch, self.scratch.scores), b.mul(row, I64(4 * TILE)))
        inner, outer = (v.splat(v.load(F32, job, 8 * word)) for word in (jobs.CAP_IN, jobs.CAP_OUT))
        one, zero = v.constant(1.0), v.constant(0.0)
        for start in self._starts:
            x = b.fmul(v.load(v.floats, place, 4 * start), inner)
            negative = b.fcmp_ordered("<", x, zero)
            power = v.exp2(b.fmul(b.select(negative, x, b.fsub(zero, x)), v.constant(_TWO_LOG2E)))
            bent = b.fmul(b.fdiv(b.fsub(one, power), b.fadd(one, power)), outer)
            v.store(b.select(negative, b.fsub(zero, bent), bent), place, 4 * start)

    def soften(self, v: Vectors, scratch: Value, state: Value, job: Value, row: Value, slopes: Value, *seen: Value) -> None:
        """Scores of a row to probabilities, relative to the largest so far. `slopes`: address of the head's slope.

        `seen`: the columns from the first of two up to the second are seen, and the query itself stands right before it.
        """
        b, shape = v.builder, self.shape
        place = v.at(v.at(scratch, self.scratch.scores), b.mul(row, I64(4 * TILE)))
        own = v.at(state, b.mul(row, I64(shape.state_bytes)))
        scale, slope = v.splat(v.load(F32, job, 8 * jobs.SCALE)), v.splat(v.load(F32, slopes))
        low, high = (v.splat(b.trunc(column, I32)) for column in seen)
        exponents, masks = [], []
        for start in self._starts:
            columns = v.int_constant(range(start, start + v.lanes))
            distance = b.sitofp(b.sub(b.add(columns, v.int_constant([1] * v.lanes)), high), v.floats)
            exponent = v.fma(v.load(v.floats, place, 4 * start), scale, b.fmul(slope, distance))
            masks.append(b.and_(b.icmp_signed(">=", columns, low), b.icmp_signed("<", columns, high)))
            exponents.append(b.select(masks[-1], exponent, v.constant(LOWEST)))
        before = v.splat(v.load(F32, own))
        highest = v.splat(v.reduce(_tree(exponents, v.maximum), v.maximum))
        highest = v.maximum(before, highest)
        factor = v.exp2(b.fsub(before, highest))
        sums = []
        for start, exponent, mask in zip(self._starts, exponents, masks, strict=True):
            probability = b.select(mask, v.exp2(b.fsub(exponent, highest)), v.constant(0.0))
            sums.append(self._store_probability(v, probability, place, start))
        total = v.fma(v.load(v.floats, own, shape.sums_at), factor, _tree(sums, b.fadd))
        v.store(b.extract_element(highest, I32(0)), own)
        v.store(b.extract_element(factor, I32(0)), own, 4)
        v.store(total, own, shape.sums_at)

    def join(self, v: Vectors, total: Value, part: Value, rows: Value) -> None:
        """Take the states of one segment into those of all before it."""
        shape, b = self.shape, v.builder

        def one(row: Value, _: list[Value]) -> list[Value]:
            moved = b.mul(row, I64(shape.state_bytes))
            mine, other = v.at(total, moved), v.at(part, moved)
            before, here = (v.splat(v.load(F32, place)) for place in (mine, other))
            highest = v.maximum(before, here)
            weight, weight_here = v.exp2(b.fsub(before, highest)), v.exp2(b.fsub(here, highest))
            v.store(b.extract_element(highest, I32(0)), mine)
            for offset in (shape.sums_at, *range(shape.values_at, shape.state_bytes, 4 * v.lanes)):
                old = b.fmul(v.load(v.floats, mine, offset), weight)
                v.store(v.fma(v.load(v.floats, other, offset), weight_here, old), mine, offset)
            return []

        v.loop(rows, [], one)

    def finish(self, v: Vectors, state: Value, row: Value, out: Value) -> None:
        """Write a row's result to the address `out`."""
        shape, b = self.shape, v.builder
        own = v.at(state, b.mul(row, I64(shape.state_bytes)))
        total = v.reduce(v.load(v.floats, own, shape.sums_at), b.fadd)
        share = v.splat(b.fdiv(F32(1.0), total))
        for element in range(0, shape.head_dim, v.lanes):
            result = b.fmul(v.load(v.floats, own, shape.values_at + 4 * element), share)
            store_floats(v, result, shape.dtype, out, shape.item_bytes * element)

    def _store_probability(self, v: Vectors, probability: Value, place: Value, start: int) -> Value:
        """Store it as it will be multiplied, and return it as it is then: what is summed is what was weighed with."""
        if not self.shape.pairs:
            v.store(probability, place, 4 * start)
            return probability
        rounded = v.to_bf16(probability)
        v.store(rounded, place, 2 * start)
        return v.as_floats(v.builder.shl(v.builder.zext(rounded, v.ints), v.int_constant([16] * v.lanes)))

    def _multiply(
        self,
        v: Vectors,
        product: _Product,
        rows: int,
        left: Value,
        right: Value,
        out: Value,
        depth: Value,
        factors: list[Value] | None,
    ) -> None:
        """`rows` rows of a product, some columns at a time; with `factors`, added to what `out` holds times the row's factor."""
        lanes, b = v.lanes, v.builder
        at_once = lanes * (4 if v.cpu.registers >= 32 else 2)
        add = v.dot_pairs if self.shape.pairs else v.fma
        for first in range(0, product.columns, at_once):
            columns = [4 * column for column in range(first, min(first + at_once, product.columns), lanes)]
            places = [(row, row * product.out_row_bytes + column) for row in range(rows) for column in columns]
            if factors is None:
                start = [v.constant(0.0) for _ in places]
            else:
                start = [b.fmul(v.load(v.floats, out, place), factors[row]) for row, place in places]

            def one(index: Value, sums: list[Value], columns: list[int] = columns) -> list[Value]:
                line = v.at(right, b.mul(index, I64(product.right_row_bytes)))
                others = [v.load(v.ints, line, column) for column in columns]
                here = v.at(left, b.mul(index, I64(4)))
                results = []
                for row in range(rows):
                    mine = v.splat(v.load(I32, here, row * product.left_row_bytes))
                    for place, other in enumerate(others):
                        total = sums[row * len(columns) + place]
                        pair = (mine, other) if self.shape.pairs else (v.as_floats(mine), v.as_floats(other))
                        results.append(add(*pair, total))
                return results

            for (_, place), total in zip(places, v.loop(depth, start, one), strict=True):
                v.store(total, out, place)

    def _for_each_count(self, v: Vectors, rows: Value, emit: Callable[[int], None]) -> None:
        for count in range(1, _MOST_ROWS + 1):
            with v.builder.if_then(v.builder.icmp_signed("==", rows, I64(count))):
                emit(count)

    def _num_steps(self, v: Vectors, count: Value) -> Value:
        return v.builder.lshr(v.at(count, 1), I64(1)) if self.shape.pairs else count


def _cut(v: Vectors, vector: Value, count: int) -> Value:
    """The first `count` lanes."""
    return vector if count == v.lanes else v.shuffle(vector, vector, range(count))


def _tree(vectors: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """All combined, neighbours first."""
    while len(vectors) > 1:
        vectors = [combine(*vectors[n : n + 2]) for n in range(0, len(vectors), 2)]
    return vectors[0]
