"""From logits to a plan's outcome."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from treadle.plan import Outcome, TokenLogprobs, Work
from treadle.sampling_params import SamplingParams
from treadle_plugins.execute.torch_executor.packing import WorkRows
from treadle_plugins.sampling.sampler import Row, sample, token_logprobs

ProcessLogits = Callable[[torch.Tensor, Sequence[Work]], None]
"""Changes logits [rows, vocabulary] in place, given the work of each row."""


def conclude(
    works: Sequence[Work],
    rows: Sequence[WorkRows],
    logits: torch.Tensor,
    *,
    faults: Mapping[int, str],
    process: ProcessLogits | None,
    eos_token_ids: Collection[int],
) -> Outcome:
    """Sample from `logits` [rows, vocabulary] in float32, laid out as `rows` say, and verify drafted tokens."""
    sampled = [row for row in rows if row.count]
    raw = logits[: sum(row.count for row in sampled)]
    chosen = sample(_processed(raw, sampled, process), _sampler_rows(sampled), eos_token_ids)
    errors = dict(faults)
    tokens: list[tuple[int, ...]] = [()] * len(works)
    for row in sampled:
        accepted = _verify(row.work, chosen[row.first : row.first + row.count])
        if row.index in errors:
            continue
        if accepted is None:
            errors[row.index] = "no token can be chosen: the model's logits hold NaN or infinity, or all are forbidden"
        else:
            tokens[row.index] = accepted
    good = [row for row in rows if row.index not in errors]
    return Outcome(tuple(tokens), errors, _logprobs(good, tokens, raw), _prompt_logprobs(good, logits))


def _processed(raw: torch.Tensor, rows: Sequence[WorkRows], process: ProcessLogits | None) -> torch.Tensor:
    """`raw` after the hooks; a copy where log-probabilities of the model's own are asked for too."""
    if process is None or not rows:
        return raw
    logits = raw.clone() if any(_params(row).logprobs is not None for row in rows) else raw
    process(logits, [row.work for row in rows for _ in range(row.count)])
    return logits


def _sampler_rows(rows: Sequence[WorkRows]) -> list[Row]:
    return [
        Row(_params(row), row.work.start + len(row.work.tokens) - row.count + 1 + step, row.work.num_output + step)
        for row in rows
        for step in range(row.count)
    ]


def _verify(work: Work, chosen: Sequence[int | None]) -> tuple[int, ...] | None:
    """The tokens that hold: the first, and one more for each drafted token that was chosen too. None: there is none."""
    accepted: list[int] = []
    drafted = work.tokens[len(work.tokens) - work.num_drafted :]
    for step, token in enumerate(chosen):
        if token is None:
            return tuple(accepted) or None
        accepted.append(token)
        if step == len(drafted) or token != drafted[step]:
            break
    return tuple(accepted)


def _logprobs(
    rows: Sequence[WorkRows], tokens: Sequence[tuple[int, ...]], raw: torch.Tensor
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """For works that asked: one entry for each of the tokens that hold."""
    asking = [row for row in rows if row.count and _params(row).logprobs is not None]
    picked = [row.first + step for row in asking for step in range(len(tokens[row.index]))]
    token_ids = [token for row in asking for token in tokens[row.index]]
    num_top = [_params(row).logprobs or 0 for row in asking for _ in tokens[row.index]]
    entries = iter(token_logprobs(raw[picked], token_ids, num_top))
    return {row.index: tuple(next(entries) for _ in tokens[row.index]) for row in asking}


def _prompt_logprobs(rows: Sequence[WorkRows], logits: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
    """For works that asked: one entry for each of their prompt tokens but the prompt's first, then for the next one."""
    found = {}
    for row in rows:
        if row.prompt_count:
            work = row.work
            known = work.tokens if work.following is None else (*work.tokens, work.following)
            targets = known[1 : row.prompt_count + 1]
            part = logits[row.prompt_first : row.prompt_first + row.prompt_count]
            found[row.index] = tuple(token_logprobs(part, targets, [work.prompt_logprobs or 0] * len(targets)))
    return found


def _params(row: WorkRows) -> SamplingParams:
    params = row.work.sampling
    assert params is not None, "a work with rows to sample has parameters"
    return params
