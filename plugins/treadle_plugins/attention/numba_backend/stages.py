"""The stages of a task, for heads kept whole, for packed ones, or for whichever a head is."""

# ruff: noqa: ARG001  # all stages take the same arguments, so that each can be put in the place of another

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from treadle_plugins.attention.numba_backend import instructions, jobs
from treadle_plugins.attention.numba_backend.forms import PackedFloats, whole
from treadle_plugins.attention.numba_backend.instructions import Step, inlined, step
from treadle_plugins.attention.numba_backend.matrix import MatrixKeys, MatrixValues
from treadle_plugins.attention.numba_backend.quad_sides import QuadKeys, QuadValues
from treadle_plugins.attention.numba_backend.shape import (
    KEY_ROWS,
    KEY_SCALES,
    PLACES_COUNT,
    TILE,
    VALUE_ROWS,
    VALUE_SCALES,
    KernelShape,
    Scratch,
    SideForm,
)
from treadle_plugins.attention.numba_backend.sides import Keys, Values, fetch, num_tokens, row_at
from treadle_plugins.attention.numba_backend.states import States
from treadle_plugins.kernels.vectors import Value, Vectors

Stage = Callable[[int, int, int, int, int, int, int, int], None]
"""(side, job, scratch, state, task, tile, places, following).

`side` is what the job says of the head's keys, or values. `following` are places of the tile that comes next, to be fetched.
"""


class Stages(NamedTuple):
    """In the order in which they come."""

    take_in: Stage
    """The task's queries are read. No tile yet."""
    score: Stage
    """A tile's keys meet them."""
    soften: Stage
    """Scores become probabilities."""
    weigh: Stage
    """The tile's values are added up."""
    put_out: Stage
    """Results are written. No tile any more."""


def build(shape: KernelShape) -> Stages:
    """All stages."""
    packed_keys, packed_values = shape.keys.packed, shape.values.packed
    keys: list[Keys] = [MatrixKeys(shape, whole(shape))] if shape.keys.whole else []
    values: list[Values] = [MatrixValues(shape, whole(shape))] if shape.values.whole else []
    if packed_keys is not None:
        keys.append(QuadKeys(shape, packed_keys) if shape.quads else MatrixKeys(shape, PackedFloats(packed_keys), packed_keys))
    if packed_values is not None:
        floats = MatrixValues(shape, PackedFloats(packed_values), packed_values)
        values.append(QuadValues(shape, packed_values) if shape.quads else floats)
    return Stages(
        _either(shape, [_take_in(shape, side) for side in keys]),
        _either(shape, [_score(shape, side) for side in keys]),
        _either(shape, [_soften(shape, side) for side in values]),
        _either(shape, [_weigh(shape, side) for side in values]),
        _either(shape, [_put_out(shape, side) for side in values]),
    )


def _either(shape: KernelShape, ways: list[Stage]) -> Stage:
    """The way for whole heads or for packed ones, where there are both."""
    if len(ways) == 1:
        return ways[0]
    word, (whole_way, packed_way) = instructions.word(shape.cpu), ways

    @inlined
    def either(side: int, job: int, scratch: int, state: int, task: int, tile: int, places: int, following: int) -> None:
        if word((side, jobs.PACKED)):
            packed_way(side, job, scratch, state, task, tile, places, following)
        else:
            whole_way(side, job, scratch, state, task, tile, places, following)

    return either


def _take_in(shape: KernelShape, keys: Keys) -> Stage:
    word, pack_query = instructions.word(shape.cpu), step(shape.cpu, keys.pack_query)

    @inlined
    def take_in(side: int, job: int, scratch: int, state: int, task: int, tile: int, places: int, following: int) -> None:
        row, group = 0, word((task, jobs.GROUP))
        first = word((job, jobs.QUERIES)) + word((task, jobs.QUERY_HEAD)) * word((job, jobs.QUERY_HEAD_BYTES))
        for token in range(word((task, jobs.TOKEN)), word((task, jobs.TOKEN)) + word((task, jobs.COUNT))):
            address = first + token * word((job, jobs.QUERY_TOKEN_BYTES))
            for head in range(group):
                pack_query((scratch, row, address + head * word((job, jobs.QUERY_HEAD_BYTES)), side))
                row += 1

    return take_in


def _score(shape: KernelShape, keys: Keys) -> Stage:
    word, pack, scores, together = (
        instructions.word(shape.cpu),
        step(shape.cpu, keys.pack),
        step(shape.cpu, keys.scores),
        keys.together,
    )

    @inlined
    def score(side: int, job: int, scratch: int, state: int, task: int, tile: int, places: int, following: int) -> None:
        pack((scratch, places, following, side))
        rows = word((task, jobs.COUNT)) * word((task, jobs.GROUP))
        for row in range(0, rows, together):
            scores((scratch, row, min(together, rows - row)))

    return score


def _soften(shape: KernelShape, values: Values) -> Stage:
    word, states = instructions.word(shape.cpu), States(shape)
    cap, soften_row = step(shape.cpu, states.cap), step(shape.cpu, states.soften(values))

    @inlined
    def soften(side: int, job: int, scratch: int, state: int, task: int, tile: int, places: int, following: int) -> None:
        row, group, slopes = 0, word((task, jobs.GROUP)), word((job, jobs.SLOPES)) + 4 * word((task, jobs.QUERY_HEAD))
        for token in range(word((task, jobs.COUNT))):
            behind = word((task, jobs.POSITION)) + token + 1 - tile * TILE
            first = max(0, behind - word((job, jobs.WINDOW)))
            for head in range(group):
                if word((job, jobs.CAP)):
                    cap((scratch, job, row))
                soften_row((scratch, state, job, row, slopes + 4 * head, first, behind))
                row += 1

    return soften


