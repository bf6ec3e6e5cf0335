"""The engine: a small core that steps, announces each decision as a hook, checks the answer and keeps the books."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from treadle.blocks import BlockPool
from treadle.books import Books, SwapSpace
from treadle.commit import Committer
from treadle.contracts import EngineInfo, Executor, KVFormat, PoolSpec, Refuse, StepReport, Tokenizer, Trim
from treadle.decisions import Decisions
from treadle.errors import ConfigError, EngineStopped, ExecutionError, InvalidRequest, PluginError, Refused, TreadleError
from treadle.handles import Completion, Handle
from treadle.logs import get_logger
from treadle.plan import Outcome, StepPlan
from treadle.planner import PRIORITY_TRAIT, Planner
from treadle.plugin_manager import REUSE_TRAIT, PluginManager
from treadle.request import FinishReason, LiveRequest, Phase, Request, RequestOptions
from treadle.sampling_params import SamplingParams
from treadle.settings import BlockSettings, Settings, load
from treadle.step import Step
from treadle.text import TextStream

log = get_logger(__name__)
Prompt = str | Sequence[int]


class Engine:
    """Serves requests with the strategies that its settings choose.

    `submit`, `cancel` and handles may be used from any thread. Steps run on one thread at a time: that of `start`, or whichever
    thread calls `step`, `drain` or waits for a handle.
    """

    def __init__(self, settings: Settings, plugins: Iterable[object] = ()) -> None:
        """Build the stack and load the model. `plugins`: objects with hooks, asked before all that the settings name.

        Raises ConfigError, ModelError or PluginError; whatever was loaded until then is given back.
        """
        self.settings = settings
        self.manager = PluginManager(settings, plugins)
        self._hook = self.manager.hook
        decisions = Decisions(self.manager)
        self._decisions = decisions
        self._executor = decisions.execute()
        with _closing_on_error(self._executor):
            self._build()
        self._inbox: deque[LiveRequest | str] = deque()
        self._ids = itertools.count(1)
        self._sequences = itertools.count(1)
        self._known: dict[str, LiveRequest] = {}
        self._expiries: list[tuple[float, int, LiveRequest]] = []
        self._suspects: deque[LiveRequest] = deque()
        self._random = random.Random(settings.root.seed)  # noqa: S311  # seeds of sampling, not secrets
        self._number = 0
        self._failure: Exception | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._step_lock = threading.RLock()
        self._changed = threading.Condition()
        self._arrival = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def load(
        cls, path: Path | str | None = None, overrides: Sequence[str] = (), *, plugins: Iterable[object] = (), **values: Any
    ) -> Engine:
        """An engine from a configuration file, overrides ("admit.every_steps=2") and values (admit="windowed")."""
        return cls(load(path, overrides, values=values), plugins)

    def _build(self) -> None:
        model = self._executor.model
        self.clock = self._executor.clock
        kv_format = self._decisions.quantize(model)
        self._check_format(kv_format)
        pool = self._open_pool(kv_format)
        self.info = EngineInfo(
            model, kv_format, pool[0].block_size, pool[0].num_blocks, pool[1].num_blocks, self.clock
        )
        self._isolation = (model.fingerprint, kv_format)
        self.books = Books(*pool, self._hook, index_blocks=self.manager.has_trait(REUSE_TRAIT))
        self._planner = Planner(
            self.books,
            self._decisions,
            self._hook,
            vocab_size=model.vocab_size,
            drafts=self.manager.implements("propose"),
            urgent_preempt=self.manager.has_trait(PRIORITY_TRAIT),
        )
        self._committer = Committer(self.books, self._decisions, model.vocab_size)
        self._hook.engine_started(engine=self.info)
        if self.manager.ledger.failures:
            raise self.manager.ledger.failures[0].__cause__ or self.manager.ledger.failures[0]

    def _open_pool(self, kv_format: KVFormat) -> tuple[BlockPool, SwapSpace]:
        choice = self.settings.choices["allocate"]
        if not isinstance(choice.settings, BlockSettings):
            raise ConfigError(f"{choice.offer.label}: the Settings of an allocation strategy must derive from BlockSettings")
        pool = self.settings.root.pool
        size = self._executor.open_pool(
            PoolSpec(choice.settings.block_size, kv_format, pool.num_blocks, pool.memory, pool.swap_memory)
        )
        return BlockPool(size.num_blocks, choice.settings.block_size), SwapSpace(size.num_swap_blocks)

    def _check_format(self, kv_format: KVFormat) -> None:
        if not kv_format.history_dependent:
            return
        for trait in (REUSE_TRAIT, "chunked_prefill", "recompute"):
            if self.manager.has_trait(trait):
                raise ConfigError(
                    f"KV format {kv_format.name!r} depends on the history of writes and does not go together with {trait}; "
                    "choose strategies without it"
                )

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._executor.tokenizer

    def describe(self) -> dict[str, str]:
        """Facts of the executor, for people."""
        return self._executor.describe()

    # --- requests, from any thread ----------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        labels: Mapping[str, str] | None = None,
        group: str | None = None,
    ) -> Handle:
        """Post a request: text, or token ids. It is seen at the start of the next step.

        Raises InvalidRequest for a prompt or values that could never be served, EngineStopped after the engine's end. Whether the
        model and the pool can hold it, and whether it is accepted, is told by its completion.
        """
        options = RequestOptions(priority, timeout_s, cache_salt, dict(labels or {}), group)
        tokens = self._tokens(prompt)
        params = self._seeded(params or SamplingParams())
        if timeout_s is not None and not timeout_s > 0:
            raise InvalidRequest(f"timeout_s={timeout_s!r} is not a time above 0")
        if params.stop and self.tokenizer is None:
            raise InvalidRequest(f"stop={params.stop!r} needs a tokenizer, and this executor has none; use stop_token_ids")
        with self._lock:
            if self._failure is not None or self._closed:
                raise EngineStopped(f"the engine takes no requests any more: {self._failure or 'it was closed'}")
            name = request_id if request_id is not None else f"r{next(self._ids)}"
            if name in self._known:
                raise InvalidRequest(f"request_id={name!r} is in use by another request; choose another or leave it out")
            request = LiveRequest(
                name, tokens, params, options, arrival_s=self.clock.now(), sequence=next(self._sequences)
            )
            self._known[name] = request
            self._inbox.append(request)
        self._arrival.set()
        return Handle(self, request, self.tokenizer)

    def submit_group(self, prompt: Prompt, params: SamplingParams, n: int, **options: Any) -> list[Handle]:
        """Post `n` requests of one prompt, which share its full blocks. With a seed, each has one of its own: seed, seed + 1, ..."""
        if n < 1:
            raise InvalidRequest(f"n={n!r} is not a whole number of at least 1")
        tokens = self._tokens(prompt)
        base = options.pop("request_id", None) or f"g{next(self._ids)}"
        seeds = [None if params.seed is None else params.seed + place for place in range(n)]
        return [
            self.submit(tokens, replace(params, seed=seed), request_id=f"{base}-{place}", group=base, **options)
            for place, seed in enumerate(seeds)
        ]

    def cancel(self, request_id: str) -> None:
        """End a request at the start of the next step. Unknown and finished ids are ignored: it may just have ended."""
        self._inbox.append(request_id)
        self._arrival.set()

    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | None = None, *, ahead: int = 256, **options: Any
    ) -> Iterator[Completion]:
        """Complete many prompts, in their order. At most `ahead` are under way at once, so that any number may come.

        An invalid or failed request yields a completion with its error; the others go on.
        """
        under_way: deque[Handle | Completion] = deque()
        for prompt in prompts:
            try:
                under_way.append(self.submit(prompt, params, **options))
            except InvalidRequest as error:
                under_way.append(Completion.of_invalid(error, self.clock.now()))
            if len(under_way) >= ahead:
                yield _awaited(under_way.popleft())
        while under_way:
            yield _awaited(under_way.popleft())

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest(f"prompt={prompt[:60]!r} is text, and this executor has no tokenizer; give token ids")
            prompt = self.tokenizer.encode(prompt)
        vocab_size = self.info.model.vocab_size
        if not len(prompt):
            raise InvalidRequest("the prompt is empty: there is nothing to continue; give at least one token")
        for token in prompt:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise InvalidRequest(f"prompt token {token!r} is not an id of the model's vocabulary (0 to {vocab_size - 1})")
        return prompt

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if params.greedy or params.seed is not None:
            return params
        return replace(params, seed=self._random.getrandbits(63))

    # --- steps ------------------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is to be done: posted, waiting or running requests, or blocks held by finished ones."""
        return bool(self._inbox or self.books.waiting or self.books.running or self.books.held)

    def step(self) -> float | None:
        """One step. Never sleeps: returns the clock time at which it wants to be called again, or None for the next arrival."""
        with self._step_lock:
            step = self._begin()
            self._take_in(step)
            self._drop_expired(step)
            plan = self._plan(step)
            outcome = self._execute(step, plan)
            if outcome is not None:
                self._committer.commit(step, plan, outcome)
            return self._end(step, plan)

    def drain(self) -> None:
        """Step until nothing is left to do, waiting where a strategy wants to wait."""
        while self.busy:
            self._pause(self.step())

    def _begin(self) -> Step:
        if self._failure is not None:
            raise EngineStopped(f"the engine failed: {self._failure}") from self._failure
        self._number += 1
        self._arrival.clear()
        self.books.open_journal()
        return Step(self._number, self.clock, self.books.pool, self.books.running, self.books.waiting)

    def _take_in(self, step: Step) -> None:
        """Read the inbox: requests are accepted or refused, cancelled ones end."""
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, str):
                request = self._known.get(item)
                if request is not None:
                    self._finish(step, request, FinishReason.CANCELLED)
            else:
                self._accept(step, item)

    def _accept(self, step: Step, request: LiveRequest) -> None:
        if request.expires_s is not None:
            heapq.heappush(self._expiries, (request.expires_s, request.sequence, request))
        try:
            answer = self._decisions.accept(request, self.books.load)
            if isinstance(answer, Refuse):
                raise Refused(answer.reason, answer.retry_after_s)
            if isinstance(answer, Trim):
                request.trim(answer.max_prompt_tokens)
            limit = self._limit(request)
        except (Refused, InvalidRequest) as error:
            self._finish(step, request, FinishReason.REFUSED, error)
        except PluginError as error:
            self._finish(step, request, FinishReason.ERROR, error)
        else:
            eos = frozenset() if request.params.ignore_eos else self.info.model.eos_token_ids
            if request.params.stop and self.tokenizer is not None:
                request.text = TextStream(self.tokenizer, request.params.stop)
            request.queue(limit, eos | frozenset(request.params.stop_token_ids), (request.cache_salt, *self._isolation))
            self.books.queue(step, request)

    def _limit(self, request: Request) -> int:
        """Most tokens of prompt and output. Raises InvalidRequest when the model or the pool cannot hold what is asked for."""
        prompt, wanted = request.prompt_length, request.params.max_tokens
        # the last token is never computed, so it needs no place in the pool
        in_pool = self.books.pool.num_blocks * self.books.pool.block_size + 1
        total = prompt + (wanted or 1)
        for most, where, way_out in (
            (self.info.model.max_length, f"the model {self.info.model.name}", "shorten the prompt or lower max_tokens"),
            (in_pool, "the KV pool", "shorten the prompt, lower max_tokens, or raise pool.memory or pool.num_blocks"),
        ):
            if total > most:
                asked = f"max_tokens={wanted}" if wanted else "at least one output token"
                raise InvalidRequest(
                    f"prompt of {prompt} tokens with {asked} needs {total} tokens, and {where} holds {most}; {way_out}"
                )
        return total if wanted else min(self.info.model.max_length, in_pool)

    def _drop_expired(self, step: Step) -> None:
        while self._expiries and (self._expiries[0][0] <= step.now or self._expiries[0][2].phase is Phase.FINISHED):
            request = heapq.heappop(self._expiries)[2]
            self._finish(step, request, FinishReason.TIMEOUT)

    def _finish(self, step: Step, request: LiveRequest, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request between passes, if it has not ended."""
        if request.phase is not Phase.FINISHED:
            self.books.finish(step, request, reason, error)

    def _plan(self, step: Step) -> StepPlan:
        while self._suspects:
            if self._suspects[0].phase is not Phase.FINISHED:
                plan = self._planner.plan_alone(step, self._suspects[0])
                if plan.works:
                    return plan
            self._suspects.popleft()
        return self._planner.plan(step)

    def _execute(self, step: Step, plan: StepPlan) -> Outcome | None:
        if not plan.works and not plan.swap_out:
            return None
        try:
            outcome = self._committer.check(plan, self._executor.run(plan))
        except Exception as error:  # whatever the executor raises, the other requests go on
            self._pass_failed(step, plan, error)
            return None
        self.books.close_journal()
        if self._suspects:
            self._suspects.popleft()
        return outcome

    def _pass_failed(self, step: Step, plan: StepPlan, error: Exception) -> None:
        """Undo the step. Its requests are computed one by one next, so that only the one that cannot be computed ends."""
        log.error("pass_failed", step=step.number, requests=len(plan.works), error=f"{type(error).__name__}: {error}")
        running = {work.request_id: self.books.running[work.request_id] for work in plan.works}
        self.books.undo(step)
        if len(running) != 1:
            self._suspects = deque(running.values())
            return
        if self._suspects:
            self._suspects.popleft()
        if not isinstance(error, TreadleError):
            cause, error = error, ExecutionError(f"the executor failed: {type(error).__name__}: {error}")
            error.__cause__ = cause
        for request in running.values():
            self._finish(step, request, FinishReason.ERROR, error)

    def _end(self, step: Step, plan: StepPlan) -> float | None:
        self._committer.release_held(step)
        self._report(step, plan)
        if self.manager.ledger.failures:
            self._fail(step, self.manager.ledger.failures[0])
        self._forget_ended()
        return self._next_call(step)

    def _forget_ended(self) -> None:
        for request in self.books.ended:
            self._known.pop(request.id, None)
        self.books.ended.clear()
        with self._changed:
            self._changed.notify_all()

    def _report(self, step: Step, plan: StepPlan) -> None:
        pool = self.books.pool
        self._hook.step_finished(
            report=StepReport(
                step=step.number,
                started_s=step.now,
                ended_s=self.clock.now(),
                num_works=len(plan.works),
                num_tokens=sum(len(work.tokens) for work in plan.works),
                num_running=len(self.books.running),
                num_waiting=len(self.books.waiting),
                blocks_free=pool.num_free,
                blocks_used=pool.num_used,
                blocks_cached=pool.num_cached,
                finished=tuple(self.books.ended),
            )
        )

    def _next_call(self, step: Step) -> float | None:
        if self._inbox or self.books.running or self._suspects:
            return step.now
        if not self.books.waiting:
            return None
        times = [self._planner.wake_s] if self._planner.wake_s is not None else [step.now]
        return min(times + [expiry for expiry, _, _ in self._expiries[:1]])

    def _fail(self, step: Step, error: Exception) -> None:
        """The engine cannot go on: every request ends with the error."""
        self._failure = error
        log.error("engine_failed", error=str(error))
        for request in list(self._known.values()):
            self._finish(step, request, FinishReason.ERROR, error)
        for request in list(self.books.held.values()):
            self.books.release(step, request)
        self._inbox.clear()
        self._suspects.clear()

    # --- waiting ----------------------------------------------------------------------------------------------------------------

    def wait_for(self, reached: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Block until `reached()`; step meanwhile when no thread does. Raises TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not reached():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"not reached within {timeout_s} s")
            if self._thread is not None:
                with self._changed:
                    self._changed.wait_for(lambda: reached() or self._thread is None, left)
            else:
                self._pause(self.step(), left)

    def _pause(self, until_s: float | None, most_s: float | None = None) -> None:
        """Sleep until a clock time or an arrival. A virtual clock jumps instead."""
        now = self.clock.now()
        if until_s is None or until_s <= now or self.clock.wait(until_s):
            return
        left = until_s - now
        self._arrival.wait(left if most_s is None else min(left, most_s))

    # --- life -------------------------------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Step on a thread of the engine's own until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="treadle", daemon=True)
            self._thread.start()
        return self

    def _run(self) -> None:
        try:
            while not self._closed:
                until_s = self.step()
                if until_s is None:
                    self._arrival.wait()
                else:
                    self._pause(until_s)
        except BaseException as error:
            log.error("stepping_stopped", error=f"{type(error).__name__}: {error}")
            if self._failure is None:
                self._fail(self._step_after_failure(), error if isinstance(error, Exception) else EngineStopped(str(error)))
        finally:
            self._thread = None
            self._forget_ended()

    def _step_after_failure(self) -> Step:
        return Step(self._number, self.clock, self.books.pool, self.books.running, self.books.waiting)

    def close(self) -> None:
        """End every request that is under way, stop, and give the model back. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._arrival.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._step_lock:
            step = self._step_after_failure()
            for request in list(self._known.values()):
                self._finish(step, request, FinishReason.CANCELLED)
            for request in list(self.books.held.values()):
                self.books.release(step, request)
            self._inbox.clear()
            self._hook.engine_stopped()
            self._executor.close()
        self._forget_ended()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_integrity(self) -> None:
        """Prove the books. Raises IntegrityError. Between steps only."""
        self.books.check_integrity()


def _awaited(item: Handle | Completion) -> Completion:
    return item if isinstance(item, Completion) else item.result()


@contextmanager
def _closing_on_error(executor: Executor) -> Iterator[None]:
    try:
        yield
    except BaseException:
        executor.close()
        raise
