"""Packs a row: the arithmetic of codecs.py, operation by operation, so that the same bytes come out."""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from treadle_plugins.attention.codecs import FITTED_BITS
from treadle_plugins.attention.numba_backend.forms import static_channels
from treadle_plugins.attention.numba_backend.matrix import load_row
from treadle_plugins.attention.numba_backend.shape import KernelShape, PackedForm
from treadle_plugins.attention.numba_backend.sides import row_at, tree
from treadle_plugins.attention.numba_backend.transform import transform_row
from treadle_plugins.kernels.vectors import F16, F32, I8, I32, Value, Vectors

_LARGEST_HALF = 65504.0


class _Scale(NamedTuple):
    """What a vector of elements is divided by, and what is taken from it before."""

    scale: Value
    minimum: Value | None


class Encoder:
    """Packs rows into chunks."""

    def __init__(self, shape: KernelShape, form: PackedForm) -> None:
        self._shape, self._form = shape, form

    def encode(self, v: Vectors, chunk: Value, offset: Value, source: Value, side: Value) -> None:
        """Pack the row at `source` as token `offset` of `chunk`."""
        form = self._form
        row = list(transform_row(v, form, load_row(v, self._shape, source), side))
        if form.static:
            scales = [_Scale(*static_channels(v, form, side, place * v.lanes)) for place in range(len(row))]
        else:
            scales = self._scales(v, row, row_at(v, chunk, form.scales_at, offset, 2 * form.num_groups))
        codes = [self._codes(v, x, scale) for x, scale in zip(row, scales, strict=True)]
        self._store(v, codes, row_at(v, chunk, 0, offset, form.row_bytes))

    def _scales(self, v: Vectors, row: list[Value], target: Value) -> list[_Scale]:
        """Work out and store the scales of a row's groups; the one for each vector."""
        form, b, scales = self._form, v.builder, []
        per_group = form.group // v.lanes
        for group in range(form.num_groups):
            own = row[group * per_group : (group + 1) * per_group]
            low, high = _extremes(v, own)
            if form.symmetric:
                extreme = b.select(b.fcmp_ordered(">", b.fneg(low), high), low, high)
                scale, minimum = _half(v, b.fdiv(b.fneg(extreme), F32(form.middle))), None
                if form.bits <= FITTED_BITS:
                    scale = self._fitted(v, own, scale)
            else:
                half = _half(v, low)
                v.store(half, target, form.minimum_after + 2 * group)
                minimum = b.fpext(half, F32)
                scale = _half(v, b.fdiv(b.fsub(high, minimum), F32(form.top)))
            v.store(scale, target, 2 * group)
            splat = None if minimum is None else v.splat(minimum)
            scales += [_Scale(v.splat(b.fpext(scale, F32)), splat)] * per_group
        return scales

    def _fitted(self, v: Vectors, row: list[Value], scale: Value) -> Value:
        """The scale, in half precision, with the least squared error for the codes that `scale` gives."""
        b, first = v.builder, _Scale(v.splat(v.builder.fpext(scale, F32)), None)
        middle = v.int_constant([self._form.middle] * v.lanes)
        steps = [b.sitofp(b.sub(self._codes(v, x, first), middle), v.floats) for x in row]
        products = _folded(v, [b.fmul(x, step) for x, step in zip(row, steps, strict=True)])
        fitted = b.fdiv(products, _folded(v, [b.fmul(step, step) for step in steps]))
        return b.select(_is_finite(v, fitted), _half(v, fitted), scale)

    def _codes(self, v: Vectors, row: Value, scale: _Scale) -> Value:
        b, form, zero = v.builder, self._form, v.constant(0.0)
        if scale.minimum is None:
            resting = v.constant(form.middle)
            steps = b.fadd(v.rint(b.fdiv(row, scale.scale)), resting)
        else:
            resting = zero
            steps = v.rint(b.fdiv(b.fsub(row, scale.minimum), scale.scale))
        steps = b.select(b.fcmp_ordered("==", scale.scale, zero), resting, steps)
        steps = b.select(b.fcmp_ordered(">", steps, zero), steps, zero)  # NaN becomes 0 as well
        top = v.constant(form.top)
        return b.fptosi(b.select(b.fcmp_ordered("<", steps, top), steps, top), v.ints)

    def _store(self, v: Vectors, codes: list[Value], target: Value) -> None:
        """Byte `j` holds codes j, j + row_bytes, ..., low bits first."""
        b, form = v.builder, self._form
        together = v.joined(codes)
        parts = [v.shuffle(together, together, range(n, n + form.row_bytes)) for n in range(0, form.head_dim, form.row_bytes)]
        packed = parts[0]
        for place, part in enumerate(parts[1:], start=1):
            packed = b.or_(packed, b.shl(part, ir.Constant(part.type, [place * form.bits] * form.row_bytes)))
        v.store(b.trunc(packed, ir.VectorType(I8, form.row_bytes)), target)


def _extremes(v: Vectors, row: list[Value]) -> tuple[Value, Value]:
    """The least and the largest number, as scalars; both NaN if there is one."""
    b = v.builder

    def lesser(one: Value, two: Value) -> Value:
        return b.select(b.fcmp_ordered("<", one, two), one, two)

    low = v.reduce(tree(row, lesser), lesser)
    high = v.reduce(tree(row, v.maximum), v.maximum)
    ordered = [b.select(b.fcmp_unordered("uno", x, x), v.constant(1.0), v.constant(0.0)) for x in row]
    has_nan = b.fcmp_ordered("!=", v.reduce(tree(ordered, b.fadd), b.fadd), F32(0.0))
    nan = F32(float("nan"))
    return b.select(has_nan, nan, low), b.select(has_nan, nan, high)


def _folded(v: Vectors, row: list[Value]) -> Value:
    """Their sum, as a scalar: the second half is added to the first, again and again; of an odd number the last to the first."""
    b, numbers = v.builder, v.joined(row)
    while (count := numbers.type.count) > 1:
        one, two = (v.shuffle(numbers, numbers, range(first, first + count // 2)) for first in (0, count // 2))
        folded = b.fadd(one, two)
        if count % 2:
            rest = b.fadd(b.extract_element(folded, I32(0)), b.extract_element(numbers, I32(count - 1)))
            folded = b.insert_element(folded, rest, I32(0))
        numbers = folded
    return b.extract_element(numbers, I32(0))


def _is_finite(v: Vectors, number: Value) -> Value:
    return v.builder.fcmp_ordered("<", v.magnitude(number), F32(float("inf")))


def _half(v: Vectors, number: Value) -> Value:
    """A scalar in half precision; what is finite stays finite."""
    b = v.builder
    above = b.select(b.fcmp_ordered(">", number, F32(_LARGEST_HALF)), F32(_LARGEST_HALF), number)
    cut = b.select(b.fcmp_ordered("<", above, F32(-_LARGEST_HALF)), F32(-_LARGEST_HALF), above)
    return b.fptrunc(b.select(_is_finite(v, number), cut, number), F16)
