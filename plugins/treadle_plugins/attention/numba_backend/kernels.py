"""The kernels: Numba functions around the inner parts, run by every thread of a pool on the same job."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from numba import types

from treadle_plugins.attention.numba_backend import instructions, jobs
from treadle_plugins.attention.numba_backend.forms import whole
from treadle_plugins.attention.numba_backend.instructions import inlined, step
from treadle_plugins.attention.numba_backend.shape import SEGMENT, TILE, KernelShape
from treadle_plugins.attention.numba_backend.tiles import Tiles
from treadle_plugins.attention.numba_backend.write import build_write

SIGNATURE = types.void(types.int64)
"""Of every kernel: the address of a job."""
_TILES = SEGMENT // TILE
_TOGETHER = 6  # rows that a matrix kernel takes at once
_ASKED = TILE // 4  # tokens of the next tile that are fetched between two parts of this one

OneTile = Callable[[int, int, int, int, int, int, int, int, int], None]
Locate = Callable[[int, int, int, int, int], int]
AllTiles = Callable[[int, int, int, int], None]


class Kernels(NamedTuple):
    """Python functions of one address, for Numba to compile."""

    attend: Callable[[int], None]
    write: Callable[[int], None]


def build(shape: KernelShape) -> Kernels:
    """The kernels for `shape`."""
    form = whole(shape)
    tiles = Tiles(shape, form, form)
    locate = _locate(shape, tiles, form.row_bytes)
    return Kernels(_attend(shape, tiles, _all_tiles(shape, tiles, locate, _one_tile(shape, tiles))), build_write(shape))


def _attend(shape: KernelShape, tiles: Tiles, all_tiles: AllTiles) -> Callable[[int], None]:
    word, take, poke = instructions.word(shape.cpu), instructions.take(shape.cpu), instructions.poke(shape.cpu)
    pack_query, finish, join = (step(shape.cpu, emit) for emit in (tiles.pack_query, tiles.finish, tiles.join))
    group, row_bytes, state_bytes = shape.group, shape.row_bytes, shape.state_bytes
    scratch_bytes, total_at = tiles.scratch.num_bytes, tiles.scratch.total

    @inlined
    def take_in(job: int, scratch: int, task: int) -> None:
        token, head = word((task, jobs.TOKEN)), word((task, jobs.HEAD)) * group
        for row in range(word((task, jobs.COUNT)) * group):
            address = (token + row // group) * word((job, jobs.QUERY_TOKEN_BYTES))
            address += (head + row % group) * word((job, jobs.QUERY_HEAD_BYTES))
            pack_query((scratch, row, word((job, jobs.QUERIES)) + address))

    @inlined
    def put_out(job: int, state: int, task: int) -> None:
        heads, token = word((job, jobs.NUM_HEADS)), word((task, jobs.TOKEN))
        for row in range(word((task, jobs.COUNT)) * group):
            head = word((task, jobs.HEAD)) * group + row % group
            finish((state, row, word((job, jobs.OUT)) + ((token + row // group) * heads + head) * row_bytes))

    @inlined
    def join_parts(job: int, task: int) -> None:
        """What the last of several tasks does that share their queries."""
        rows, total = word((task, jobs.COUNT)) * group, word((job, jobs.PARTS)) + word((task, jobs.FIRST_PART)) * state_bytes
        for part in range(1, word((task, jobs.NUM_PARTS))):
            join((total, total + part * rows * state_bytes, rows))
        put_out(job, total, task)
        poke((word((job, jobs.COUNTERS)), word((task, jobs.COUNTER)), 0))

    def attend(job: int) -> None:
        scratch = word((job, jobs.SCRATCH)) + take((job, jobs.THREADS)) * scratch_bytes
        num_tasks, tasks = word((job, jobs.NUM_TASKS)), word((job, jobs.TASKS))
        number = take((job, jobs.NEXT))
        while number < num_tasks:
            following = take((job, jobs.NEXT))  # already now, so that its first keys can be fetched
            task = tasks + 8 * jobs.TASK_WORDS * number
            next_task = tasks + 8 * jobs.TASK_WORDS * following if following < num_tasks else 0
            take_in(job, scratch, task)
            all_tiles(job, scratch, task, next_task)
            if word((task, jobs.NUM_PARTS)) == 1:
                put_out(job, scratch + total_at, task)
            elif take((word((job, jobs.COUNTERS)), word((task, jobs.COUNTER)))) == word((task, jobs.NUM_PARTS)) - 1:
                join_parts(job, task)
            number = following

    return attend


def _all_tiles(shape: KernelShape, tiles: Tiles, locate: Locate, one_tile: OneTile) -> AllTiles:
    word = instructions.word(shape.cpu)
    clear, join = step(shape.cpu, tiles.clear), step(shape.cpu, tiles.join)
    group, state_bytes = shape.group, shape.state_bytes
    total_at, part_at, places_at, next_places_at = tiles.scratch.total, tiles.scratch.part, *tiles.scratch.places

    @inlined
    def first_tile(job: int, task: int) -> int:
        first_seen = max(0, word((task, jobs.POSITION)) + 1 - word((job, jobs.WINDOW)))
        return max(first_seen // TILE, word((task, jobs.FROM)) * _TILES)

    @inlined
    def all_tiles(job: int, scratch: int, task: int, next_task: int) -> None:
        """Work off a task. States end up in the task's place among the parts, or joined in the thread's `total`."""
        rows, behind = word((task, jobs.COUNT)) * group, word((task, jobs.POSITION)) + word((task, jobs.COUNT))
        tile, last = first_tile(job, task), min((behind + TILE - 1) // TILE, word((task, jobs.TO)) * _TILES)
        places, following = scratch + places_at, scratch + next_places_at
        count = locate(job, scratch, task, tile, places)
        for segment in range(word((task, jobs.FROM)), word((task, jobs.TO))):
            state = scratch + (total_at if segment == word((task, jobs.FROM)) else part_at)
            if word((task, jobs.NUM_PARTS)) > 1:
                state = word((job, jobs.PARTS)) + word((task, jobs.PART)) * state_bytes
            clear((state, rows))
            while tile < min(last, (segment + 1) * _TILES):
                next_count = 0
                if tile + 1 < last:
                    next_count = locate(job, scratch, task, tile + 1, following)
                elif next_task:
                    next_count = locate(job, scratch, next_task, first_tile(job, next_task), following)
                one_tile(job, scratch, state, task, tile, places, count, following, next_count)
                places, following, count = following, places, next_count
                tile += 1
            if state == scratch + part_at:
                join((scratch + total_at, state, rows))

    return all_tiles


def _one_tile(shape: KernelShape, tiles: Tiles) -> OneTile:
    word, group = instructions.word(shape.cpu), shape.group
    pack_keys, pack_values, ask = (step(shape.cpu, emit) for emit in (tiles.pack_keys, tiles.pack_values, tiles.ask))
    scores, cap, soften, weigh = (step(shape.cpu, emit) for emit in (tiles.scores, tiles.cap, tiles.soften, tiles.weigh))

    @inlined
    def soften_rows(job: int, scratch: int, state: int, task: int, tile: int) -> None:
        slopes = word((job, jobs.SLOPES)) + 4 * group * word((task, jobs.HEAD))
        behind_first = word((task, jobs.POSITION)) + 1 - tile * TILE
        for row in range(word((task, jobs.COUNT)) * group):
            if word((job, jobs.CAP)):
                cap((scratch, job, row))
            behind = behind_first + row // group
            first = max(0, behind - word((job, jobs.WINDOW)))
            soften((scratch, state, job, row, slopes + 4 * (row % group), first, behind))

    @inlined
    def one_tile(
        job: int, scratch: int, state: int, task: int, tile: int, places: int, count: int, following: int, next_count: int
    ) -> None:
        """Take one tile into the states. The next one is fetched piece by piece, which keeps the memory busy all along."""
        rows = word((task, jobs.COUNT)) * group
        ask((following, 0, min(_ASKED, next_count)))
        pack_keys((scratch, places, count))
        ask((following, _ASKED, min(_ASKED, next_count - _ASKED)))
        for row in range(0, rows, _TOGETHER):
            scores((scratch, row, min(_TOGETHER, rows - row)))
        ask((following, 2 * _ASKED, min(_ASKED, next_count - 2 * _ASKED)))
        soften_rows(job, scratch, state, task, tile)
        ask((following, 3 * _ASKED, next_count - 3 * _ASKED))
        pack_values((scratch, places, count))
        for row in range(0, rows, _TOGETHER):
            weigh((scratch, state, row, min(_TOGETHER, rows - row), count))

    return one_tile


def _locate(shape: KernelShape, tiles: Tiles, stored_bytes: int) -> Locate:
    word, poke = instructions.word(shape.cpu), instructions.poke(shape.cpu)
    zeros_at, lanes, key_bytes, value_bytes = tiles.scratch.zeros, shape.cpu.lanes, stored_bytes, stored_bytes

    @inlined
    def locate(job: int, scratch: int, task: int, tile: int, places: int) -> int:
        """Put the addresses of a tile's keys and values into `places`; how many of them the task's queries see."""
        head = word((job, jobs.HEADS)) + 8 * jobs.HEAD_WORDS * word((task, jobs.HEAD))
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
            key = word((head, jobs.KEY_SIDE + jobs.ADDRESS)) + block * word((head, jobs.KEY_SIDE + jobs.BLOCK_BYTES))
            value = word((head, jobs.VALUE_SIDE + jobs.ADDRESS)) + block * word((head, jobs.VALUE_SIDE + jobs.BLOCK_BYTES))
            for n in range(offset, offset + min(block_size - offset, count - index)):
                poke((places, index, key + n * key_bytes))
                poke((places, TILE + index, value + n * value_bytes))
                index += 1
        while index % lanes:  # whole vectors are read: zeros, not what lies in unused slots
            poke((places, index, scratch + zeros_at))
            poke((places, TILE + index, scratch + zeros_at))
            index += 1
        return count

    return locate