def _weigh(shape: KernelShape, values: Values) -> Stage:
    word, pack, share = instructions.word(shape.cpu), step(shape.cpu, values.pack), step(shape.cpu, values.share)
    weigh_rows, together = step(shape.cpu, values.weigh), values.together

    @inlined
    def weigh(side: int, job: int, scratch: int, state: int, task: int, tile: int, places: int, following: int) -> None:
        pack((scratch, places, following, side))
        rows = word((task, jobs.COUNT)) * word((task, jobs.GROUP))
        for row in range(rows):
            share((scratch, row))
        for row in range(0, rows, together):
            weigh_rows((scratch, state, row, min(together, rows - row), places))

    return weigh


def _put_out(shape: KernelShape, values: Values) -> Stage:
    word, finish, row_bytes = instructions.word(shape.cpu), step(shape.cpu, values.finish), shape.row_bytes

    @inlined
    def put_out(side: int, job: int, scratch: int, state: int, task: int, tile: int, places: int, following: int) -> None:
        row, group, heads = 0, word((task, jobs.GROUP)), word((job, jobs.NUM_HEADS))
        for token in range(word((task, jobs.TOKEN)), word((task, jobs.TOKEN)) + word((task, jobs.COUNT))):
            out = word((job, jobs.OUT)) + (token * heads + word((task, jobs.QUERY_HEAD))) * row_bytes
            for head in range(group):
                finish((state, row, out + head * row_bytes, side))
                row += 1

    return put_out


def fetch_rest(shape: KernelShape) -> Step:
    """(places, following): fetch what the next tile has more than this one."""

    def emit(v: Vectors, places: Value, following: Value) -> None:
        b, here, later = v.builder, num_tokens(v, places), num_tokens(v, following)

        def one(index: Value, _: list[Value]) -> list[Value]:
            place = row_at(v, following, 0, b.add(here, index), 8)
            for rows, scales, side in ((KEY_ROWS, KEY_SCALES, shape.keys), (VALUE_ROWS, VALUE_SCALES, shape.values)):
                fetch(v, place, rows, shape.row_bytes if side.packed is None else side.packed.row_bytes)
                if side.packed is not None and not side.packed.static:
                    fetch(v, place, scales, 1)
            return []

        with b.if_then(b.icmp_signed(">", later, here)):
            v.loop(b.sub(later, here), [], one)

    return step(shape.cpu, emit)


def locate(shape: KernelShape) -> Callable[[int, int, int, int, int], None]:
    """(job, scratch, task, tile, places): put down how many of a tile's tokens the task's queries see, and where they lie."""
    word, poke, zeros_at, lanes = (
        instructions.word(shape.cpu),
        instructions.poke(shape.cpu),
        Scratch(shape).zeros,
        shape.cpu.lanes,
    )
    poke_keys, poke_values = _poke_scales(shape, shape.keys, KEY_SCALES), _poke_scales(shape, shape.values, VALUE_SCALES)

    @inlined
    def locate_tile(job: int, scratch: int, task: int, tile: int, places: int) -> None:
        keys = word((job, jobs.HEADS)) + 8 * (jobs.HEAD_WORDS * word((task, jobs.HEAD)) + jobs.KEY_SIDE)
        values = keys + 8 * (jobs.VALUE_SIDE - jobs.KEY_SIDE)
        key_bytes, value_bytes = word((keys, jobs.ROW_BYTES)), word((values, jobs.ROW_BYTES))
        table, block_size, first = (
            word((job, jobs.TABLES)) + 8 * word((task, jobs.TABLE)),
            word((job, jobs.BLOCK_SIZE)),
            tile * TILE,
        )
        count = min(TILE, word((task, jobs.POSITION)) + word((task, jobs.COUNT)) - first)
        index = 0
        while index < count:
            number = (first + index) // block_size
            offset, block = first + index - number * block_size, word((table, number))
            run = min(block_size - offset, count - index)
            key = word((keys, jobs.ADDRESS)) + block * word((keys, jobs.BLOCK_BYTES))
            value = word((values, jobs.ADDRESS)) + block * word((values, jobs.BLOCK_BYTES))
            poke_keys(places, index, key, offset, run)
            poke_values(places, index, value, offset, run)
            for n in range(offset, offset + run):
                poke((places, TILE * KEY_ROWS + index, key + n * key_bytes))
                poke((places, TILE * VALUE_ROWS + index, value + n * value_bytes))
                index += 1
        while index % lanes:  # whole vectors are read: zeros, not what lies in unused slots
            for kind in range(4):
                poke((places, TILE * kind + index, scratch + zeros_at))
            index += 1
        poke((places, PLACES_COUNT, count))

    return locate_tile


def _poke_scales(shape: KernelShape, side: SideForm, kind: int) -> Callable[[int, int, int, int, int], None]:
    """(places, index, chunk, offset, run): put down where scales of tokens of one chunk lie."""
    form = side.packed
    if form is None or form.static:

        @inlined
        def none(places: int, index: int, chunk: int, offset: int, run: int) -> None:
            pass

        return none
    poke, scales_at, scale_bytes = instructions.poke(shape.cpu), form.scales_at, 2 * form.num_groups

    @inlined
    def poke_scales(places: int, index: int, chunk: int, offset: int, run: int) -> None:
        for n in range(run):
            poke((places, TILE * kind + index + n, chunk + scales_at + (offset + n) * scale_bytes))

    return poke_scales
