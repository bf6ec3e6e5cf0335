"""The kernels: Numba functions around the inner parts, run by every thread of a pool on the same job."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from numba import types

from treadle_plugins.attention.numba_backend import instructions, jobs, stages
from treadle_plugins.attention.numba_backend.instructions import inlined, step
from treadle_plugins.attention.numba_backend.shape import SEGMENT, TILE, KernelShape, Scratch
from treadle_plugins.attention.numba_backend.states import States
from treadle_plugins.attention.numba_backend.write import build_write

SIGNATURE = types.void(types.int64)
"""Of every kernel: the address of a job."""
_TILES = SEGMENT // TILE

Locate = Callable[[int, int, int, int, int], None]
OneTile = Callable[[int, int, int, int, int, int, int], None]
AllTiles = Callable[[int, int, int, int], None]


class Kernels(NamedTuple):
    """Python functions of one address, for Numba to compile."""

    attend: Callable[[int], None]
    write: Callable[[int], None]


def build(shape: KernelShape) -> Kernels:
    """The kernels for `shape`."""
    all_stages = stages.build(shape)
    all_tiles = _all_tiles(shape, stages.locate(shape), _one_tile(shape, all_stages))
    return Kernels(_attend(shape, all_stages, all_tiles), build_write(shape))


def _attend(shape: KernelShape, all_stages: stages.Stages, all_tiles: AllTiles) -> Callable[[int], None]:
    word, take, poke = instructions.word(shape.cpu), instructions.take(shape.cpu), instructions.poke(shape.cpu)
    join, scratch = step(shape.cpu, States(shape).join), Scratch(shape)
    take_in, put_out = all_stages.take_in, all_stages.put_out
    scratch_bytes, total_at, state_bytes = scratch.num_bytes, scratch.total, shape.state_bytes

    @inlined
    def join_parts(job: int, scratch: int, parts: int, head: int) -> None:
        """What the last of several tasks does that compute parts of one set."""
        rows, states = word((parts, jobs.COUNT)) * word((parts, jobs.GROUP)), word((job, jobs.PARTS))
        places = word((job, jobs.PLACES)) + 8 * word((parts, jobs.FIRST_PLACE))
        total = states + word((places, 0)) * state_bytes
        for part in range(1, word((parts, jobs.NUM_PARTS))):
            join((total, states + word((places, part)) * state_bytes, rows))
        put_out(head + 8 * jobs.VALUE_SIDE, job, scratch, total, parts, 0, 0, 0)

    @inlined
    def count_parts(job: int, scratch: int, task: int, head: int) -> None:
        """A task's part of each of its sets is done."""
        counters = word((job, jobs.COUNTERS))
        for number in range(word((task, jobs.SET)), word((task, jobs.SET)) + word((task, jobs.NUM_SETS))):
            parts = word((job, jobs.SETS)) + 8 * jobs.SET_WORDS * number
            if take((counters, number)) == word((parts, jobs.NUM_PARTS)) - 1:
                join_parts(job, scratch, parts, head)
                poke((counters, number, 0))

    def attend(job: int) -> None:
        scratch = word((job, jobs.SCRATCH)) + take((job, jobs.THREADS)) * scratch_bytes
        num_tasks, tasks = word((job, jobs.NUM_TASKS)), word((job, jobs.TASKS))
        number = take((job, jobs.NEXT))
        while number < num_tasks:
            following = take((job, jobs.NEXT))  # already now, so that its first keys can be fetched
            task = tasks + 8 * jobs.TASK_WORDS * number
            next_task = tasks + 8 * jobs.TASK_WORDS * following if following < num_tasks else 0
            head = word((job, jobs.HEADS)) + 8 * jobs.HEAD_WORDS * word((task, jobs.HEAD))
            take_in(head + 8 * jobs.KEY_SIDE, job, scratch, 0, task, 0, 0, 0)
            all_tiles(job, scratch, task, next_task)
            if word((task, jobs.NUM_SETS)):
                count_parts(job, scratch, task, head)
            else:
                put_out(head + 8 * jobs.VALUE_SIDE, job, scratch, scratch + total_at, task, 0, 0, 0)
            number = following

    return attend


def _all_tiles(shape: KernelShape, locate: Locate, one_tile: OneTile) -> AllTiles:
    word, states, at = instructions.word(shape.cpu), States(shape), Scratch(shape)
    clear, join = step(shape.cpu, states.clear), step(shape.cpu, states.join)
    state_bytes, total_at, part_at, (places_at, next_places_at) = shape.state_bytes, at.total, at.part, at.places

    @inlined
    def first_tile(job: int, task: int) -> int:
        first_seen = max(0, word((task, jobs.POSITION)) + 1 - word((job, jobs.WINDOW)))
        return max(first_seen // TILE, word((task, jobs.FROM)) * _TILES)

    @inlined
    def all_tiles(job: int, scratch: int, task: int, next_task: int) -> None:
        """Work off a task. States end up in the task's place among the parts, or joined in the thread's `total`."""
        rows = word((task, jobs.COUNT)) * word((task, jobs.GROUP))
        behind = word((task, jobs.POSITION)) + word((task, jobs.COUNT))
        tile, last = first_tile(job, task), min((behind + TILE - 1) // TILE, word((task, jobs.TO)) * _TILES)
        places, following = scratch + places_at, scratch + next_places_at
        locate(job, scratch, task, tile, places)
        for segment in range(word((task, jobs.FROM)), word((task, jobs.TO))):
            state = scratch + (total_at if segment == word((task, jobs.FROM)) else part_at)
            if word((task, jobs.NUM_SETS)):
                state = word((job, jobs.PARTS)) + word((task, jobs.STATES)) * state_bytes
            clear((state, rows))
            while tile < min(last, (segment + 1) * _TILES):
                if tile + 1 < last:
                    locate(job, scratch, task, tile + 1, following)
                elif next_task:
                    locate(job, scratch, next_task, first_tile(job, next_task), following)
                one_tile(job, scratch, state, task, tile, places, following)
                places, following = following, places
                tile += 1
            if state == scratch + part_at:
                join((scratch + total_at, state, rows))

    return all_tiles


def _one_tile(shape: KernelShape, all_stages: stages.Stages) -> OneTile:
    word, fetch_rest = instructions.word(shape.cpu), stages.fetch_rest(shape)
    score, soften, weigh = all_stages.score, all_stages.soften, all_stages.weigh

    @inlined
    def one_tile(job: int, scratch: int, state: int, task: int, tile: int, places: int, following: int) -> None:
        """Take one tile into the states, while the next one is fetched."""
        keys = word((job, jobs.HEADS)) + 8 * (jobs.HEAD_WORDS * word((task, jobs.HEAD)) + jobs.KEY_SIDE)
        values = keys + 8 * (jobs.VALUE_SIDE - jobs.KEY_SIDE)
        score(keys, job, scratch, state, task, tile, places, following)
        soften(values, job, scratch, state, task, tile, places, following)
        weigh(values, job, scratch, state, task, tile, places, following)
        fetch_rest((places, following))

    return one_tile
