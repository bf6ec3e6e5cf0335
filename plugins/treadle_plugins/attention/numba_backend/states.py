"""Softmax, row by row, and what becomes of its states."""

from __future__ import annotations

from collections.abc import Callable

from treadle_plugins.attention.numba_backend import jobs
from treadle_plugins.attention.numba_backend.shape import TILE, KernelShape, Scratch
from treadle_plugins.attention.numba_backend.sides import Values, chunks, row_at, tree
from treadle_plugins.kernels.vectors import F32, I32, LOWEST, Value, Vectors

_TWO_LOG2E = 2.8853900817779268


class States:
    """Emits each step; arguments are int64 values."""

    def __init__(self, shape: KernelShape) -> None:
        self._shape, self._scratch = shape, Scratch(shape)
        lanes = 4 * shape.cpu.lanes
        self._sums = (shape.sums_at, *range(shape.values_at, shape.state_bytes, lanes))

    def clear(self, v: Vectors, state: Value, rows: Value) -> None:
        """States of rows that have seen nothing."""

        def one(row: Value, _: list[Value]) -> list[Value]:
            own = row_at(v, state, 0, row, self._shape.state_bytes)
            v.store(F32(LOWEST), own)
            for offset in self._sums:
                v.store(v.constant(0.0), own, offset)
            return []

        v.loop(rows, [], one)

    def cap(self, v: Vectors, scratch: Value, job: Value, row: Value) -> None:
        """Bend a row of scores: out * tanh(in * score)."""
        b = v.builder
        place = row_at(v, scratch, self._scratch.scores, row, 4 * TILE)
        inner, outer = (v.splat(v.load(F32, job, 8 * word)) for word in (jobs.CAP_IN, jobs.CAP_OUT))
        one, zero = v.constant(1.0), v.constant(0.0)
        for start in chunks(v):
            x = b.fmul(v.load(v.floats, place, 4 * start), inner)
            power = v.exp2(b.fmul(b.fsub(zero, v.absolute(x)), v.constant(_TWO_LOG2E)))
            bent = b.fmul(b.fdiv(b.fsub(one, power), b.fadd(one, power)), outer)
            v.store(b.select(b.fcmp_ordered("<", x, zero), b.fsub(zero, bent), bent), place, 4 * start)

    def soften(self, values: Values) -> Callable[..., None]:
        """Emits the step that makes probabilities of scores, as `values` takes them."""

        def emit(v: Vectors, scratch: Value, state: Value, job: Value, row: Value, slope: Value, *seen: Value) -> None:
            place = row_at(v, scratch, self._scratch.scores, row, 4 * TILE)
            own = row_at(v, state, 0, row, self._shape.state_bytes)
            exponents, masks = self._exponents(v, place, job, slope, *seen)
            before = v.splat(v.load(F32, own))
            highest = v.maximum(before, v.splat(v.reduce(tree(exponents, v.maximum), v.maximum)))
            factor = v.exp2(v.builder.fsub(before, highest))
            sums = []
            for start, exponent, mask in zip(chunks(v), exponents, masks, strict=True):
                power = v.exp2(v.builder.fsub(exponent, highest), values.exp2)
                probability = v.builder.select(mask, power, v.constant(0.0))
                sums.append(values.store_probability(v, probability, place, start))
            total = v.fma(v.load(v.floats, own, self._shape.sums_at), factor, tree(sums, v.builder.fadd))
            v.store(v.builder.extract_element(highest, I32(0)), own)
            v.store(v.builder.extract_element(factor, I32(0)), own, 4)
            v.store(total, own, self._shape.sums_at)

        return emit

    def _exponents(
        self, v: Vectors, place: Value, job: Value, slope: Value, first: Value, behind: Value
    ) -> tuple[list[Value], list[Value]]:
        """Scores as powers of 2, and which are seen: columns `first` to `behind`, right before which the query stands."""
        b = v.builder
        scale, slope = v.splat(v.load(F32, job, 8 * jobs.SCALE)), v.splat(v.load(F32, slope))
        first, behind = (v.splat(b.trunc(column, I32)) for column in (first, behind))
        exponents, masks = [], []
        for start in chunks(v):
            columns = v.int_constant(range(start, start + v.lanes))
            distance = b.sitofp(b.sub(v.int_constant(range(start + 1, start + 1 + v.lanes)), behind), v.floats)
            exponent = v.fma(v.load(v.floats, place, 4 * start), scale, b.fmul(slope, distance))
            masks.append(b.and_(b.icmp_signed(">=", columns, first), b.icmp_signed("<", columns, behind)))
            exponents.append(b.select(masks[-1], exponent, v.constant(LOWEST)))
        return exponents, masks

    def join(self, v: Vectors, total: Value, part: Value, rows: Value) -> None:
        """Take the states of one segment into those of all before it."""
        b = v.builder

        def one(row: Value, _: list[Value]) -> list[Value]:
            mine, other = (row_at(v, base, 0, row, self._shape.state_bytes) for base in (total, part))
            before, here = (v.splat(v.load(F32, own)) for own in (mine, other))
            highest = v.maximum(before, here)
            weight, weight_here = v.exp2(b.fsub(before, highest)), v.exp2(b.fsub(here, highest))
            v.store(b.extract_element(highest, I32(0)), mine)
            for offset in self._sums:
                old = b.fmul(v.load(v.floats, mine, offset), weight)
                v.store(v.fma(v.load(v.floats, other, offset), weight_here, old), mine, offset)
            return []

        v.loop(rows, [], one)


def result(v: Vectors, shape: KernelShape, state: Value, row: Value) -> list[Value]:
    """A row's weighted mean of values, as vectors."""
    own = row_at(v, state, 0, row, shape.state_bytes)
    total = v.reduce(v.load(v.floats, own, shape.sums_at), v.builder.fadd)
    share = v.splat(v.builder.fdiv(F32(1.0), total))
    places = range(shape.values_at, shape.state_bytes, 4 * v.lanes)
    return [v.builder.fmul(v.load(v.floats, own, place), share) for place in places]
