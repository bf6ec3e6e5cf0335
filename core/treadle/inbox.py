"""What other threads post: requests and cancels, checked there, and taken in by the stepping thread; and what times out.

submit --> checked, named --> inbox --drain--> accept? --> waiting
cancel --> looked up by name, once ---'
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from treadle.contracts import EngineInfo, Refuse, Trim
from treadle.errors import EngineStopped, InvalidRequest, PluginError, Refused, TreadleError, nearest
from treadle.plan import FinishReason
from treadle.queues import Queues
from treadle.request import LiveRequest, Phase, Request, RequestOptions
from treadle.rules import Rules
from treadle.sampling_params import SamplingParams
from treadle.step import Step
from treadle.text import TextStream, Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or the messages of a conversation."""
Claims = Mapping[str, tuple[str, Callable[[object], object]]]
"""For each name of `SamplingParams.extra`: the plugin that claims it, and its check."""
_SEEDS = 2**63 + 2**64
"""How many seeds there are, from -2**63 on."""


class _Cancel(NamedTuple):
    request: LiveRequest


class Inbox:
    """What was posted, and every request that has not ended, by its name."""

    def __init__(
        self,
        info: EngineInfo,
        queues: Queues,
        rules: Rules,
        tokenizer: Tokenizer | None,
        *,
        seed: int | None,
        claims: Claims,
    ) -> None:
        self._info = info
        self._queues = queues
        self._rules = rules
        self._tokenizer = tokenizer
        self._claims = claims
        self._posted: deque[LiveRequest | _Cancel] = deque()
        self._by_name: dict[str, LiveRequest] = {}
        self._expiries: list[tuple[float, int, LiveRequest]] = []
        self._num_expiring = 0
        self._ids = itertools.count(1)
        self._sequences = itertools.count(1)
        self._random = random.Random(seed)  # noqa: S311  # seeds of sampling, not secrets
        self._lock = threading.Lock()
        self._closed: str | None = None

    # --- from any thread --------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether anything is posted that no step has seen."""
        return bool(self._posted)

    def post(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, *, name: str | None = None, n: int | None = None
    ) -> list[LiveRequest]:
        """Post a request, or a group of `n` whose names are `name-0`, `name-1`, ...: all of them, or none.

        Raises InvalidRequest, or EngineStopped once closed.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params={params!r} are no SamplingParams; SamplingParams.from_mapping makes them from a dict")
        tokens = self._tokens(prompt)
        if name is not None and not (isinstance(name, str) and name):
            raise InvalidRequest(f"request_id={name!r} is not a text")
        self._check_adapter(options.adapter)
        wanted = [self._checked(params)] if n is None else [self._checked(_reseeded(params, place)) for place in range(n)]
        with self._lock:
            if self._closed is not None:
                raise EngineStopped(f"the engine takes no requests any more: {self._closed}")
            base, names = self._free_names(name, n)
            if n is not None and options.group is None:
                options = replace(options, group=base)
            now = self._info.clock.now()
            requests = [
                LiveRequest(own, tokens, params, options, arrival_s=now, sequence=next(self._sequences))
                for own, params in zip(names, wanted, strict=True)
            ]
            self._by_name.update(zip(names, requests, strict=True))
            self._posted.extend(requests)
        return requests

    def cancel(self, request: LiveRequest) -> None:
        """Ask for a request's end."""
        self._posted.append(_Cancel(request))

    def cancel_named(self, name: object) -> None:
        """Ask for the end of the request that has this name now. A name that nobody has is ignored: it may just have ended."""
        if not (isinstance(name, str) and name):
            raise InvalidRequest(f"request_id={name!r} is not a text")
        request = self._by_name.get(name)
        if request is not None:
            self.cancel(request)

    def close(self, why: str) -> None:
        """Take nothing any more."""
        with self._lock:
            if self._closed is None:
                self._closed = why

    def _free_names(self, name: str | None, n: int | None) -> tuple[str, list[str]]:
        """The name, or one of ours that nobody has, and those of a group's members."""
        while True:
            base = name or f"{'r' if n is None else 'g'}{next(self._ids)}"
            names = [base] if n is None else [f"{base}-{place}" for place in range(n)]
            taken = [own for own in names if own in self._by_name]
            if not taken:
                return base, names
            if name is not None:
                raise InvalidRequest(f"request_id={taken[0]!r} is in use by another request; choose another or leave it out")

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt. Raises InvalidRequest for one that cannot be served."""
        given: Any = prompt
        if not isinstance(given, Sequence) or isinstance(given, bytes):
            raise InvalidRequest(f"prompt={given!r} is neither text, nor a sequence of token ids, nor messages")
        if isinstance(given, str):
            if self._tokenizer is None:
                raise InvalidRequest(f"prompt={given[:60]!r} is text, and this executor has no tokenizer; give token ids")
            given = self._tokenizer.encode(given)
        elif given and isinstance(given[0], Mapping):
            given = self._chat(given)
        vocab_size = self._info.model.vocab_size
        if not len(given):
            raise InvalidRequest("the prompt is empty: there is nothing to continue; give at least one token")
        for token in given:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise InvalidRequest(f"prompt token {token!r} is not an id of the model's vocabulary (0 to {vocab_size - 1})")
        tokens: Sequence[int] = given
        return tokens

    def _chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation."""
        for place, message in enumerate(messages):
            if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise InvalidRequest(f"messages[{place}]={message!r} is not a mapping with the texts 'role' and 'content'")
        tokens = None if self._tokenizer is None else self._tokenizer.chat([dict(message) for message in messages])
        if tokens is None:
            raise InvalidRequest("messages need a chat template, and the model has none; give a text or token ids")
        return tokens

    def _check_adapter(self, adapter: str | None) -> None:
        known = self._info.model.adapters
        if adapter is not None and adapter not in known:
            raise InvalidRequest(f"adapter={adapter!r} is none of the model {self._info.model.name}; {nearest(adapter, known)}")

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """With a seed, and with values for plugins as those who claim them want them."""
        if params.stop and self._tokenizer is None:
            raise InvalidRequest(f"stop={params.stop!r} needs a tokenizer, and this executor has none; use stop_token_ids")
        if params.extra:
            params = replace(params, extra={name: self._claimed(name, value) for name, value in params.extra.items()})
        if params.greedy or params.seed is not None:
            return params
        return replace(params, seed=self._random.getrandbits(63))

    def _claimed(self, name: str, value: object) -> object:
        if name not in self._claims:
            raise InvalidRequest(f"extra[{name!r}] is claimed by no plugin of this engine; {nearest(name, self._claims)}")
        plugin, check = self._claims[name]
        try:
            return check(value)
        except TreadleError:
            raise
        except Exception as error:  # a stranger's check may raise anything: it is the value that is refused
            raise InvalidRequest(f"extra[{name!r}]={value!r} is refused by {plugin}: {error}") from error

    # --- from the stepping thread -----------------------------------------------------------------------------------------------

    @property
    def next_expiry_s(self) -> float | None:
        """Clock time of the next time-out."""
        return self._expiries[0][0] if self._expiries else None

    def drain(self, step: Step) -> None:
        """Take in what was posted until now, then end what has timed out. What a hook posts meanwhile is for the next step."""
        for _ in range(len(self._posted)):
            item = self._posted.popleft()
            if isinstance(item, LiveRequest):
                self._accept(step, item)
            else:
                self._end(step, item.request, FinishReason.CANCELLED)
        while self._expiries and (self._expiries[0][0] <= step.now or self._expiries[0][2].phase is Phase.FINISHED):
            self._end(step, heapq.heappop(self._expiries)[2], FinishReason.TIMEOUT)

    def end_all(self, step: Step, reason: FinishReason, error: Exception | None = None) -> None:
        """End every request, also those that no step has seen."""
        for request in self.everybody():
            self._end(step, request, reason, error)
        for request in list(self._queues.held):
            self._queues.release(step, request)
        self._posted.clear()

    def everybody(self) -> list[LiveRequest]:
        """All requests that have not been forgotten."""
        with self._lock:
            return list(self._by_name.values())

    def forget(self, ended: Iterable[LiveRequest]) -> None:
        """Names of requests that ended may be given again, and their time-outs mean nothing any more."""
        for request in ended:
            if self._by_name.get(request.id) is request:
                del self._by_name[request.id]
            self._num_expiring -= request.expires_s is not None and request.max_total_tokens > 0
        if len(self._expiries) > 64 and len(self._expiries) > 2 * self._num_expiring:
            self._expiries = [entry for entry in self._expiries if entry[2].phase is not Phase.FINISHED]
            heapq.heapify(self._expiries)

    def _end(self, step: Step, request: LiveRequest, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request between passes, if it has not ended."""
        if request.phase is not Phase.FINISHED:
            self._queues.finish(step, request, reason, error)

    def _accept(self, step: Step, request: LiveRequest) -> None:
        if request.phase is Phase.FINISHED:
            return
        try:
            answer = self._rules.accept(request, self._queues.load)
            if isinstance(answer, Refuse):
                raise Refused(answer.reason, answer.retry_after_s)
            if isinstance(answer, Trim):
                request.trim(answer.max_prompt_tokens)
            limit = self._limit(request)
        except (Refused, InvalidRequest) as error:
            self._end(step, request, FinishReason.REFUSED, error)
        except PluginError as error:
            self._end(step, request, FinishReason.ERROR, error)
        else:
            self._queue(step, request, limit)

    def _queue(self, step: Step, request: LiveRequest, limit: int) -> None:
        params, model = request.params, self._info.model
        eos = frozenset[int]() if params.ignore_eos else model.eos_token_ids
        text = TextStream(self._tokenizer, params.stop) if params.stop and self._tokenizer is not None else None
        if request.expires_s is not None:
            heapq.heappush(self._expiries, (request.expires_s, request.sequence, request))
            self._num_expiring += 1
        isolation = (request.cache_salt, model.fingerprint, request.adapter, self._info.kv_format.name)
        request.queue(limit, eos | frozenset(params.stop_token_ids), isolation, text)
        self._queues.queue(step, request)

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


def _reseeded(params: SamplingParams, place: int) -> SamplingParams:
    """Parameters of one member of a group: seed, seed + 1, ..., going on with the least behind the largest."""
    if params.seed is None or not place:
        return params
    return replace(params, seed=(params.seed + place + 2**63) % _SEEDS - 2**63)
