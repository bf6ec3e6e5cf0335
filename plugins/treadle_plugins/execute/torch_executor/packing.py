"""From a plan's works to the tensors of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch

from treadle.errors import ExecutionError
from treadle.plan import Work
from treadle_plugins.attention.batch import PackedBatch

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Limits(NamedTuple):
    """What bounds a token, a position and a block id."""

    vocab_size: int
    max_length: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True)
class WorkRows:
    """Which rows of logits belong to one work that asks for any.

    Rows of all works' sampled positions come first: here `first` to `first + count`, none when the work samples nothing.
    Then those that prompt tokens are read off: `prompt_first` to `prompt_first + prompt_count`; row `i` of these tells
    about the work's token `i + 1`, or about the one that follows the work.
    """

    index: int
    work: Work
    first: int
    count: int
    prompt_first: int
    prompt_count: int


def faults(works: Sequence[Work], limits: Limits) -> dict[int, str]:
    """Index and reason of each work that cannot be computed as it stands. Raises ExecutionError where a plan is broken.

    A faulty work is computed all the same, with stand-ins (see `pack`): others may read blocks that it writes.
    """
    found = {}
    for index, work in enumerate(works):
        end = work.start + len(work.tokens)
        _check(work, end, limits)
        tokens = work.tokens if work.following is None else (*work.tokens, work.following)
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= limits.vocab_size:
            wrong = low if low < 0 else high
            found[index] = f"token id {wrong} is not among the model's {limits.vocab_size} tokens"
        elif end > limits.max_length:
            found[index] = f"position {end - 1} lies beyond the model's length of {limits.max_length} tokens"
    return found


def lay_out_rows(works: Sequence[Work]) -> list[WorkRows]:
    """The rows of logits that each work needs."""
    counts = [0 if work.sampling is None else work.num_drafted + 1 for work in works]
    prompt_counts = [_num_prompt_rows(work) for work in works]
    firsts = accumulate(counts, initial=0)
    prompt_firsts = accumulate(prompt_counts, initial=sum(counts))
    spans = zip(works, firsts, counts, prompt_firsts, prompt_counts, strict=False)  # accumulate ends with the total
    laid_out = [WorkRows(index, *span) for index, span in enumerate(spans)]
    return [rows for rows in laid_out if rows.count or rows.prompt_count]


def pack(works: Sequence[Work], rows: Sequence[WorkRows], limits: Limits, device: torch.device) -> PackedBatch:
    """The works' tokens behind one another. Token ids and positions out of range give way to the nearest valid ones.

    Worked out with numpy, whose small operations take a fraction of the time that torch's take.
    """
    block_size = limits.block_size
    counts = np.array([len(work.tokens) for work in works], np.int64)
    starts = np.array([work.start for work in works], np.int64)
    contexts = starts + counts
    bounds = _bounds(counts)
    needed = -(-contexts // block_size)
    table_bounds = _bounds(needed)
    blocks = chain.from_iterable(work.block_table[:n] for work, n in zip(works, needed.tolist(), strict=True))
    tables = np.fromiter(blocks, np.int64, int(table_bounds[-1]))
    token_ids = np.fromiter(chain.from_iterable(work.tokens for work in works), np.int64, int(bounds[-1]))
    positions = np.arange(len(token_ids)) + np.repeat(starts - bounds[:-1], counts)

    def tensor(numbers: Numbers) -> torch.Tensor:
        return torch.from_numpy(numbers).to(device)

    return PackedBatch(
        block_size=block_size,
        token_ids=tensor(token_ids.clip(0, limits.vocab_size - 1)),
        positions=tensor(positions.clip(max=limits.max_length - 1)),
        slot_blocks=tensor(tables[np.repeat(table_bounds[:-1], counts) + positions // block_size]),
        slot_offsets=tensor(positions % block_size),
        sequence_starts=tensor(starts),
        sequence_contexts=tensor(contexts),
        token_bounds=tensor(bounds),
        tables=tensor(tables),
        table_bounds=tensor(table_bounds),
        logit_rows=tensor(_logit_rows(rows, bounds)),
        starts=tuple(starts.tolist()),
        contexts=tuple(contexts.tolist()),
        bounds=tuple(bounds.tolist()),
    )


def _bounds(counts: Numbers) -> Numbers:
    """Where each part begins, and behind the last one."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _check(work: Work, end: int, limits: Limits) -> None:
    needed = -(-end // limits.block_size)
    if len(work.tokens) < work.num_drafted + 1 or work.start < 0:
        raise ExecutionError(
            f"request {work.request_id!r}: {len(work.tokens)} tokens from position {work.start}, {work.num_drafted} "
            "drafted: a work needs a position from 0 on and one token more than it drafts"
        )
    if len(work.block_table) < needed:
        raise ExecutionError(
            f"request {work.request_id!r}: {end} tokens need {needed} blocks of {limits.block_size}, but its table has "
            f"{len(work.block_table)}"
        )
    table = work.block_table[:needed]
    if min(table) < 0 or max(table) >= limits.num_blocks:
        most = limits.num_blocks - 1
        raise ExecutionError(f"request {work.request_id!r}: block table {table} names blocks outside 0..{most}")


def _num_prompt_rows(work: Work) -> int:
    """Rows that tell about prompt tokens: those of the work but its first, and the one that follows it."""
    if work.prompt_logprobs is None:
        return 0
    if work.following is not None:
        return len(work.tokens)
    if work.sampling is None:
        return 0  # it ends among tokens that were generated, before which the whole prompt was computed and told
    prompt_end = work.start + len(work.tokens) - work.num_drafted - work.num_output
    return max(0, prompt_end - work.start - 1)


def _logit_rows(rows: Sequence[WorkRows], bounds: Numbers) -> Numbers:
    """[rows], each row's token within the step: first the sampled ones of all works, then those for prompt tokens."""
    counts = np.array([row.count for row in rows] + [row.prompt_count for row in rows], np.int64)
    sampled = [bounds[row.index + 1] - row.count for row in rows]
    firsts = np.array(sampled + [bounds[row.index] for row in rows], np.int64)
    places = _bounds(counts)
    return np.repeat(firsts - places[:-1], counts) + np.arange(places[-1])
