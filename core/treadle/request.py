"""A request: a list of known tokens, and a count of how many of them have their KV in the pool.

`Request` is what plugins see: queries only. `LiveRequest` adds the verbs, which are the core's alone; nothing else changes a
request's phase, tokens or blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from treadle.blocks import BlockRef
from treadle.sampling_params import SamplingParams

if TYPE_CHECKING:
    from treadle.plan import TokenLogprobs
    from treadle.text import TextStream

T = TypeVar("T")


class Phase(enum.Enum):
    """Where a request stands."""

    SUBMITTED = "submitted"
    """Posted, not yet seen by a step."""
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again, at its old place in the order."""
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """End of text, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the model's or the pool's length."""
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    ERROR = "error"


_MOVES = {
    Phase.SUBMITTED: {Phase.WAITING, Phase.FINISHED},
    Phase.WAITING: {Phase.RUNNING, Phase.FINISHED},
    Phase.RUNNING: {Phase.PREEMPTED, Phase.FINISHED},
    Phase.PREEMPTED: {Phase.RUNNING, Phase.FINISHED},
    Phase.FINISHED: set[Phase](),
}


class StashKey(Generic[T]):
    """A plugin's own key for state that it keeps on a request; only who has the key reaches the state."""


class Stash:
    """Typed state of plugins, one value for each key."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[StashKey[Any], object] = {}

    def __setitem__(self, key: StashKey[T], value: T) -> None:
        self._values[key] = value

    def __getitem__(self, key: StashKey[T]) -> T:
        return cast(T, self._values[key])

    def get(self, key: StashKey[T], default: T) -> T:
        return cast(T, self._values.get(key, default))

    def __contains__(self, key: StashKey[Any]) -> bool:
        return key in self._values


@dataclass(frozen=True)
class RequestOptions:
    """What a caller may say of a request besides its prompt and sampling."""

    priority: int = 0
    """Higher is more urgent."""
    timeout_s: float | None = None
    """Seconds after which the request ends, wherever it is."""
    cache_salt: str | None = None
    """Only requests of the same salt share blocks."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Free for plugins, such as a tenant's name."""
    group: str | None = None
    """Requests made from one prompt with n > 1 have a group in common."""
    reuse: bool = True
    """Whether the request takes cached blocks, and leaves its own for others."""
    pin_s: float | None = None
    """Keep the prompt's full blocks from eviction for this many seconds, from the time they are computed."""


