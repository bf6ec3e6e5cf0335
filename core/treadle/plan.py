"""What the executor gets and gives back: ids, tokens, block tables, copies and sampling, nothing else.

A plan is immutable and can be pickled, so that it can be sent to other ranks as it is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from treadle.sampling_params import SamplingParams


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """End of text, a stop token or a stop string; or the executor said so."""
    LENGTH = "length"
    """`max_tokens`, or the model's or the pool's length."""
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    ERROR = "error"


class Work(NamedTuple):
    """The next tokens of one request.

    The tokens stand at positions `start`, `start + 1`, ...; the KV of every position below `start` is in the pool already, or
    is written by other work of the same plan. Position `p` has its KV in block `block_table[p // block_size]` at offset
    `p % block_size`. The table may be longer than needed.
    """

    request_id: str
    start: int
    tokens: tuple[int, ...]
    block_table: tuple[int, ...]
    sampling: SamplingParams | None
    """None when this chunk of a prefill ends before the last known token, so that nothing is sampled."""
    num_drafted: int = 0
    """How many of `tokens`, at the end, are drafted: guesses to be verified."""
    num_output: int = 0
    """Tokens that the request has generated so far: sampling honours `min_tokens` by it."""
    prompt_logprobs: int | None = None
    """How many top log-probabilities are wanted of the prompt tokens that this work computes; None when none are."""
    following: int | None = None
    """Where prompt log-probabilities are wanted: the prompt token behind the last one of this work, if there is one. Its
    log-probability comes from this work's last row of logits."""
    adapter: str | None = None
    """Name of the adapter that computes it; None means the model as it is."""


class BlockCopy(NamedTuple):
    """Copy the whole block `source` to `target`; one of the two lies in swap space, see StepPlan."""

    source: int
    target: int


@dataclass(frozen=True)
class StepPlan:
    """One forward pass. Copies run first: swap out, then swap in, then the works are computed in one pass."""

    step: int
    works: tuple[Work, ...]
    swap_out: tuple[BlockCopy, ...] = ()
    """From a block of the pool to a block of swap space."""
    swap_in: tuple[BlockCopy, ...] = ()
    """From a block of swap space to a block of the pool."""

    @property
    def num_tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of works that compute more than their last known token."""
        return sum(len(work.tokens) for work in self.works if len(work.tokens) > 1 + work.num_drafted)


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities at one position: of the token that stands there, and of the most likely ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a pass brought.

    `tokens[i]` belongs to `plan.works[i]`: empty when `sampling` was None, else one token, plus one for each drafted token that
    was verified. `errors` maps the index of a work that failed to the reason; its tokens are ignored, and none of its blocks
    stays in the cache.
    """

    tokens: tuple[tuple[int, ...], ...]
    errors: Mapping[int, str] = field(default_factory=dict)
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For works that asked: one entry for each of the work's new tokens."""
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For works that asked: one entry for each prompt token that this work computed, but the prompt's first, then one for
    `following`."""
    ends: Mapping[int, FinishReason] = field(default_factory=dict)
    """Works whose request ends with these tokens, by STOP or LENGTH, for a reason that the executor knows, such as a grammar that
    is complete."""
    copy_s: float = 0.0
    """Seconds spent on the plan's copies."""
