"""A request: a list of known tokens, and a count of how many of them have their KV in the pool.

`Request` is what plugins see: queries only. `LiveRequest` adds the verbs, which are the core's alone: nothing else changes a
request's phase or tokens. Its blocks stand in a `BlockTable`, which nobody but the KV cache changes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar, cast

from treadle.blocks import BlockTable
from treadle.errors import InvalidRequest
from treadle.frozen import Frozen
from treadle.plan import FinishReason, TokenLogprobs
from treadle.sampling_params import SamplingParams
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
    """What a caller may say of a request besides its prompt and sampling. Checked when made; immutable.

    Raises InvalidRequest for a value of a wrong type or out of range.
    """

    priority: int = 0
    """Higher is more urgent."""
    timeout_s: float | None = None
    """Seconds after which the request ends, wherever it is."""
    cache_salt: str | None = None
    """Only requests of the same salt share blocks."""
    adapter: str | None = None
    """Name of the adapter that computes it, one of those that the executor's `ModelInfo.adapters` names."""
    labels: Mapping[str, str] | None = field(default=None, hash=False)
    """Free for plugins, such as a tenant's name. A copy is kept."""
    group: str | None = None
    """Requests made from one prompt with n > 1 have a group in common."""
    reuse: bool = True
    """Whether the request takes cached blocks, and leaves its own for others."""
    pin_s: float | None = None
    """Keep the prompt's full blocks from eviction for this many seconds, from the time they are computed."""

    def __post_init__(self) -> None:
        if not isinstance(self.priority, int) or isinstance(self.priority, bool) or not -(2**63) <= self.priority < 2**63:
            raise InvalidRequest(f"priority={self.priority!r} is not a whole number of 64 bits")
        for name in ("timeout_s", "pin_s"):
            value: object = getattr(self, name)
            if value is not None and not _is_seconds(value):
                raise InvalidRequest(f"{name}={value!r} is not a number of seconds above 0")
        for name in ("cache_salt", "adapter", "group"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{name}={value!r} is not a text")
        if not isinstance(self.reuse, bool):
            raise InvalidRequest(f"reuse={self.reuse!r} is neither true nor false")
        if self.pin_s is not None and not self.reuse:
            raise InvalidRequest(f"pin_s={self.pin_s!r} pins blocks that reuse=False does not share; drop one of the two")
        labels: object = self.labels
        if labels is None:
            labels = {}
        if not isinstance(labels, Mapping) or not all(isinstance(text, str) for pair in labels.items() for text in pair):
            raise InvalidRequest(f"labels={labels!r} is not a mapping of texts to texts")
        object.__setattr__(self, "labels", Frozen(labels))


def _is_seconds(value: object) -> bool:
    """Whether it is above 0, and can be added to a clock time, for which a whole number may be too large."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return value > 0 and (isinstance(value, float) or value < 2**64)


@dataclass(frozen=True)
class Figures:
    """What is counted and timed of a request. Times are the engine's clock, in seconds."""

    arrival_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0
    num_preempted: int = 0
    num_recomputed_tokens: int = 0
    was_trimmed: bool = False


class Counted:
    """The figures of a request, on the request itself and on its completion."""

    __slots__ = ()

    @property
    def figures(self) -> Figures:
        """All of them, as they stand now."""
        raise NotImplementedError

    @property
    def arrival_s(self) -> float:
        """Clock time of submission."""
        return self.figures.arrival_s

    @property
    def admitted_s(self) -> float | None:
        """Clock time of the first admission."""
        return self.figures.admitted_s

    @property
    def first_token_s(self) -> float | None:
        """Clock time at the end of the step that brought the first token."""
        return self.figures.first_token_s

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that prefix reuse saved computing, over all admissions."""
        return self.figures.num_cached_tokens

    @property
    def num_preempted(self) -> int:
        """How many times it was preempted."""
        return self.figures.num_preempted

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed again after preemptions: work that was lost."""
        return self.figures.num_recomputed_tokens

    @property
    def was_trimmed(self) -> bool:
        """Whether an `accept` rule cut the prompt."""
        return self.figures.was_trimmed


class End(NamedTuple):
    """How a request ended."""

    reason: FinishReason
    error: Exception | None


Progress = tuple[int, End | None]
"""What other threads may read of a request, published in one assignment when a step is over: tokens generated, and the end."""


class Request(Counted):
    """What plugins see of a request. Every attribute is read only."""

    __slots__ = (
        "_batch", "_end", "_figures", "_id", "_isolation", "_limit", "_logprobs", "_lost_from", "_options", "_params", "_phase",
        "_planned_step", "_progress", "_prompt_length", "_prompt_logprobs", "_sequence", "_stash", "_stop_ids", "_table",
        "_text", "_tokens", "_watchers",
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
        self._sequence = sequence
        self._phase = Phase.SUBMITTED
        self._table = BlockTable()
        self._isolation: Hashable = None
        self._limit = 0
        self._stop_ids: frozenset[int] = frozenset()
        self._planned_step = 0
        self._batch: int | None = None
        self._lost_from = 0
        self._figures = Figures(arrival_s)
        self._end: End | None = None
        self._progress: Progress = (0, None)
        self._watchers: tuple[Callable[[], None], ...] = ()
        self._stash = Stash()
        self._text: TextStream | None = None
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def __repr__(self) -> str:
        return f"<Request {self._id} {self._phase.value} {self._table.num_computed}/{len(self._tokens)} tokens>"

    # --- what the caller said -------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Its name. It may be given again once the request has ended: hold the request itself, never its name."""
        return self._id

    @property
    def params(self) -> SamplingParams:
        return self._params

    @property
    def priority(self) -> int:
        return self._options.priority

    @property
    def labels(self) -> Mapping[str, str]:
        return cast("Mapping[str, str]", self._options.labels)

    @property
    def cache_salt(self) -> str | None:
        return self._options.cache_salt

    @property
    def adapter(self) -> str | None:
        return self._options.adapter

    @property
    def group(self) -> str | None:
        return self._options.group

    @property
    def pin_s(self) -> float | None:
        """For how many seconds its prompt's blocks are to be kept."""
        return self._options.pin_s

    @property
    def expires_s(self) -> float | None:
        """Clock time at which the request times out."""
        timeout = self._options.timeout_s
        return None if timeout is None else self._figures.arrival_s + timeout

    @property
    def shares(self) -> bool:
        """Whether it leaves its blocks for others."""
        return self._options.reuse

    @property
    def takes_cached(self) -> bool:
        """Whether it may use blocks of others: not when it asks for prompt log-probabilities, which must be computed."""
        return self._options.reuse and self._params.prompt_logprobs is None

    # --- where it stands ------------------------------------------------------------------------------------------------------

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
    def batch(self) -> int | None:
        """Number of the step that admitted the request: those with the same number started together."""
        return self._batch

    @property
    def figures(self) -> Figures:
        return self._figures

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self._end is None else self._end.reason

    @property
    def error(self) -> Exception | None:
        return None if self._end is None else self._end.error

    @property
    def stash(self) -> Stash:
        """Where plugins keep their own state of this request."""
        return self._stash

    def planned_in(self, step_number: int) -> bool:
        """Whether work of this request is planned in that step."""
        return self._planned_step == step_number

    # --- tokens and blocks ----------------------------------------------------------------------------------------------------

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
        return self._table.num_computed

    @property
    def num_pending(self) -> int:
        """Known tokens still to compute: 1 in decode, more in prefill."""
        return len(self._tokens) - self._table.num_computed

    @property
    def max_total_tokens(self) -> int:
        """Most tokens that prompt and output together may reach."""
        return self._limit

    @property
    def block_table(self) -> tuple[int, ...]:
        """Blocks that the request holds, in the order of its tokens; the last ones may be reserved, not yet written."""
        return self._table.block_ids

    @property
    def isolation_key(self) -> Hashable:
        """Blocks are shared only among requests whose keys are equal: salt, model, adapter and KV format."""
        return self._isolation

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the generated tokens, where they were asked for."""
        return tuple(self._logprobs)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of the prompt's tokens but the first, where they were asked for."""
        return tuple(self._prompt_logprobs)

    def token_ids(self, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """Known tokens from `start` up to, not including, `stop`."""
        return tuple(self._tokens[start:stop])


class LiveRequest(Request):
    """The core's side of a request."""

    __slots__ = ()

    @property
    def table(self) -> BlockTable:
        """Its blocks. The KV cache alone changes them."""
        return self._table

    # --- life ---------------------------------------------------------------------------------------------------------------

    def queue(self, limit: int, stop_ids: frozenset[int], isolation: Hashable, text: TextStream | None = None) -> None:
        """Accepted. `limit`: most tokens in all. `stop_ids`: tokens that end it. `text`: where stop strings are looked for."""
        self._move(Phase.WAITING)
        self._limit = limit
        self._stop_ids = stop_ids
        self._isolation = isolation
        self._text = text

    def trim(self, max_prompt_tokens: int) -> None:
        """Keep the last tokens of the prompt only. Before anything was computed."""
        assert self._phase is Phase.SUBMITTED
        if max_prompt_tokens < self._prompt_length:
            self._tokens = self._tokens[-max_prompt_tokens:]
            self._prompt_length = len(self._tokens)
            self.count(was_trimmed=True)

    def start(self, step_number: int, now: float) -> None:
        """Admitted or resumed; its blocks are there."""
        self._move(Phase.RUNNING)
        self._batch = step_number
        recomputed = max(0, self._lost_from - self._table.num_computed)
        self._lost_from = 0
        admitted_s = now if self._figures.admitted_s is None else self._figures.admitted_s
        self.count(admitted_s=admitted_s, num_recomputed_tokens=self._figures.num_recomputed_tokens + recomputed)

    def preempt(self) -> None:
        """Wait again. What becomes of its blocks is the KV cache's."""
        self._move(Phase.PREEMPTED)
        self._batch = None
        # nothing is lost, unless what is kept or swapped out is given up before it comes back
        self._lost_from = self._table.num_computed
        self.count(num_preempted=self._figures.num_preempted + 1)

    def finish(self, reason: FinishReason, now: float, error: Exception | None = None) -> None:
        self._move(Phase.FINISHED)
        self._end = End(reason, error)
        self.count(finished_s=now)

    def spoil(self, error: Exception) -> None:
        """An error after the end, such as in a `release` rule: the tokens stand, the request counts as failed."""
        self._end = End(FinishReason.ERROR, error)

    def count(self, **figures: Any) -> None:
        """Write down figures, see Figures."""
        self._figures = replace(self._figures, **figures)

    def mark_planned(self, step_number: int) -> None:
        self._planned_step = step_number

    # --- tokens -------------------------------------------------------------------------------------------------------------

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

    def add_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        """Of the tokens that were appended last, as far as they stand."""
        self._logprobs += entries[: self.num_output - len(self._logprobs)]

    def add_prompt_logprobs(self, start: int, entries: Sequence[TokenLogprobs]) -> None:
        """Of the prompt tokens from `start + 1` on; after a preemption some are there already."""
        self._prompt_logprobs += entries[len(self._prompt_logprobs) - start :]

    # --- for other threads ------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """What was published last."""
        return self._progress

    def publish(self) -> tuple[Callable[[], None], ...]:
        """Let other threads see how far it has come; returns whom to tell, if that is news."""
        progress = (len(self._tokens) - self._prompt_length, self._end)
        if progress == self._progress:
            return ()
        self._progress = progress
        return self._watchers

    def publish_end(self, error: Exception) -> tuple[Callable[[], None], ...]:
        """Let others see its end, or this error where its state cannot be trusted any more: nobody waits for ever."""
        if self._end is not None:
            return self.publish()
        self.count(finished_s=self._figures.arrival_s)
        self._progress = (self._progress[0], End(FinishReason.ERROR, error))
        return self._watchers

    def watch(self, watcher: Callable[[], None]) -> None:
        """Tell `watcher` of each publication. The caller holds a lock that all watchers of the engine share."""
        self._watchers = (*self._watchers, watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Tell it no more. The caller holds the same lock."""
        self._watchers = tuple(other for other in self._watchers if other is not watcher)

    def _move(self, phase: Phase) -> None:
        assert phase in _MOVES[self._phase], f"{self!r} cannot become {phase.value}"
        self._phase = phase
