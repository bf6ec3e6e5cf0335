"""Whole numbers times codes, four bytes at once.

A number of 15 bits is 128 * upper + lower byte, both signed: finer than bf16, and each byte meets unsigned codes in one
instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from treadle_plugins.attention.numba_backend.shape import TILE, PackedForm
from treadle_plugins.attention.numba_backend.sides import row_at, tree
from treadle_plugins.kernels.vectors import F16, F32, I8, I16, I32, I64, Value, Vectors

_LARGEST = 127 * 128


def products(
    v: Vectors,
    left: Value,
    right: Value,
    columns: Sequence[int],
    steps: Value,
    right_bytes: int,
    offsets: Sequence[Sequence[int]],
) -> list[Value]:
    """For each row and each column of `right`, in bytes, whole numbers times codes as float32.

    `offsets`: for each row where its upper and its lower bytes start, from `left`.
    """

    def one(index: Value, sums: list[Value]) -> list[Value]:
        line, here = row_at(v, right, 0, index, right_bytes), row_at(v, left, 0, index, 4)
        codes = [v.load(v.ints, line, column) for column in columns]
        numbers = [v.splat(v.load(I32, here, offset)) for row in offsets for offset in row]
        pairs = [(code, number) for number in numbers for code in codes]
        return [v.dot_quads(code, number, total) for (code, number), total in zip(pairs, sums, strict=True)]

    zeros = [v.int_constant([0] * v.lanes)] * (2 * len(offsets) * len(columns))
    sums = v.loop(steps, zeros, one)
    products = []
    for row in range(len(offsets)):
        upper = sums[2 * row * len(columns) : (2 * row + 1) * len(columns)]
        lower = sums[(2 * row + 1) * len(columns) : (2 * row + 2) * len(columns)]
        products += [_joined(v, *parts) for parts in zip(upper, lower, strict=True)]
    return products


def _joined(v: Vectors, upper: Value, lower: Value) -> Value:
    return v.builder.sitofp(v.builder.add(v.builder.shl(upper, v.int_constant([7] * v.lanes)), lower), v.floats)


def whole_numbers(v: Vectors, numbers: list[Value]) -> tuple[Value, list[Value]]:
    """Floats as a scale, a scalar, and whole numbers of at most _LARGEST. What is not finite makes the scale NaN."""
    b = v.builder
    largest = v.reduce(tree([v.absolute(x) for x in numbers], v.maximum), v.maximum)
    spoiled = b.fmul(v.reduce(tree(numbers, b.fadd), b.fadd), F32(0.0))
    factor = b.select(b.fcmp_ordered(">", largest, F32(1e-30)), b.fdiv(F32(_LARGEST), largest), F32(0.0))
    whole = [b.fptosi(v.rint(b.fmul(x, v.splat(factor))), v.ints) for x in numbers]
    return b.fadd(b.fmul(largest, F32(1 / _LARGEST)), spoiled), whole


def store_bytes(v: Vectors, numbers: list[Value], target: Value, apart: int, offset: int = 0) -> None:
    """The upper bytes of whole numbers at `offset` of `target`, and the lower ones `apart` bytes behind."""
    b, kind = v.builder, ir.VectorType(I8, v.lanes)
    seven, half = (v.int_constant([number] * v.lanes) for number in (7, 64))
    for place, number in enumerate(numbers):
        upper = b.ashr(b.add(number, half), seven)
        v.store(b.trunc(upper, kind), target, offset + place * v.lanes)
        v.store(b.trunc(b.sub(number, b.shl(upper, seven)), kind), target, offset + apart + place * v.lanes)


def total_of(v: Vectors, numbers: list[Value]) -> Value:
    """Their sum, as a scalar."""
    return v.reduce(tree(numbers, v.builder.add), v.builder.add)


def four_by_four(v: Vectors, rows: Sequence[Value]) -> list[Value]:
    """Bytes of four rows, four by four: as many vectors as rows."""
    count = rows[0].type.count
    shorts, bytes_ = ir.VectorType(I16, count // 2), ir.VectorType(I8, count)
    one, two = v.interleave(rows[0], rows[1]), v.interleave(rows[2], rows[3])
    results: list[Value] = []
    for halves in zip(one, two, strict=True):
        results += v.interleave(*(v.builder.bitcast(half, shorts) for half in halves))
    return [v.builder.bitcast(x, bytes_) for x in results]


def unpack_scales(v: Vectors, form: PackedForm, places: Value, target: Value) -> None:
    """Scales and starts of as many tokens as there are lanes, as float32: [groups, TILE] of each."""
    if form.static:
        return
    b, groups = v.builder, form.num_groups
    first, last = (v.load(I64, places, 8 * n) for n in (0, v.lanes - 1))
    with b.if_else(b.icmp_signed("==", b.sub(last, first), I64(2 * groups * (v.lanes - 1)))) as (side_by_side, scattered):
        with side_by_side:
            _store_scales(v, form, target, lambda offset: _adjacent(v, first, offset, groups))
        with scattered:
            addresses = [v.load(I64, places, 8 * n) for n in range(v.lanes)]
            _store_scales(v, form, target, lambda offset: _gathered(v, addresses, offset, groups))


def _store_scales(v: Vectors, form: PackedForm, target: Value, load: Callable[[int], list[Value]]) -> None:
    b = v.builder
    scales = load(0)
    starts = [b.fmul(scale, v.constant(-form.middle)) for scale in scales] if form.symmetric else load(form.minimum_after)
    for place, numbers in enumerate([*scales, *starts]):
        v.store(numbers, target, 4 * TILE * place)


def _adjacent(v: Vectors, address: Value, offset: int, groups: int) -> list[Value]:
    """For each group a vector of the tokens' numbers, which lie behind one another."""
    numbers = v.load(ir.VectorType(F16, groups * v.lanes), address, offset)
    of_groups = [v.shuffle(numbers, numbers, range(group, groups * v.lanes, groups)) for group in range(groups)]
    return [v.builder.fpext(x, v.floats) for x in of_groups]


def _gathered(v: Vectors, addresses: list[Value], offset: int, groups: int) -> list[Value]:
    """The same, from anywhere."""
    results = []
    for group in range(groups):
        numbers = ir.Constant(ir.VectorType(F16, v.lanes), ir.Undefined)
        for lane, address in enumerate(addresses):
            numbers = v.builder.insert_element(numbers, v.load(F16, address, offset + 2 * group), I32(lane))
        results.append(v.builder.fpext(numbers, v.floats))
    return results
