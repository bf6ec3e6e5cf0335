"""From a plan's works to the tensors of one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from treadle.errors import ExecutionError
from treadle.plan import Work
from treadle_plugins.attention.batch import PackedBatch, ragged_arange


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
    """The works' tokens behind one another. Token ids and positions out of range give way to the nearest valid ones."""
    block_size = limits.block_size
    counts = [len(work.tokens) for work in works]
    starts = tuple(work.start for work in works)
    contexts = tuple(start + count for start, count in zip(starts, counts, strict=True))
    bounds = tuple(accumulate(counts, initial=0))
    needed = [-(-context // block_size) for context in contexts]
    table_bounds = torch.tensor(list(accumulate(needed, initial=0)))
    tables = torch.tensor(list(chain.from_iterable(w.block_table[:n] for w, n in zip(works, needed, strict=True))))
    owners = torch.arange(len(works)).repeat_interleave(torch.tensor(counts))
    positions = ragged_arange(torch.tensor(counts)) + torch.tensor(starts)[owners]
    token_ids = torch.tensor(list(chain.from_iterable(work.tokens for work in works)))
    return PackedBatch(
        block_size=block_size,
        token_ids=token_ids.clamp(0, limits.vocab_size - 1).to(device),
        positions=positions.clamp(max=limits.max_length - 1).to(device),
        slot_blocks=tables[table_bounds[owners] + positions // block_size].to(device),
        slot_offsets=(positions % block_size).to(device),
        sequence_starts=torch.tensor(starts, device=device),
        sequence_contexts=torch.tensor(contexts, device=device),
        token_bounds=torch.tensor(bounds, device=device),
        tables=tables.to(device),
        table_bounds=table_bounds.to(device),
        logit_rows=_logit_rows(rows, bounds).to(device),
        starts=starts,
        contexts=contexts,
        bounds=bounds,
    )


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


def _logit_rows(rows: Sequence[WorkRows], bounds: Sequence[int]) -> torch.Tensor:
    """[rows], each row's token within the step: first the sampled ones of all works, then those for prompt tokens."""
    counts = torch.tensor([row.count for row in rows] + [row.prompt_count for row in rows], dtype=torch.int64)
    sampled = [bounds[row.index + 1] - row.count for row in rows]
    firsts = torch.tensor(sampled + [bounds[row.index] for row in rows], dtype=torch.int64)
    return firsts.repeat_interleave(counts) + ragged_arange(counts)
