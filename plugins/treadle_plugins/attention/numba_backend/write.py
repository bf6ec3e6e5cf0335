"""The kernel that stores new keys and values in the pool."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from treadle_plugins.attention.numba_backend import instructions, jobs
from treadle_plugins.attention.numba_backend.instructions import inlined, step
from treadle_plugins.attention.numba_backend.shape import KernelShape
from treadle_plugins.attention.numba_backend.vectors import I8, Value, Vectors

_TOGETHER = 16  # tokens that a thread takes at once


def build_write(shape: KernelShape) -> Callable[[int], None]:
    """The kernel for `shape`."""
    word, take, row_bytes = instructions.word(shape.cpu), instructions.take(shape.cpu), shape.row_bytes
    store_row = step(shape.cpu, lambda v, target, source: _copy(v, target, source, row_bytes))

    @inlined
    def store(job: int, from_side: int, to_side: int, token: int) -> None:
        block, offset = word((word((job, jobs.BLOCKS)), token)), word((word((job, jobs.OFFSETS)), token))
        source = word((job, from_side + jobs.SOURCE)) + token * word((job, from_side + jobs.SOURCE_TOKEN_BYTES))
        for head in range(word((job, jobs.WRITTEN_HEADS))):
            place = word((job, jobs.HEADS)) + 8 * jobs.HEAD_WORDS * head
            target = word((place, to_side + jobs.ADDRESS)) + block * word((place, to_side + jobs.BLOCK_BYTES))
            store_row((target + offset * row_bytes, source + head * word((job, from_side + jobs.SOURCE_HEAD_BYTES))))

    def write(job: int) -> None:
        tokens = word((job, jobs.WRITTEN_TOKENS))
        first = take((job, jobs.NEXT)) * _TOGETHER
        while first < tokens:
            for token in range(first, min(tokens, first + _TOGETHER)):
                store(job, jobs.KEY_SOURCE, jobs.KEY_SIDE, token)
                store(job, jobs.VALUE_SOURCE, jobs.VALUE_SIDE, token)
            first = take((job, jobs.NEXT)) * _TOGETHER

    return write


def _copy(v: Vectors, target: Value, source: Value, num_bytes: int) -> None:
    """Copy a row, in pieces as wide as a vector."""
    done = 0
    while done < num_bytes:
        width = min(4 * v.lanes, num_bytes - done)
        v.store(v.load(ir.VectorType(I8, width), source, done), target, done)
        done += width
