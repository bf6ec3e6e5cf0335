"""The kernel that stores new keys and values in the pool: whole ones as they are, others turned and packed on the way."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from treadle_plugins.attention.numba_backend import instructions, jobs
from treadle_plugins.attention.numba_backend.encode import Encoder
from treadle_plugins.attention.numba_backend.instructions import inlined, step
from treadle_plugins.attention.numba_backend.shape import KernelShape, SideForm
from treadle_plugins.kernels.vectors import I8, Value, Vectors

_TOGETHER = 16  # tokens that a thread takes at once

Store = Callable[[int, int, int, int], None]
"""(side, chunk, offset, source): store the row at `source` as token `offset` of a chunk of a head."""


def build_write(shape: KernelShape) -> Callable[[int], None]:
    """The kernel for `shape`."""
    word, take = instructions.word(shape.cpu), instructions.take(shape.cpu)
    store_keys, store_values = (
        _side(shape, _store(shape, shape.keys), jobs.KEY_SOURCE, jobs.KEY_SIDE),
        _side(shape, _store(shape, shape.values), jobs.VALUE_SOURCE, jobs.VALUE_SIDE),
    )

    def write(job: int) -> None:
        tokens = word((job, jobs.WRITTEN_TOKENS))
        first = take((job, jobs.NEXT)) * _TOGETHER
        while first < tokens:
            for token in range(first, min(tokens, first + _TOGETHER)):
                store_keys(job, token)
                store_values(job, token)
            first = take((job, jobs.NEXT)) * _TOGETHER

    return write


def _side(shape: KernelShape, store: Store, source_at: int, side_at: int) -> Callable[[int, int], None]:
    word = instructions.word(shape.cpu)

    @inlined
    def store_side(job: int, token: int) -> None:
        block, offset = word((word((job, jobs.BLOCKS)), token)), word((word((job, jobs.OFFSETS)), token))
        source = word((job, source_at + jobs.SOURCE)) + token * word((job, source_at + jobs.SOURCE_TOKEN_BYTES))
        for head in range(word((job, jobs.WRITTEN_HEADS))):
            side = word((job, jobs.HEADS)) + 8 * (jobs.HEAD_WORDS * head + side_at)
            chunk = word((side, jobs.ADDRESS)) + block * word((side, jobs.BLOCK_BYTES))
            store(side, chunk, offset, source + head * word((job, source_at + jobs.SOURCE_HEAD_BYTES)))

    return store_side


def _store(shape: KernelShape, form: SideForm) -> Store:
    word, row_bytes = instructions.word(shape.cpu), shape.row_bytes
    copy = step(shape.cpu, lambda v, target, source: _copy(v, target, source, row_bytes))

    @inlined
    def store_whole(side: int, chunk: int, offset: int, source: int) -> None:  # noqa: ARG001  # as store_packed
        copy((chunk + offset * row_bytes, source))

    if form.packed is None:
        return store_whole
    encode = step(shape.cpu, Encoder(shape, form.packed).encode)

    @inlined
    def store_packed(side: int, chunk: int, offset: int, source: int) -> None:
        encode((chunk, offset, source, side))

    if not form.whole:
        return store_packed

    @inlined
    def store_either(side: int, chunk: int, offset: int, source: int) -> None:
        if word((side, jobs.PACKED)):
            store_packed(side, chunk, offset, source)
        else:
            store_whole(side, chunk, offset, source)

    return store_either


def _copy(v: Vectors, target: Value, source: Value, num_bytes: int) -> None:
    """Copy a row, in pieces as wide as a vector."""
    done = 0
    while done < num_bytes:
        width = min(4 * v.lanes, num_bytes - done)
        v.store(v.load(ir.VectorType(I8, width), source, done), target, done)
        done += width
