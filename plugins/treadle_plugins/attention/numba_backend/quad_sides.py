"""Attention with packed rows multiplied as they are stored: four unsigned codes with four signed bytes at once.

What meets the codes, a query or a tile's probabilities, is a row of whole numbers (see quads.py) times one float32 scale. Sums
are exact; scales of the codes, and what they start from, come in afterwards:

    score       = sum over groups of  scale * (numbers . codes) + start * sum(numbers)        start: minimum, or -middle * scale
    values      = numbers . codes,  with numbers for  probability * scale;   plus  probability . start
"""

from __future__ import annotations

from llvmlite import ir

from treadle_plugins.attention.numba_backend.forms import static_channels
from treadle_plugins.attention.numba_backend.matrix import load_row, store_row
from treadle_plugins.attention.numba_backend.quads import (
    four_by_four,
    products,
    store_bytes,
    total_of,
    unpack_scales,
    whole_numbers,
)
from treadle_plugins.attention.numba_backend.shape import (
    KEY_ROWS,
    KEY_SCALES,
    SHARE_BYTES,
    TILE,
    VALUE_ROWS,
    VALUE_SCALES,
    KernelShape,
    PackedForm,
    Scratch,
)
from treadle_plugins.attention.numba_backend.sides import chunks, fetch, for_each_count, num_steps, num_tokens, row_at, tree
from treadle_plugins.attention.numba_backend.states import result
from treadle_plugins.attention.numba_backend.transform import rotate, transform_query
from treadle_plugins.kernels.vectors import COARSE, F32, I8, I64, Value, Vectors

_TOGETHER = 3


