"""Readers: how a token's stored row becomes lanes to multiply, one float32 number or two bf16 numbers each.

Rows are int vectors where they are to be transposed, which is done with the bits as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from llvmlite import ir

from treadle_plugins.attention.numba_backend import jobs
from treadle_plugins.attention.numba_backend.shape import KernelShape, PackedForm
from treadle_plugins.kernels.vectors import F16, I8, I16, I64, Value, Vectors


class Place(NamedTuple):
    """Where a token's row is."""

    row: Value
    """Address of its elements or codes."""
    scales: Value
    """Address of its scales."""
    side: Value
    """Address of what the job says of its head, keys or values."""


class Reader(Protocol):
    """Reads one stored form. Lanes of a row are counted from 0."""

    tokens: int
    """Tokens whose values share a lane."""

    def opened(self, v: Vectors, place: Place) -> Any:
        """What the methods below take for a row: read once, then used for all its lanes."""
        ...

    def key_lanes(self, v: Vectors, row: Any, first: int, count: int) -> Value:
        """Lanes `first` to `first + count` of a key as ints; what lies beyond in the vector is undefined."""
        ...

    def value_lanes(self, v: Vectors, rows: list[Any], first: int) -> list[Value]:
        """Of `tokens` values, vectors from element `first` on: as many as one load brings, and no more than there are."""
        ...


class WholePairs:
    """bf16 as it is stored, for a processor that multiplies bf16 pairs."""

    tokens = 2

    def __init__(self, shape: KernelShape) -> None:
        self._head_dim = shape.head_dim

    def opened(self, v: Vectors, place: Place) -> Value:  # noqa: ARG002  # other forms read here
        return place.row

    def key_lanes(self, v: Vectors, row: Value, first: int, count: int) -> Value:
        return v.load_lanes(row, 4 * first, count)

    def value_lanes(self, v: Vectors, rows: list[Value], first: int) -> list[Value]:
        count = min(2 * v.lanes, self._head_dim - first)
        one, two = (v.load(ir.VectorType(I16, count), row, 2 * first) for row in rows)
        if count > v.lanes:
            return list(v.interleave(one, two))
        return [v.shuffle(one, two, [lane for place in range(count) for lane in (place, place + count)])]


class WholeFloats:
    """Any precision, widened to float32."""

    tokens = 1

    def __init__(self, shape: KernelShape) -> None:
        self._dtype, self._item_bytes = shape.dtype, shape.item_bytes

    def opened(self, v: Vectors, place: Place) -> Value:  # noqa: ARG002  # other forms read here
        return place.row

    def key_lanes(self, v: Vectors, row: Value, first: int, count: int) -> Value:
        assert count == v.lanes, "a head holds whole vectors of float32"
        return v.as_ints(load_floats(v, self._dtype, row, self._item_bytes * first))

    def value_lanes(self, v: Vectors, rows: list[Value], first: int) -> list[Value]:
        return [load_floats(v, self._dtype, rows[0], self._item_bytes * first)]


class _PackedRow(NamedTuple):
    place: Place
    scales: list[Value]
    minima: list[Value]


class PackedFloats:
    """Codes, expanded to float32 just as codecs.py does it."""

    tokens = 1

    def __init__(self, form: PackedForm) -> None:
        self._form = form

    def opened(self, v: Vectors, place: Place) -> _PackedRow:
        form = self._form
        if form.static:
            return _PackedRow(place, [], [])
        places = [2 * group for group in range(form.num_groups)]
        scales = [load_half(v, place.scales, offset) for offset in places]
        minima = [] if form.symmetric else [load_half(v, place.scales, form.minimum_after + offset) for offset in places]
        return _PackedRow(place, scales, minima)

    def key_lanes(self, v: Vectors, row: _PackedRow, first: int, count: int) -> Value:
        assert count == v.lanes, "a head holds whole vectors of float32"
        return v.as_ints(self._expanded(v, row, first))

    def value_lanes(self, v: Vectors, rows: list[_PackedRow], first: int) -> list[Value]:
        return [self._expanded(v, rows[0], first)]

    def _expanded(self, v: Vectors, row: _PackedRow, first: int) -> Value:
        b, form = v.builder, self._form
        codes = b.sitofp(load_codes(v, form, row.place.row, first), v.floats)
        if form.static:
            scale, minimum = static_channels(v, form, row.place.side, first)
        else:
            scale = row.scales[first // form.group]
            minimum = None if form.symmetric else row.minima[first // form.group]
        if minimum is None:
            return b.fmul(b.fsub(codes, v.constant(form.middle)), scale)
        return b.fadd(b.fmul(codes, scale), minimum)


def whole(shape: KernelShape) -> Reader:
    """The reader of rows kept whole."""
    return WholePairs(shape) if shape.pairs else WholeFloats(shape)


def load_floats(v: Vectors, dtype: str, address: Value, offset: int) -> Value:
    """A vector of float32 from numbers of `dtype`."""
    if dtype == "bfloat16":
        return v.load_bf16(address, offset)
    return v.load_fp16(address, offset) if dtype == "float16" else v.load(v.floats, address, offset)


def store_floats(v: Vectors, floats: Value, dtype: str, address: Value, offset: int) -> None:
    """A vector of float32 as numbers of `dtype`, rounded to the nearest."""
    narrow = {"bfloat16": v.to_bf16, "float16": v.to_fp16}.get(dtype)
    v.store(floats if narrow is None else narrow(floats), address, offset)


def load_half(v: Vectors, address: Value, offset: int) -> Value:
    """A vector of one fp16 number, as float32."""
    return v.splat(v.builder.fpext(v.load(F16, address, offset), v.floats.element))


def load_codes(v: Vectors, form: PackedForm, row: Value, first: int) -> Value:
    """Codes `first` to `first + lanes` of a row as ints. Byte `j` holds codes j, j + row_bytes, ..., low bits first."""
    b, numbers, pieces = v.builder, range(first, first + v.lanes), []
    while numbers:
        byte = numbers[0] % form.row_bytes
        count = min(len(numbers), form.row_bytes - byte)
        pieces.append(v.load(ir.VectorType(I8, count), row, byte))
        numbers = numbers[count:]
    shifts = v.int_constant([number // form.row_bytes * form.bits for number in range(first, first + v.lanes)])
    return b.and_(b.lshr(b.zext(v.joined(pieces), v.ints), shifts), v.int_constant([form.top] * v.lanes))


def static_channels(v: Vectors, form: PackedForm, side: Value, first: int) -> tuple[Value, Value | None]:
    """Static scales and minima of channels `first` to `first + lanes`."""
    scales = v.load(v.floats, v.load(I64, side, 8 * jobs.SCALES), 4 * first)
    return scales, None if form.symmetric else v.load(v.floats, v.load(I64, side, 8 * jobs.MINIMA), 4 * first)