class Request:
    """What plugins see of a request. Every attribute is read only."""

    __slots__ = (
        "_admitted_s",
        "_arrival_s",
        "_batch",
        "_block_table",
        "_chain",
        "_computed",
        "_error",
        "_finish_reason",
        "_finished_s",
        "_first_token_s",
        "_id",
        "_isolation",
        "_limit",
        "_logprobs",
        "_lost_from",
        "_num_cached",
        "_num_chained",
        "_num_preempted",
        "_num_recomputed",
        "_options",
        "_params",
        "_phase",
        "_planned_step",
        "_prompt_length",
        "_prompt_logprobs",
        "_sequence",
        "_stash",
        "_stop_ids",
        "_swapped",
        "_text",
        "_tokens",
        "_was_trimmed",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        arrival_s: float,
        sequence: int,
    ) -> None:
        self._id = request_id
        self._tokens = list(prompt)
        self._prompt_length = len(self._tokens)
        self._params = params
        self._options = options
        self._arrival_s = arrival_s
        self._sequence = sequence
        self._phase = Phase.SUBMITTED
        self._computed = 0
        self._block_table: tuple[int, ...] = ()
        self._swapped: dict[int, int] = {}
        self._chain: BlockRef | None = None
        self._num_chained = 0
        self._isolation: Hashable = None
        self._limit = 0
        self._stop_ids: frozenset[int] = frozenset()
        self._planned_step = 0
        self._batch: int | None = None
        self._num_preempted = 0
        self._num_cached = 0
        self._num_recomputed = 0
        self._lost_from = 0
        self._was_trimmed = False
        self._admitted_s: float | None = None
        self._first_token_s: float | None = None
        self._finished_s: float | None = None
        self._finish_reason: FinishReason | None = None
        self._error: Exception | None = None
        self._stash = Stash()
        self._text: TextStream | None = None
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def __repr__(self) -> str:
        return f"<Request {self._id} {self._phase.value} {self._computed}/{len(self._tokens)} tokens>"

    @property
    def id(self) -> str:
        return self._id

    @property
    def params(self) -> SamplingParams:
        return self._params

    @property
    def priority(self) -> int:
        return self._options.priority

    @property
    def labels(self) -> Mapping[str, str]:
        return self._options.labels

    @property
    def cache_salt(self) -> str | None:
        return self._options.cache_salt

    @property
    def group(self) -> str | None:
        return self._options.group

    @property
    def arrival_s(self) -> float:
        """Clock time of submission."""
        return self._arrival_s

    @property
    def expires_s(self) -> float | None:
        """Clock time at which the request times out."""
        timeout = self._options.timeout_s
        return None if timeout is None else self._arrival_s + timeout

    @property
    def sequence(self) -> int:
        """Number in the order of submission: breaks ties, never repeats."""
        return self._sequence

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def is_waiting(self) -> bool:
        """Waiting to start, or to resume after preemption."""
        return self._phase is Phase.WAITING or self._phase is Phase.PREEMPTED

    @property
    def prompt_length(self) -> int:
        return self._prompt_length

    @property
    def num_tokens(self) -> int:
        """Known tokens: of the prompt and generated."""
        return len(self._tokens)

    @property
    def num_output(self) -> int:
        """Generated tokens."""
        return len(self._tokens) - self._prompt_length

    @property
    def num_computed(self) -> int:
        """Known tokens whose KV is in the pool."""
        return self._computed

    @property
    def num_pending(self) -> int:
        """Known tokens still to compute: 1 in decode, more in prefill."""
        return len(self._tokens) - self._computed

    @property
    def max_total_tokens(self) -> int:
        """Most tokens that prompt and output together may reach."""
        return self._limit

    @property
    def block_table(self) -> tuple[int, ...]:
        """Blocks that the request holds, in the order of its tokens; the last ones may be reserved, not yet written."""
        return self._block_table

    @property
    def batch(self) -> int | None:
        """Number of the step that admitted the request: those with the same number started together."""
        return self._batch

    @property
    def isolation_key(self) -> Hashable:
        """Blocks are shared only among requests whose keys are equal: salt, model and KV format."""
        return self._isolation

    @property
    def num_preempted(self) -> int:
        """How many times it was preempted."""
        return self._num_preempted

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that prefix reuse saved computing, over all admissions."""
        return self._num_cached

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed again after preemptions: work that was lost."""
        return self._num_recomputed

    @property
    def shares(self) -> bool:
        """Whether it leaves its blocks for others."""
        return self._options.reuse

    @property
    def takes_cached(self) -> bool:
        """Whether it may use blocks of others: not when it asks for prompt log-probabilities, which must be computed."""
        return self._options.reuse and self._params.prompt_logprobs is None

    @property
    def pin_s(self) -> float | None:
        """For how many seconds its prompt's blocks are to be kept."""
        return self._options.pin_s

    @property
    def admitted_s(self) -> float | None:
        """Clock time of the first admission."""
        return self._admitted_s

    @property
    def first_token_s(self) -> float | None:
        return self._first_token_s

    @property
    def finished_s(self) -> float | None:
        return self._finished_s

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._finish_reason

    @property
    def error(self) -> Exception | None:
        return self._error

    @property
    def was_trimmed(self) -> bool:
        """Whether an `accept` rule cut the prompt."""
        return self._was_trimmed

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the generated tokens, where they were asked for."""
        return tuple(self._logprobs)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the prompt's tokens but the first, where they were asked for."""
        return tuple(self._prompt_logprobs)

    @property
    def stash(self) -> Stash:
        """Where plugins keep their own state of this request."""
        return self._stash

    def token_ids(self, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """Known tokens from `start` up to, not including, `stop`."""
        return tuple(self._tokens[start:stop])

    def planned_in(self, step_number: int) -> bool:
        """Whether work of this request is planned in that step."""
        return self._planned_step == step_number


class LiveRequest(Request):
    """The core's side of a request."""

    __slots__ = ()

    # --- life ---------------------------------------------------------------------------------------------------------------

    def queue(self, limit: int, stop_ids: frozenset[int], isolation: Hashable) -> None:
        """Accepted. `limit`: most tokens in all. `stop_ids`: tokens that end it."""
        self._move(Phase.WAITING)
        self._limit = limit
        self._stop_ids = stop_ids
        self._isolation = isolation

    def trim(self, max_prompt_tokens: int) -> None:
        """Keep the last tokens of the prompt only. Before anything was computed."""
        assert self._phase is Phase.SUBMITTED
        if max_prompt_tokens < self._prompt_length:
            self._tokens = self._tokens[-max_prompt_tokens:]
            self._prompt_length = len(self._tokens)
            self._was_trimmed = True

    def start(self, step_number: int, now: float) -> None:
        """Admitted or resumed; its blocks are there."""
        self._move(Phase.RUNNING)
        self._batch = step_number
        self._num_recomputed += max(0, self._lost_from - self._computed)
        self._lost_from = 0
        if self._admitted_s is None:
            self._admitted_s = now

    def preempt(self, keep: int, chain: BlockRef | None, block_size: int) -> tuple[int, ...]:
        """Wait again and give up all blocks but the first `keep`; returns those given up. `chain`: what the last kept one is."""
        self._move(Phase.PREEMPTED)
        self._num_preempted += 1
        self._batch = None
        self._lost_from = self._computed
        return self.shorten(keep, chain, block_size)

    def shorten(self, keep: int, chain: BlockRef | None, block_size: int) -> tuple[int, ...]:
        """Keep the first `keep` blocks only; returns the others."""
        if keep == 0:
            return self.surrender()
        given_up, self._block_table = self._block_table[keep:], self._block_table[:keep]
        self._computed = min(self._computed, keep * block_size)
        if self._num_chained > keep:
            self.chain_to(chain, keep)
        return given_up

    def swap_out(self, swapped: dict[int, int], num_blocks: int) -> None:
        """Wait with KV kept: `swapped` maps places among the first `num_blocks` of the table to blocks of swap space.

        Shared blocks stay in the table; what was reserved behind is given up.
        """
        self._move(Phase.PREEMPTED)
        self._num_preempted += 1
        self._batch = None
        self._lost_from = self._computed  # nothing is lost, unless what is swapped out is given up before it comes back
        self._swapped = swapped
        self._block_table = self._block_table[:num_blocks]

    def swap_in(self, blocks: dict[int, int]) -> None:
        """Back: `blocks` maps the swapped places in the table to new blocks of the pool."""
        table = list(self._block_table)
        for place, block_id in blocks.items():
            table[place] = block_id
        self._block_table = tuple(table)
        self._swapped = {}

    def finish(self, reason: FinishReason, now: float, error: Exception | None = None) -> None:
        self._move(Phase.FINISHED)
        self._finish_reason = reason
        self._finished_s = now
        self._error = error

    def spoil(self, error: Exception) -> None:
        """An error after the end, such as in a `release` rule: the tokens stand, the request counts as failed."""
        self._finish_reason = FinishReason.ERROR
        self._error = error

    # --- tokens and blocks --------------------------------------------------------------------------------------------------

    @property
    def swapped(self) -> dict[int, int]:
        return self._swapped

    @property
    def chain(self) -> BlockRef | None:
        """The indexed block that stands for the first `num_chained` blocks of tokens; None at the root."""
        return self._chain

    @property
    def num_chained(self) -> int:
        """How many full blocks have been offered to the index."""
        return self._num_chained

    def chain_to(self, ref: BlockRef | None, num_chained: int) -> None:
        self._chain = ref
        self._num_chained = num_chained

    def reuse(self, block_ids: tuple[int, ...], block_size: int) -> None:
        """Hold `block_ids`, found in the cache, behind the blocks that are computed already."""
        held = self._computed // block_size
        self._block_table = self._block_table[:held] + block_ids + self._block_table[held + len(block_ids) :]
        self._computed += len(block_ids) * block_size
        self._num_cached += len(block_ids) * block_size

    def unreuse(self, num_tokens: int) -> None:
        """Matched blocks that came to nothing do not count as reuse."""
        self._num_cached -= num_tokens

    def hold(self, block_ids: tuple[int, ...]) -> None:
        """Blocks behind those that are held."""
        self._block_table += block_ids

    def held_blocks(self) -> tuple[int, ...]:
        """The blocks of the pool that the request holds: its table, less what is swapped out."""
        if not self._swapped:
            return self._block_table
        return tuple(b for place, b in enumerate(self._block_table) if place not in self._swapped)

    def surrender(self) -> tuple[int, ...]:
        """Hold no block any more; returns those that were held. What is swapped out is forgotten."""
        held = self.held_blocks()
        self._block_table = ()
        self._swapped = {}
        self._computed = 0
        self._chain = None
        self._num_chained = 0
        return held

    def mark_planned(self, step_number: int) -> None:
        self._planned_step = step_number

    def advance(self, num_tokens: int) -> None:
        """The KV of this many more known tokens is in the pool."""
        self._computed += num_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """A generated token. Returns why the request ends with it, or None."""
        num_before = len(self._tokens) - self._prompt_length
        self._tokens.append(token_id)
        may_stop = num_before >= self._params.min_tokens
        if may_stop and token_id in self._stop_ids:
            return FinishReason.STOP
        if self._text is not None:
            self._text.push((token_id,), may_stop=num_before + 1 >= self._params.min_tokens)
            if self._text.stopped is not None:
                return FinishReason.STOP
        return FinishReason.LENGTH if len(self._tokens) >= self._limit else None

    def read_as(self, text: TextStream) -> None:
        """Look for stop strings in what is generated."""
        self._text = text

    def add_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        """Of the tokens that were appended last, as far as they stand."""
        self._logprobs += entries[: self.num_output - len(self._logprobs)]

    def add_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Of the prompt tokens from `start + 1` on; after a preemption some are there already."""
        self._prompt_logprobs += entries[len(self._prompt_logprobs) - start :]

    def mark_first_token(self, now: float) -> None:
        self._first_token_s = now

    def _move(self, phase: Phase) -> None:
        assert phase in _MOVES[self._phase], f"{self!r} cannot become {phase.value}"
        self._phase = phase
