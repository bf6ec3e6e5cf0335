"""Chooses tokens from logits.

A row's token depends on its own logits, its parameters, its seed and its position alone: neither on the rows beside it
nor on what was drawn before. Where two tokens are equally likely, the lower id counts as the more likely one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from treadle.errors import ExecutionError
from treadle.plan import TokenLogprobs
from treadle.sampling_params import SamplingParams

_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_PIECE, _PIECE_AT_LEAST = 256, 16
_ROWS_AT_ONCE = 64
"""Rows whose whole distribution is held in float64 at once."""


class Row(NamedTuple):
    """What decides about one row of logits."""

    params: SamplingParams
    position: int
    """Position at which the chosen token will stand."""
    num_output: int = 0
    """Tokens that the request has generated before this one."""


def sample(logits: torch.Tensor, rows: Sequence[Row], eos_token_ids: Collection[int] = ()) -> list[int | None]:
    """One token id for each row of `logits` [rows, vocabulary] in float32, which stay as they are.

    `eos_token_ids` end a text: they are not chosen before a row's `min_tokens`, unless it ignores them. None stands
    for a row from which nothing can be chosen: it holds NaN or +inf, or every token is forbidden.
    """
    if not rows:
        return []
    logits = _without_forbidden(logits, rows, eos_token_ids)
    best, greedy = _best(logits)
    usable = best.isfinite().tolist()
    tokens: list[int] = greedy.tolist()
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy and usable[index]]
    for at in range(0, len(drawn), _ROWS_AT_ONCE):
        part = drawn[at : at + _ROWS_AT_ONCE]
        for index, token in zip(part, _draw(logits[part], [rows[index] for index in part]), strict=True):
            tokens[index] = token
    return [token if good else None for token, good in zip(tokens, usable, strict=True)]


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the largest number and where it first stands; NaN where there is one.

    torch is slow to find places, so first the best piece of each row is found, by numbers alone.
    """
    piece = math.gcd(logits.shape[1], _PIECE)
    if piece < _PIECE_AT_LEAST:
        best, places = logits.max(dim=1)
        return best, places
    pieces = logits.view(len(logits), -1, piece)
    best, numbers = pieces.amax(dim=2).max(dim=1)
    places = pieces[torch.arange(len(logits), device=logits.device), numbers].argmax(dim=1)
    return best, numbers * piece + places


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on `seed` and `position` alone."""
    mixed = _mix((_mix((seed + _GOLDEN) & _MASK_64) + (position + 1) * _GOLDEN) & _MASK_64)
    return (mixed >> 11) / 2**53


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of `logits` [rows, vocabulary]: log-probability of `token_ids[row]` and the `num_top[row]` best."""
    if not token_ids:
        return []
    total = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None]) - total
    best, ids = logits.topk(min(max(num_top), logits.shape[1]), dim=1)
    rows = zip(token_ids, chosen[:, 0].tolist(), num_top, ids.tolist(), (best - total).tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, tuple(zip(ids[:most], values[:most], strict=True)))
        for token, logprob, most, ids, values in rows
    ]


def _mix(value: int) -> int:
    """splitmix64's finaliser: every bit of the answer depends on every bit of `value`."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _without_forbidden(logits: torch.Tensor, rows: Sequence[Row], eos_token_ids: Collection[int]) -> torch.Tensor:
    """`logits` with -inf for tokens that would end a row's text before its `min_tokens`; a copy if there are any."""
    row_ids: list[int] = []
    token_ids: list[int] = []
    for index, row in enumerate(rows):
        if row.num_output < row.params.min_tokens:
            ends = set(row.params.stop_token_ids) | (set() if row.params.ignore_eos else set(eos_token_ids))
            known = [token for token in ends if token < logits.shape[1]]
            row_ids += [index] * len(known)
            token_ids += known
    if not row_ids:
        return logits
    logits = logits.clone()
    logits[row_ids, token_ids] = float("-inf")
    return logits


def _draw(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """Tokens for rows of which none is greedy and each has a finite best logit."""
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=logits.device)
    # the best logit becomes 0 before the division, so that a temperature near 0 cannot overflow
    scores = (logits - logits.max(dim=1, keepdim=True).values) / temperatures[:, None]
    ranked = [index for index, row in enumerate(rows) if row.params.top_k is not None]
    nucleus = [index for index, row in enumerate(rows) if row.params.top_k is None and row.params.top_p < 1.0]
    if ranked:
        most = min(max(rows[index].params.top_k or 0 for index in ranked), logits.shape[1])
        leading = scores[ranked].topk(most, dim=1).values
        scores[ranked] = _keep_leading(scores[ranked], leading, [rows[index].params for index in ranked])
    if nucleus:
        leading = scores[nucleus].sort(dim=1, descending=True).values
        scores[nucleus] = _keep_leading(scores[nucleus], leading, [rows[index].params for index in nucleus])
    return _invert(scores, rows)


def _keep_leading(scores: torch.Tensor, leading: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """`scores` [rows, vocabulary] with -inf outside each row's top_k and, among these, top_p.

    `leading` [rows, most] are the row's largest scores, descending, at least top_k of them.
    """
    most = leading.shape[1]
    ranks = torch.arange(most, device=scores.device)
    top_k = torch.tensor([min(p.top_k or most, most) for p in params], device=scores.device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=scores.device)[:, None]
    probabilities = leading.masked_fill(ranks >= top_k, float("-inf")).double().softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    # a rank is needed when those before it do not reach top_p; the first always is
    needed = (before < top_p).sum(dim=1, keepdim=True)
    kept = torch.where(top_p < 1.0, torch.minimum(needed, top_k), top_k)
    least = leading.gather(1, kept - 1)
    above, equal = scores > least, scores == least
    ties = equal.cumsum(dim=1) <= kept - above.sum(dim=1, keepdim=True)
    return scores.masked_fill(~(above | (equal & ties)), float("-inf"))


def _invert(scores: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """For each row the token at which the cumulated probability passes the row's random number."""
    uniforms = [uniform(_seed(row), row.position) for row in rows]
    cumulated = scores.double().softmax(dim=1).cumsum(dim=1)
    total = cumulated[:, -1:]
    target = torch.tensor(uniforms, dtype=torch.float64, device=scores.device)[:, None] * total
    # rounding must not lift the target to the total: no token lies beyond it
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    tokens: list[int] = torch.searchsorted(cumulated, target, right=True)[:, 0].tolist()
    return tokens


def _seed(row: Row) -> int:
    if row.params.seed is None:
        raise ExecutionError("a request that samples has no seed: the engine must draw one before it makes a plan")
    return row.params.seed
