"""A step's tasks: who computes what. It decides how long attention takes, never what comes out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.numba_backend import jobs
from treadle_plugins.attention.numba_backend.shape import ROWS, SEGMENT

Ints = npt.NDArray[np.int64]
_PACKING = 16
"""Packing a tile takes as long as multiplying it with so many rows."""
_PIECES = 4
"""Tasks for each thread that suffice to keep all busy: nothing larger than a piece of that size stays whole."""
_WORTH = 4
"""Sharing a segment is worth cutting contexts of so many: the states of each have to be written down and read again."""


class Plan(NamedTuple):
    """Tasks of one step, for layers with one window."""

    tasks: Ints  # [tasks, TASK_WORDS], the longest first
    sets: Ints  # [sets, SET_WORDS]
    places: Ints  # [parts of all sets], rows of states
    num_states: int
    """Rows of states that tasks of cut contexts leave behind."""
    cost: int
    """Tokens times rows, packing included."""


class Heads:
    """Query heads that one task takes: those that share a KV head, or fewer where they are more than ROWS."""

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        group = num_heads // num_kv_heads
        shares = np.diff(np.linspace(0, group, -(-group // ROWS) + 1).round().astype(np.int64))
        self.sizes: Ints = np.tile(shares, num_kv_heads)
        self.firsts: Ints = np.cumsum(self.sizes) - self.sizes
        self.kv_heads: Ints = self.firsts // group
        self.count = len(self.sizes)
        self.together = int(shares.max())


class _Pieces(NamedTuple):
    """Pieces of query tokens that share tiles, over all sequences."""

    token: Ints
    length: Ints
    table: Ints
    position: Ints


class _Cells(NamedTuple):
    """What cannot be cut further: a piece with one segment, or with all there is to see. By first segment, then by piece."""

    piece: Ints
    part: Ints
    """Which of the piece's cells."""
    first: Ints
    last: Ints
    """Segments: the first, and the one behind the last."""


class _Groups(NamedTuple):
    """Cells that follow one another and are computed together: one task for each of the heads."""

    first: Ints
    """First cell of each."""
    cells: Ints
    """Number of cells of each."""
    tokens: Ints
    """Query tokens of each."""
    of_cell: Ints
    before: Ints
    """For each cell: query tokens before it, within its group."""