class QuadKeys:
    """Packed keys."""

    together = _TOGETHER

    def __init__(self, shape: KernelShape, form: PackedForm) -> None:
        self._shape, self._scratch, self._form = shape, Scratch(shape), form

    def pack_query(self, v: Vectors, scratch: Value, row: Value, address: Value, side: Value) -> None:
        """As bytes, upper ones, then lower ones; then the scale, and for each group what its starts are multiplied by."""
        shape, form = self._shape, self._form
        target = row_at(v, scratch, self._scratch.queries, row, shape.query_bytes)
        query = list(transform_query(v, form, load_row(v, shape, address), side))
        minima = None
        if form.static:
            channels = [static_channels(v, form, side, place * v.lanes) for place in range(len(query))]
            minima = [v.builder.fmul(x, minimum) for x, (_, minimum) in zip(query, channels, strict=True) if minimum is not None]
            query = [v.builder.fmul(x, scale) for x, (scale, _) in zip(query, channels, strict=True)]
        scale, numbers = whole_numbers(v, query)
        store_bytes(v, numbers, target, shape.head_dim)
        v.store(scale, target, 4 * shape.head_dim)
        per_group = form.group // v.lanes
        for group in range(form.num_groups):
            added = v.builder.sitofp(total_of(v, numbers[group * per_group : (group + 1) * per_group]), F32)
            total = v.builder.fmul(added, scale)
            if form.static:
                total = (
                    v.reduce(tree(minima, v.builder.fadd), v.builder.fadd) if minima else v.builder.fmul(total, F32(-form.middle))
                )
            v.store(total, target, 4 * (shape.head_dim + 1 + group))

    def pack(self, v: Vectors, scratch: Value, places: Value, following: Value, side: Value) -> None:  # noqa: ARG002
        form, b = self._form, v.builder
        lanes = form.row_bytes // 4
        mask = v.int_constant([form.top * 0x01010101] * v.lanes)

        def one(group: Value, _: list[Value]) -> list[Value]:
            here, later = (row_at(v, area, 0, group, 8 * v.lanes) for area in (places, following))
            for n in range(v.lanes):
                fetch(v, v.at(later, 8 * n), KEY_ROWS, form.row_bytes)
            fetch(v, later, KEY_SCALES, 1)
            rows = [v.load(I64, here, 8 * (TILE * KEY_ROWS + n)) for n in range(v.lanes)]
            target = row_at(v, scratch, self._scratch.keys, group, 4 * v.lanes)
            for first in range(0, lanes, v.lanes):
                width = min(v.lanes, lanes - first)
                columns = v.transpose([v.load_lanes(row, 4 * first, width) for row in rows])
                for column in range(width):
                    for part in range(8 // form.bits):
                        codes = columns[column]
                        if form.bits < 8:
                            codes = b.and_(b.lshr(codes, v.int_constant([part * form.bits] * v.lanes)), mask)
                        v.store(codes, target, 4 * TILE * (part * lanes + first + column))
            unpack_scales(
                v, form, v.at(here, 8 * TILE * KEY_SCALES), row_at(v, scratch, self._scratch.key_scales, group, 4 * v.lanes)
            )
            return []

        v.loop(num_steps(v, num_tokens(v, places), v.lanes), [], one)

    def scores(self, v: Vectors, scratch: Value, first: Value, rows: Value) -> None:
        left = row_at(v, scratch, self._scratch.queries, first, self._shape.query_bytes)
        out = row_at(v, scratch, self._scratch.scores, first, 4 * TILE)
        for_each_count(v, rows, self.together, lambda now: self._scores(v, scratch, left, out, now))

    def _scores(self, v: Vectors, scratch: Value, left: Value, out: Value, rows: int) -> None:
        form, shape, b = self._form, self._shape, v.builder
        places = [(row, start) for row in range(rows) for start in chunks(v)]
        totals: list[Value] = []
        for group in range(form.num_groups):
            here = v.at(left, group * form.group)
            right = v.at(scratch, self._scratch.keys + TILE * group * form.group)
            offsets = [[row * shape.query_bytes + part * shape.head_dim for part in range(2)] for row in range(rows)]
            found = products(v, here, right, [4 * start for start in chunks(v)], I64(form.group // 4), 4 * TILE, offsets)
            results = []
            for (row, start), product in zip(places, found, strict=True):
                parameters = row * shape.query_bytes + 4 * shape.head_dim
                scale, total = (v.splat(v.load(F32, left, parameters + at)) for at in (0, 4 * (1 + group)))
                if not form.static:
                    at = self._scratch.key_scales + 4 * (group * TILE + start)
                    scale = b.fmul(scale, v.load(v.floats, scratch, at))
                    total = b.fmul(total, v.load(v.floats, scratch, at + 4 * form.num_groups * TILE))
                results.append(v.fma(product, scale, total))
            totals = results if not totals else [b.fadd(old, new) for old, new in zip(totals, results, strict=True)]
        for (row, start), total in zip(places, totals, strict=True):
            v.store(total, out, 4 * (row * TILE + start))


class QuadValues:
    """Packed values."""

    together = _TOGETHER
    exp2: tuple[float, ...] = COARSE

    def __init__(self, shape: KernelShape, form: PackedForm) -> None:
        self._shape, self._scratch, self._form = shape, Scratch(shape), form

    def store_probability(self, v: Vectors, probability: Value, place: Value, start: int) -> Value:
        v.store(probability, place, 4 * start)
        return probability

    def pack(self, v: Vectors, scratch: Value, places: Value, following: Value, side: Value) -> None:  # noqa: ARG002
        """Codes of four tokens side by side, for each element."""
        form, b = self._form, v.builder

        def codes(step: Value, _: list[Value]) -> list[Value]:
            here, later = (row_at(v, area, 0, step, 4 * 8) for area in (places, following))
            for n in range(4):
                fetch(v, v.at(later, 8 * n), VALUE_ROWS, form.row_bytes)
            rows = [v.load(I64, here, 8 * (TILE * VALUE_ROWS + n)) for n in range(4)]
            target = row_at(v, scratch, self._scratch.values, step, 4 * self._shape.head_dim)
            for first in range(0, form.row_bytes, 4 * v.lanes):
                kind = ir.VectorType(I8, min(4 * v.lanes, form.row_bytes - first))
                bytes_ = [v.load(kind, row, first) for row in rows]
                for part in range(8 // form.bits):
                    shift, mask = (ir.Constant(kind, [number] * kind.count) for number in (part * form.bits, form.top))
                    parts = bytes_ if form.bits == 8 else [b.and_(b.lshr(x, shift), mask) for x in bytes_]
                    for place, quads in enumerate(four_by_four(v, parts)):
                        v.store(quads, target, 4 * (part * form.row_bytes + first) + place * kind.count)
            return []

        def scales(group: Value, _: list[Value]) -> list[Value]:
            fetch(v, row_at(v, following, 0, group, 8 * v.lanes), VALUE_SCALES, 1)
            here = row_at(v, places, 8 * TILE * VALUE_SCALES, group, 8 * v.lanes)
            unpack_scales(v, form, here, row_at(v, scratch, self._scratch.value_scales, group, 4 * v.lanes))
            return []

        v.loop(num_steps(v, num_tokens(v, places), 4), [], codes)
        if not form.static:
            v.loop(num_steps(v, num_tokens(v, places), v.lanes), [], scales)

    def share(self, v: Vectors, scratch: Value, row: Value) -> None:
        """Probabilities times scales as bytes, for each group; then their scale, and what their starts add up to."""
        form, b = self._form, v.builder
        place = row_at(v, scratch, self._scratch.scores, row, 4 * TILE)
        target = row_at(v, scratch, self._scratch.shares, row, form.num_groups * SHARE_BYTES)
        probabilities = [v.load(v.floats, place, 4 * start) for start in chunks(v)]
        seen = [b.fcmp_ordered("!=", x, v.constant(0.0)) for x in probabilities]

        def times(at: int) -> list[Value]:
            numbers = [v.load(v.floats, scratch, at + 4 * start) for start in chunks(v)]
            products = [b.fmul(x, y) for x, y in zip(probabilities, numbers, strict=True)]
            # beside the tokens of this sequence lies what other sequences left: it may be NaN, and a product with 0 as well
            return [b.select(mask, product, v.constant(0.0)) for mask, product in zip(seen, products, strict=True)]

        for group in range(form.num_groups):
            at = self._scratch.value_scales + 4 * group * TILE
            weights = probabilities if form.static else times(at)
            scale, numbers = whole_numbers(v, weights)
            store_bytes(v, numbers, target, TILE, SHARE_BYTES * group)
            if form.symmetric:
                start = b.fmul(b.fmul(b.sitofp(total_of(v, numbers), F32), scale), F32(-form.middle))
            elif form.static:
                start = F32(0.0)
            else:
                start = v.reduce(tree(times(at + 4 * form.num_groups * TILE), b.fadd), b.fadd)
            v.store(scale, target, SHARE_BYTES * group + 2 * TILE)
            v.store(start, target, SHARE_BYTES * group + 2 * TILE + 4)

    def weigh(self, v: Vectors, scratch: Value, state: Value, first: Value, rows: Value, places: Value) -> None:
        form, shape = self._form, self._shape
        left = row_at(v, scratch, self._scratch.shares, first, form.num_groups * SHARE_BYTES)
        states = row_at(v, state, 0, first, shape.state_bytes)
        steps = num_steps(v, num_tokens(v, places), 4)
        for_each_count(v, rows, self.together, lambda now: self._weigh(v, scratch, left, states, steps, now))

    def _weigh(self, v: Vectors, scratch: Value, left: Value, states: Value, steps: Value, rows: int) -> None:
        form, shape = self._form, self._shape
        right = v.at(scratch, self._scratch.values)
        together = 4 * v.lanes if form.group % (4 * v.lanes) == 0 else v.lanes * (form.group // v.lanes % 4 or 4)
        factors = [v.splat(v.load(F32, states, shape.state_bytes * row + 4)) for row in range(rows)]
        for group in range(form.num_groups):
            for first in range(group * form.group, (group + 1) * form.group, together):
                behind = min(first + together, (group + 1) * form.group)
                shares = [(row * form.num_groups + group) * SHARE_BYTES for row in range(rows)]
                offsets = [[share, share + TILE] for share in shares]
                columns = [4 * element for element in range(first, behind, v.lanes)]
                found = iter(products(v, left, right, columns, steps, 4 * shape.head_dim, offsets))
                for row, share in enumerate(shares):
                    scale, start = (v.splat(v.load(F32, left, share + 2 * TILE + at)) for at in (0, 4))
                    for column in columns:
                        place = shape.state_bytes * row + shape.values_at + column
                        old = v.fma(v.load(v.floats, states, place), factors[row], start)
                        v.store(v.fma(next(found), scale, old), states, place)

    def finish(self, v: Vectors, state: Value, row: Value, out: Value, side: Value) -> None:
        form = self._form
        values = result(v, self._shape, state, row)
        if form.static:
            channels = [static_channels(v, form, side, place * v.lanes) for place in range(len(values))]
            zero = v.constant(0.0)
            values = [
                v.fma(x, scale, zero if minimum is None else minimum)
                for x, (scale, minimum) in zip(values, channels, strict=True)
            ]
        store_row(v, self._shape, values if form.rotation is None else list(rotate(v, values, form.rotation)), out)
