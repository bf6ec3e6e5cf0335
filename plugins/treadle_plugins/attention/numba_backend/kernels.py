"""The kernels: Numba functions around the inner parts, run by every thread of a pool on the same job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from treadle_plugins.attention.numba_backend import jobs, tiles
from treadle_plugins.attention.numba_backend.forms import whole
from treadle_plugins.attention.numba_backend.shape import SEGMENT, TILE, KernelShape
from treadle_plugins.attention.numba_backend.vectors import I8, I64, Vectors

Emit = Callable[..., Any]
SIGNATURE = types.void(types.int64)
"""Of every kernel: the address of a job."""
_TILES = SEGMENT // TILE
_AT_ONCE = 6  # rows that a matrix kernel takes
_WRITTEN_AT_ONCE = 16  # tokens


class Kernels(NamedTuple):
    """Python functions of one address, for Numba to compile."""

    attend: Callable[[int], None]
    write: Callable[[int], None]


def build(shape: KernelShape) -> Kernels:
    """The kernels for `shape`."""
    return Kernels(_attend(shape), _write(shape))


def _attend(shape: KernelShape) -> Callable[[int], None]:
    form = whole(shape)
    parts = tiles.Tiles(shape, form, form)

    def part(emit: Emit) -> Any:
        return _instruction(shape, emit)

    word, poke, take = part(_word), part(_poke), part(_take)
    pack_query, clear, cap, finish = part(parts.pack_query), part(parts.clear), part(parts.cap), part(parts.finish)
    pack_keys, pack_values, scores = part(parts.pack_keys), part(parts.pack_values), part(parts.scores)
    weigh, join = part(parts.weigh), part(parts.join)
    soften = part(lambda v, a, s, j, r, q, low, high: parts.soften(v, a, s, j, r, q, [low, high]))
    at = parts.scratch
    scratch_bytes, state_bytes, row_bytes = at.num_bytes, shape.state_bytes, shape.row_bytes
    total_at, part_at, places_at, zeros_at = at.total, at.part, at.places, at.zeros
    group, rows_at_most, stored_bytes = shape.group, shape.rows, form.row_bytes

    @njit  # type: ignore[misc]
    def locate(job: int, scratch: int, task: int, tile: int, places: int) -> int:
        """Addresses of a tile's keys and values; how many the task's queries see at most."""
        block_size, head = word((job, jobs.BLOCK_SIZE)), word((task, jobs.HEAD))
        table = word((job, jobs.TABLES)) + 8 * word((task, jobs.TABLE))
        keys = word((job, jobs.KEYS)) + head * word((job, jobs.KEY_HEAD_BYTES))
        values = word((job, jobs.VALUES)) + head * word((job, jobs.VALUE_HEAD_BYTES))
        first = tile * TILE
        count = min(TILE, word((task, jobs.POSITION)) + word((task, jobs.COUNT)) - first)
        index = 0
        while index < count:
            block = (first + index) // block_size
            offset = first + index - block * block_size
            run = min(block_size - offset, count - index)
            block = word((table, block))
            key = keys + block * word((job, jobs.KEY_BLOCK_BYTES)) + offset * stored_bytes
            value = values + block * word((job, jobs.VALUE_BLOCK_BYTES)) + offset * stored_bytes
            for n in range(run):
                poke((places, index + n, key + n * stored_bytes))
                poke((places, TILE + index + n, value + n * stored_bytes))
            index += run
        while index < TILE and index % 16:
            poke((places, index, scratch + zeros_at))
            poke((places, TILE + index, scratch + zeros_at))
            index += 1
        return count

    @njit  # type: ignore[misc]
    def first_tile(job: int, task: int) -> int:
        sees_from = max(0, word((task, jobs.POSITION)) + 1 - word((job, jobs.WINDOW)))
        return max(sees_from // TILE, word((task, jobs.FROM)) * _TILES)

    @njit  # type: ignore[misc]
    def last_tile(task: int) -> int:
        return min((word((task, jobs.POSITION)) + word((task, jobs.COUNT)) + TILE - 1) // TILE, word((task, jobs.TO)) * _TILES)

    @njit  # type: ignore[misc]
    def one_tile(job: int, scratch: int, state: int, task: int, tile: int, places: int, following: int, count: int) -> None:
        rows = word((task, jobs.COUNT)) * group
        slopes = word((job, jobs.SLOPES)) + 4 * group * word((task, jobs.HEAD))
        pack_keys((scratch, places, following, count))
        row = 0
        while row < rows:
            now = min(_AT_ONCE, rows - row)
            scores((scratch, row, now))
            row += now
        high = word((task, jobs.POSITION)) + 1 - tile * TILE
        for row in range(rows):
            if word((job, jobs.CAP)):
                cap((scratch, job, row))
            seen = high + row // group
            soften((scratch, state, job, row, slopes + 4 * (row % group), max(0, seen - word((job, jobs.WINDOW))), seen))
        pack_values((scratch, places + 8 * TILE, following + 8 * TILE, count))
        row = 0
        while row < rows:
            now = min(_AT_ONCE, rows - row)
            weigh((scratch, state, row, now, count))
            row += now

    @njit  # type: ignore[misc]
    def all_tiles(job: int, scratch: int, task: int, next_task: int) -> None:
        """Work off a task's tiles; states end up in the task's part, or joined in the thread's `total`."""
        rows = word((task, jobs.COUNT)) * group
        shared = word((task, jobs.NUM_PARTS)) > 1
        tile, last = first_tile(job, task), last_tile(task)
        places, following = scratch + places_at, scratch + places_at + 2 * 8 * TILE
        count = locate(job, scratch, task, tile, places)
        for segment in range(word((task, jobs.FROM)), word((task, jobs.TO))):
            state = scratch + (total_at if segment == word((task, jobs.FROM)) else part_at)
            if shared:
                state = word((job, jobs.PARTS)) + (word((task, jobs.PART))) * state_bytes
            clear((state, rows))
            while tile < min(last, (segment + 1) * _TILES):
                next_count = 0
                if tile + 1 < last:
                    next_count = locate(job, scratch, task, tile + 1, following)
                elif next_task:
                    next_count = locate(job, scratch, next_task, first_tile(job, next_task), following)
                one_tile(job, scratch, state, task, tile, places, following, count)
                places, following = following, places
                count = next_count
                tile += 1
            if state == scratch + part_at:
                join((scratch + total_at, state, rows))

    @njit  # type: ignore[misc]
    def put_out(job: int, state: int, task: int) -> None:
        heads, token = word((job, jobs.NUM_HEADS)), word((task, jobs.TOKEN))
        for row in range(word((task, jobs.COUNT)) * group):
            head = word((task, jobs.HEAD)) * group + row % group
            finish((state, row, word((job, jobs.OUT)) + ((token + row // group) * heads + head) * row_bytes))

    @njit  # type: ignore[misc]
    def one_task(job: int, scratch: int, task: int, next_task: int) -> None:
        token, count, head = word((task, jobs.TOKEN)), word((task, jobs.COUNT)), word((task, jobs.HEAD)) * group
        for row in range(count * group):
            address = (token + row // group) * word((job, jobs.QUERY_TOKEN_BYTES))
            address += (head + row % group) * word((job, jobs.QUERY_HEAD_BYTES))
            pack_query((scratch, row, word((job, jobs.QUERIES)) + address))
        all_tiles(job, scratch, task, next_task)
        num_parts = word((task, jobs.NUM_PARTS))
        if num_parts == 1:
            put_out(job, scratch + total_at, task)
        elif take((word((job, jobs.COUNTERS)), word((task, jobs.COUNTER)))) == num_parts - 1:
            total = word((job, jobs.PARTS)) + word((task, jobs.FIRST_PART)) * state_bytes
            for n in range(1, num_parts):
                join((total, total + n * count * group * state_bytes, count * group))
            put_out(job, total, task)
            poke((word((job, jobs.COUNTERS)), word((task, jobs.COUNTER)), 0))

    def attend(job: int) -> None:
        scratch = word((job, jobs.SCRATCH)) + take((job, jobs.THREADS)) * scratch_bytes
        num_tasks, tasks = word((job, jobs.NUM_TASKS)), word((job, jobs.TASKS))
        task = take((job, jobs.NEXT))
        while task < num_tasks:
            following = take((job, jobs.NEXT))
            after = tasks + 8 * jobs.TASK_WORDS * following if following < num_tasks else 0
            one_task(job, scratch, tasks + 8 * jobs.TASK_WORDS * task, after)
            task = following

    return attend


def _write(shape: KernelShape) -> Callable[[int], None]:
    word, take = _instruction(shape, _word), _instruction(shape, _take)
    copy = _instruction(shape, lambda v, target, source: _copy(v, target, source, shape.row_bytes))
    row_bytes = shape.row_bytes

    @njit  # type: ignore[misc]
    def store(job: int, side: int, token: int, block: int, offset: int) -> None:
        source = word((job, side + jobs.SOURCE)) + token * word((job, side + jobs.SOURCE_TOKEN_BYTES))
        target = word((job, side + jobs.TARGET)) + block * word((job, side + jobs.TARGET_BLOCK_BYTES)) + offset * row_bytes
        for head in range(word((job, jobs.WRITTEN_HEADS))):
            place = target + head * word((job, side + jobs.TARGET_HEAD_BYTES))
            copy((place, source + head * word((job, side + jobs.SOURCE_HEAD_BYTES))))

    def write(job: int) -> None:
        tokens = word((job, jobs.WRITTEN_TOKENS))
        first = take((job, jobs.NEXT)) * _WRITTEN_AT_ONCE
        while first < tokens:
            for token in range(first, min(tokens, first + _WRITTEN_AT_ONCE)):
                block, offset = word((word((job, jobs.BLOCKS)), token)), word((word((job, jobs.OFFSETS)), token))
                store(job, jobs.KEY_SIDE, token, block, offset)
                store(job, jobs.VALUE_SIDE, token, block, offset)
            first = take((job, jobs.NEXT)) * _WRITTEN_AT_ONCE

    return write


def _instruction(shape: KernelShape, emit: Emit) -> Any:
    """A function for Numba code: called with one tuple of integers, it becomes what `emit` writes."""

    def typed(_: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            items = [
                context.cast(builder, builder.extract_value(values[0], n), kind, types.int64)
                for n, kind in enumerate(signature.args[0].types)
            ]
            result = emit(Vectors(builder, shape.cpu), *items)
            return context.get_dummy_value() if result is None else result

        returns = types.int64 if emit in (_word, _take) else types.void
        return returns(arguments), generate

    return intrinsic(typed)


def _word(v: Vectors, address: Any, index: Any) -> Any:
    return v.load(I64, v.at(address, v.builder.mul(index, I64(8))))


def _poke(v: Vectors, address: Any, index: Any, value: Any) -> None:
    v.store(value, v.at(address, v.builder.mul(index, I64(8))))


def _take(v: Vectors, address: Any, index: Any) -> Any:
    """Count a word up, one thread after another; what it was."""
    place = v.builder.inttoptr(v.at(address, v.builder.mul(index, I64(8))), I64.as_pointer())
    return v.builder.atomic_rmw("add", place, I64(1), "acq_rel")


def _copy(v: Vectors, target: Any, source: Any, num_bytes: int) -> None:
    """Copy a row, in pieces as wide as a vector."""
    done = 0
    while done < num_bytes:
        width = min(4 * v.lanes, num_bytes - done)
        v.store(v.load(ir.VectorType(I8, width), source, done), target, done)
        done += width