def make(batch: PackedBatch, heads: Heads, window: int | None, num_threads: int, *, has_slopes: bool = False) -> Plan:
    """Cut a step into tasks: by sequence, query tokens and heads, and long contexts by segments as well.

    Segments that neighbours in the batch have in the same blocks are computed for all of them at once. That needs scores which
    do not depend on where the query stands, so neither `window` nor slopes.
    """
    most = max(1, ROWS // heads.together)
    pieces = _cut_queries(batch, most)
    shared = _shared_segments(batch, pieces, most if window is None and not has_slopes else 1)
    behind = pieces.position + pieces.length
    first_seen = np.zeros_like(behind) if window is None else np.maximum(0, pieces.position + 1 - window)
    first, last = first_seen // SEGMENT, (behind + SEGMENT - 1) // SEGMENT
    cost = (behind - first_seen) * (pieces.length * heads.together + _PACKING) - shared * (SEGMENT * _PACKING)
    is_cut = shared > 0
    is_cut[:-1] |= is_cut[1:]
    if num_threads > 1:
        is_cut |= (last - first > 1) & (cost * num_threads * _PIECES > cost.sum() * heads.count)

    cells = _cut_contexts(first, last, is_cut)
    groups = _group(cells, pieces.length, shared, most)
    piece, start, end = (values[groups.first] for values in (cells.piece, cells.first, cells.last))
    rows = groups.tokens[:, None] * heads.sizes
    states = np.cumsum(np.where(is_cut[piece, None], rows, 0)).reshape(rows.shape)
    cut, num_cut = np.cumsum(is_cut) - 1, int(is_cut.sum())
    columns = _heads_and_tokens(heads, pieces.token[piece], groups.tokens) | {
        jobs.TABLE: pieces.table[piece],
        jobs.POSITION: np.where(groups.cells > 1, end * SEGMENT - 1, pieces.position[piece]),  # at least behind what is shared
        jobs.FROM: start,
        jobs.TO: end,
        jobs.NUM_SETS: np.where(is_cut[piece], groups.cells, 0),
        jobs.SET: cut[piece, None] + num_cut * np.arange(heads.count),
        jobs.STATES: states - rows,
    }
    tasks = _table(columns, jobs.TASK_WORDS, len(piece), heads.count)
    tokens = np.minimum(behind[piece], end * SEGMENT) - np.maximum(first_seen[piece], start * SEGMENT)
    costs = tokens * (groups.tokens * heads.together + _PACKING)
    longest_first = np.argsort(-np.repeat(costs, heads.count), kind="stable")
    sets, places = _sets(pieces, heads, cells, groups, is_cut, states - rows)
    return Plan(tasks[longest_first], sets, places, int(states[-1, -1]) if len(states) else 0, int(costs.sum()) * heads.count)


def _shared_segments(batch: PackedBatch, pieces: _Pieces, most: int) -> Ints:
    """How many whole segments each piece has in the same blocks as the piece before it, where sharing them pays.

    Both pieces stand behind them, and have few query tokens beside `most`.
    """
    shared, tables = np.zeros_like(pieces.token), batch.tables.numpy()
    if most == 1 or len(shared) == 1:
        return shared
    starts = tables[pieces.table]
    pairs = np.flatnonzero(starts[1:] == starts[:-1])
    if not len(pairs):
        return shared
    whole = np.where(pieces.length <= max(1, most // 3), pieces.position // SEGMENT, 0)
    pairs = pairs[np.minimum(whole[pairs], whole[pairs + 1]) > 0]
    if not len(pairs):
        return shared
    limit = np.minimum(whole[pairs], whole[pairs + 1])
    blocks = -(-limit * SEGMENT // batch.block_size)
    ends = np.cumsum(blocks)
    begins = ends - blocks
    block = np.arange(ends[-1])
    one, other = (np.repeat(pieces.table[pairs + n] - begins, blocks) + block for n in (0, 1))
    differing = np.append(np.flatnonzero(tables[one] != tables[other]), ends[-1])
    same = np.minimum(differing[np.searchsorted(differing, begins)] - begins, blocks)
    found = np.minimum(same * batch.block_size // SEGMENT, limit)
    shared[pairs + 1] = np.where(found * _WORTH >= np.maximum(whole[pairs], whole[pairs + 1]), found, 0)
    return shared


def _cut_contexts(first: Ints, last: Ints, is_cut: npt.NDArray[np.bool_]) -> _Cells:
    """Cut what each piece sees, segments `first` to `last`, into single segments, or not."""
    if not is_cut.any():
        return _Cells(np.arange(len(first)), np.zeros_like(first), first, last)
    parts = np.where(is_cut, last - first, 1)
    piece = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts)
    order = np.argsort(first[piece] + part, kind="stable")
    piece, part = piece[order], part[order]
    start = first[piece] + part
    return _Cells(piece, part, start, np.where(is_cut[piece], start + 1, last[piece]))


def _group(cells: _Cells, lengths: Ints, shared: Ints, most: int) -> _Groups:
    """Put cells together whose segment is `shared`: up to `most` query tokens, and about as many in each group of a run."""
    count = lengths[cells.piece]
    follows = cells.first < shared[cells.piece]  # the cell before is the same segment of the piece before
    if not follows.any():
        every, none = np.arange(len(count)), np.zeros_like(count)
        return _Groups(every, none + 1, count, every, none)
    before = np.cumsum(count) - count
    runs = np.flatnonzero(~follows)
    run = np.cumsum(~follows) - 1
    before -= before[runs][run]
    total = np.add.reduceat(count, runs)
    room = most + 1 - lengths[shared > 0].max()  # for those that stick out of it
    groups = -(-total // room)
    number = before // -(-total // groups)[run]
    begins = ~follows
    begins[1:] |= number[1:] != number[:-1]
    first, of_cell = np.flatnonzero(begins), np.cumsum(begins) - 1
    return _Groups(first, np.bincount(of_cell), np.add.reduceat(count, first), of_cell, before - before[first][of_cell])


def _sets(
    pieces: _Pieces, heads: Heads, cells: _Cells, groups: _Groups, is_cut: npt.NDArray[np.bool_], states: Ints
) -> tuple[Ints, Ints]:
    """Sets and places for pieces that are cut, head by head: a group's sets follow one another."""
    cut = np.flatnonzero(is_cut)
    if not len(cut):
        return np.empty((0, jobs.SET_WORDS), np.int64), np.empty(0, np.int64)
    parts = np.bincount(cells.piece, minlength=len(is_cut)) * is_cut
    first = np.cumsum(parts) - parts
    of_cut = np.flatnonzero(is_cut[cells.piece])
    places = np.empty((heads.count, int(parts.sum())), np.int64)
    piece, group = cells.piece[of_cut], groups.of_cell[of_cut]
    places[:, first[piece] + cells.part[of_cut]] = (states[group] + groups.before[of_cut, None] * heads.sizes).T
    columns = _heads_and_tokens(heads, pieces.token[cut], pieces.length[cut]) | {
        jobs.NUM_PARTS: parts[cut],
        jobs.FIRST_PLACE: first[cut, None] + places.shape[1] * np.arange(heads.count),
    }
    sets = _table(columns, jobs.SET_WORDS, len(cut), heads.count).reshape(len(cut), heads.count, jobs.SET_WORDS)
    return np.ascontiguousarray(sets.transpose(1, 0, 2)).reshape(-1, jobs.SET_WORDS), places.reshape(-1)


def _heads_and_tokens(heads: Heads, token: Ints, count: Ints) -> dict[int, Ints]:
    """The words that tasks and sets have in common."""
    numbers = {jobs.HEAD: heads.kv_heads, jobs.QUERY_HEAD: heads.firsts, jobs.GROUP: heads.sizes}
    return {jobs.TOKEN: token, jobs.COUNT: count} | {word: values[None] for word, values in numbers.items()}


def _table(columns: dict[int, Ints], num_words: int, count: int, num_heads: int) -> Ints:
    """[count * heads, words] of what is said by item, by head [1, heads], or by both."""
    table = np.zeros((count, num_heads, num_words), np.int64)
    for word, values in columns.items():
        table[:, :, word] = values if values.ndim > 1 else values[:, None]
    return table.reshape(-1, num_words)


def _cut_queries(batch: PackedBatch, most: int) -> _Pieces:
    bounds, starts = np.array(batch.bounds, np.int64), np.array(batch.starts, np.int64)
    tables = batch.table_bounds.numpy()
    counts = np.diff(bounds)
    pieces = -(-counts // most)
    owner = np.repeat(np.arange(len(counts)), pieces)
    moved = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    return _Pieces(bounds[owner] + moved, np.minimum(most, counts[owner] - moved), tables[owner], starts[owner] + moved)
