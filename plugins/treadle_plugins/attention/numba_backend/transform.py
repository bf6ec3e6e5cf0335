"""How rows are transformed before they are packed, and what meets them: balanced, then rotated, as codecs.py does it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle_plugins.attention.numba_backend import jobs
from treadle_plugins.attention.numba_backend.shape import PackedForm
from treadle_plugins.kernels.vectors import I64, Value, Vectors

Row = Sequence[Value]
"""A head's elements, as vectors of float32."""


def transform_row(v: Vectors, form: PackedForm, row: Row, side: Value) -> Row:
    """Keys or values as they are packed. `side`: what the job says of the head."""
    if form.centered:
        row = [v.builder.fsub(x, y) for x, y in zip(row, _channels(v, side, jobs.CENTERS, len(row)), strict=True)]
    if form.balanced:
        row = [v.builder.fdiv(x, y) for x, y in zip(row, _channels(v, side, jobs.FACTORS, len(row)), strict=True)]
    return row if form.rotation is None else rotate(v, row, form.rotation)


def transform_query(v: Vectors, form: PackedForm, row: Row, side: Value) -> Row:
    """A query as it meets packed keys."""
    if form.balanced:
        row = [v.builder.fmul(x, y) for x, y in zip(row, _channels(v, side, jobs.FACTORS, len(row)), strict=True)]
    return row if form.rotation is None else rotate(v, row, form.rotation)


def rotate(v: Vectors, row: Row, size: int) -> Row:
    """Rotated in blocks of `size`: butterflies over distances 1, 2, 4, ... Doing it again undoes it."""
    distance = 1
    while distance < size:
        row = _butterflies(v, row, distance) if distance < v.lanes else _far_butterflies(v, row, distance // v.lanes)
        distance *= 2
    return [v.builder.fmul(x, v.constant(1 / math.sqrt(size))) for x in row]


def _butterflies(v: Vectors, row: Row, distance: int) -> Row:
    """(a, b) -> (a + b, a - b) within vectors."""
    b = v.builder
    partners = [lane ^ distance for lane in range(v.lanes)]
    lower = v.flags([not lane & distance for lane in range(v.lanes)])
    results = []
    for own in row:
        partner = v.shuffle(own, own, partners)
        results.append(b.select(lower, b.fadd(own, partner), b.fsub(partner, own)))
    return results


def _far_butterflies(v: Vectors, row: Row, distance: int) -> Row:
    """The same between vectors."""
    results = list(row)
    for place in range(len(row)):
        if not place & distance:
            one, two = row[place], row[place + distance]
            results[place], results[place + distance] = v.builder.fadd(one, two), v.builder.fsub(one, two)
    return results


def _channels(v: Vectors, side: Value, word: int, count: int) -> Row:
    address = v.load(I64, side, 8 * word)
    return [v.load(v.floats, address, 4 * v.lanes * place) for place in range(count)]
