"""How requests get in: checked and posted from any thread, then accepted, cancelled and expired by the stepping thread."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from treadle.books import Books
from treadle.contracts import EngineInfo, Refuse, Tokenizer, Trim
from treadle.decisions import Decisions
from treadle.errors import EngineStopped, InvalidRequest, PluginError, Refused
from treadle.request import FinishReason, LiveRequest, Phase, Request, RequestOptions
from treadle.sampling_params import SamplingParams
from treadle.step import Step
from treadle.text import TextStream

Prompt = str | Sequence[int]


class Intake:
    """The inbox, and every request that has not ended."""

    def __init__(
        self, info: EngineInfo, books: Books, decisions: Decisions, tokenizer: Tokenizer | None, seed: int | None
    ) -> None:
        self._info = info
        self._books = books
        self._decisions = decisions
        self._tokenizer = tokenizer
        self._inbox: deque[LiveRequest | str] = deque()
        self._known: dict[str, LiveRequest] = {}
        self._expiries: list[tuple[float, int, LiveRequest]] = []
        self._ids = itertools.count(1)
        self._sequences = itertools.count(1)
        self._random = random.Random(seed)  # noqa: S311  # seeds of sampling, not secrets
        self._lock = threading.Lock()
        self._closed: str | None = None

    # --- from any thread --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether anything is posted that no step has seen."""
        return bool(self._inbox)

    def tokens(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt. Raises InvalidRequest for one that cannot be served."""
        given: object = prompt
        if not isinstance(given, Sequence):
            raise InvalidRequest(f"prompt={given!r} is neither text nor a sequence of token ids")
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequest(f"prompt={prompt[:60]!r} is text, and this executor has no tokenizer; give token ids")
            prompt = self._tokenizer.encode(prompt)
        vocab_size = self._info.model.vocab_size
        if not len(prompt):
            raise InvalidRequest("the prompt is empty: there is nothing to continue; give at least one token")
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise InvalidRequest(f"prompt token {token!r} is not an id of the model's vocabulary (0 to {vocab_size - 1})")
        return prompt

    def new_name(self, prefix: str) -> str:
        """An id that was not given before."""
        return f"{prefix}{next(self._ids)}"

    def post(
        self, prompt: Prompt, wanted: Sequence[tuple[SamplingParams, str | None]], options: RequestOptions
    ) -> list[LiveRequest]:
        """Put a request into the inbox for each of `wanted`, parameters and an id of the caller's own: all of them, or none.

        Raises InvalidRequest, or EngineStopped once closed.
        """
        tokens = self.tokens(prompt)
        self._check_options(options)
        for _, name in wanted:
            _check_id(name)
        seeded = [(self._seeded(params), name) for params, name in wanted]
        with self._lock:
            if self._closed is not None:
                raise EngineStopped(f"the engine takes no requests any more: {self._closed}")
            for _, name in seeded:
                if name in self._known:
                    raise InvalidRequest(f"request_id={name!r} is in use by another request; choose another or leave it out")
            requests = [self._new_request(tokens, params, options, name) for params, name in seeded]
            self._known.update((request.id, request) for request in requests)
            self._inbox.extend(requests)
        return requests

    def _new_request(
        self, tokens: Sequence[int], params: SamplingParams, options: RequestOptions, name: str | None
    ) -> LiveRequest:
        while name is None or name in self._known:  # a caller may have given an id like ours
            name = self.new_name("r")
        now = self._info.clock.now()
        return LiveRequest(name, tokens, params, options, arrival_s=now, sequence=next(self._sequences))

    def _check_options(self, options: RequestOptions) -> None:
        priority: object = options.priority
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise InvalidRequest(f"priority={priority!r} is not a whole number")
        for name in ("timeout_s", "pin_s"):
            value = getattr(options, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise InvalidRequest(f"{name}={value!r} is not a number of seconds above 0")
        for name in ("cache_salt", "group"):
            value = getattr(options, name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequest(f"{name}={value!r} is not a text")
        if options.pin_s is not None and not options.reuse:
            raise InvalidRequest(
                f"pin_s={options.pin_s!r} pins blocks that reuse={options.reuse!r} does not share; drop one of the two"
            )

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        given: object = params
        if not isinstance(given, SamplingParams):
            raise InvalidRequest(f"params={given!r} are no SamplingParams; SamplingParams.from_mapping makes them from a dict")
        if params.stop and self._tokenizer is None:
            raise InvalidRequest(f"stop={params.stop!r} needs a tokenizer, and this executor has none; use stop_token_ids")
        if params.greedy or params.seed is not None:
            return params
        return replace(params, seed=self._random.getrandbits(63))

    def post_cancel(self, request_id: str) -> None:
        """Ask for a request's end. Raises InvalidRequest for what cannot be an id."""
        _check_id(request_id)
        self._inbox.append(request_id)

    def close(self, why: str) -> None:
        """Take nothing any more."""
        with self._lock:
            if self._closed is None:
                self._closed = why

    # --- from the stepping thread -----------------------------------------------------------------------------------------------

    @property
    def next_expiry_s(self) -> float | None:
        """Clock time of the next time-out."""
        return self._expiries[0][0] if self._expiries else None

    def take_in(self, step: Step) -> None:
        """Read the inbox, then end what has timed out."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, LiveRequest):
                self._accept(step, item)
            elif item in self._known:
                self.end(step, self._known[item], FinishReason.CANCELLED)
        while self._expiries and (self._expiries[0][0] <= step.now or self._expiries[0][2].phase is Phase.FINISHED):
            self.end(step, heapq.heappop(self._expiries)[2], FinishReason.TIMEOUT)

    def end(self, step: Step, request: LiveRequest, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request between passes, if it has not ended."""
        if request.phase is not Phase.FINISHED:
            self._books.finish(step, request, reason, error)

    def end_all(self, step: Step, reason: FinishReason, error: Exception | None = None) -> None:
        """End every request, also those that no step has seen."""
        for request in list(self._known.values()):
            self.end(step, request, reason, error)
        for request in list(self._books.held.values()):
            self._books.release(step, request)
        self._inbox.clear()

    def forget(self, ended: Iterable[LiveRequest]) -> None:
        """Ids of requests that ended may be given again."""
        for request in ended:
            self._known.pop(request.id, None)

    def _accept(self, step: Step, request: LiveRequest) -> None:
        try:
            answer = self._decisions.accept(request, self._books.load)
            if isinstance(answer, Refuse):
                raise Refused(answer.reason, answer.retry_after_s)
            if isinstance(answer, Trim):
                request.trim(answer.max_prompt_tokens)
            limit = self._limit(request)
        except (Refused, InvalidRequest) as error:
            self.end(step, request, FinishReason.REFUSED, error)
        except PluginError as error:
            self.end(step, request, FinishReason.ERROR, error)
        else:
            self._queue(step, request, limit)

    def _queue(self, step: Step, request: LiveRequest, limit: int) -> None:
        params, model = request.params, self._info.model
        eos = frozenset[int]() if params.ignore_eos else model.eos_token_ids
        if params.stop and self._tokenizer is not None:
            request.read_as(TextStream(self._tokenizer, params.stop))
        if request.expires_s is not None:
            heapq.heappush(self._expiries, (request.expires_s, request.sequence, request))
        isolation = (request.cache_salt, model.fingerprint, self._info.kv_format.name)
        request.queue(limit, eos | frozenset(params.stop_token_ids), isolation)
        self._books.queue(step, request)

    def _limit(self, request: Request) -> int:
        """Most tokens of prompt and output. Raises InvalidRequest when the model or the pool cannot hold what is asked for."""
        prompt, wanted = request.prompt_length, request.params.max_tokens
        # the last token is never computed, so it needs no place in the pool
        in_pool = self._info.num_blocks * self._info.block_size + 1
        total = prompt + (wanted or 1)
        for most, where, way_out in (
            (self._info.model.max_length, f"the model {self._info.model.name}", "shorten the prompt or lower max_tokens"),
            (in_pool, "the KV pool", "shorten the prompt, lower max_tokens, or raise pool.memory or pool.num_blocks"),
        ):
            if total > most:
                asked = f"max_tokens={wanted}" if wanted else "at least one output token"
                raise InvalidRequest(
                    f"prompt of {prompt} tokens with {asked} needs {total} tokens, and {where} holds {most}; {way_out}"
                )
        return total if wanted else min(self._info.model.max_length, in_pool)


def _check_id(request_id: object) -> None:
    if request_id is not None and not (isinstance(request_id, str) and request_id):
        raise InvalidRequest(f"request_id={request_id!r} is not a text")
