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


class Plan(NamedTuple):
    """Tasks of one step, for layers with one window."""

    tasks: Ints  # [tasks, TASK_WORDS], the longest first
    num_states: int
    """Rows of states that tasks of cut contexts leave behind."""
    num_counters: int
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


def make(batch: PackedBatch, heads: Heads, window: int | None, num_threads: int) -> Plan:
    """Cut a step into tasks: by sequence, query tokens and heads, and long contexts by segments as well."""
    pieces = _cut_queries(batch, max(1, ROWS // heads.together))
    behind = pieces.position + pieces.length
    first_seen = np.zeros_like(behind) if window is None else np.maximum(0, pieces.position + 1 - window)
    first, last = first_seen // SEGMENT, (behind + SEGMENT - 1) // SEGMENT
    cost = (behind - first_seen) * (pieces.length * heads.together + _PACKING)
    total = int(cost.sum()) * heads.count
    is_cut = (last - first > 1) & (cost * num_threads * _PIECES > total) if num_threads > 1 else np.zeros(len(cost), bool)
    parts = np.where(is_cut, last - first, 1)

    owner = np.repeat(np.arange(len(cost)), heads.count * parts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(heads.count * parts) - heads.count * parts, heads.count * parts)
    head, part = within // parts[owner], within % parts[owner]
    rows = pieces.length[owner] * heads.sizes[head]
    state = np.cumsum(np.where(is_cut[owner], rows, 0))
    tasks = np.zeros((len(owner), jobs.TASK_WORDS), np.int64)
    columns = {
        jobs.TOKEN: pieces.token[owner],
        jobs.COUNT: pieces.length[owner],
        jobs.HEAD: heads.kv_heads[head],
        jobs.QUERY_HEAD: heads.firsts[head],
        jobs.GROUP: heads.sizes[head],
        jobs.TABLE: pieces.table[owner],
        jobs.POSITION: pieces.position[owner],
        jobs.FROM: first[owner] + part,
        jobs.TO: np.where(is_cut[owner], first[owner] + part + 1, last[owner]),
        jobs.NUM_PARTS: parts[owner],
        jobs.PART: state - rows,
        jobs.FIRST_PART: state - rows * (part + 1),
        jobs.COUNTER: np.cumsum(part == 0) - 1,
    }
    for word, values in columns.items():
        tasks[:, word] = values
    longest_first = np.argsort(-(cost // parts)[owner], kind="stable")
    num_states = int(state[-1]) if len(state) else 0
    return Plan(np.ascontiguousarray(tasks[longest_first]), num_states, len(tasks), total)


def _cut_queries(batch: PackedBatch, most: int) -> _Pieces:
    bounds, starts = np.array(batch.bounds, np.int64), np.array(batch.starts, np.int64)
    tables = batch.table_bounds.numpy()
    counts = np.diff(bounds)
    pieces = -(-counts // most)
    owner = np.repeat(np.arange(len(counts)), pieces)
    moved = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    return _Pieces(bounds[owner] + moved, np.minimum(most, counts[owner] - moved), tables[owner], starts[owner] + moved)
