"""The engine: a small core that steps, announces each decision as a hook, checks the answer and keeps the books."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from treadle import logs
from treadle.blocks import BlockPool, IntegrityError
from treadle.contracts import EngineInfo, KVFormat, PoolSpec, StepReport
from treadle.errors import ConfigError, EngineStopped, InvalidRequest, TreadleError, nearest
from treadle.faults import Isolation
from treadle.handles import Completion, Handle
from treadle.inbox import Inbox, Prompt
from treadle.kv_cache import KVCache, SwapSpace
from treadle.loop import Loop
from treadle.plan import FinishReason, Outcome, StepPlan
from treadle.plugin import Trait
from treadle.plugin_manager import PluginManager
from treadle.queues import Queues
from treadle.request import LiveRequest, RequestOptions
from treadle.rules import Rules
from treadle.sampling_params import SamplingParams
from treadle.scheduler import Scheduler
from treadle.settings import BlockSettings, Settings, load
from treadle.step import Step
from treadle.text import Tokenizer

log = logs.get_logger(__name__)
FULL_CHECK_S = 10.0
"""Least seconds of the clock between two full proofs of the books while idle."""


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
        self._rules = Rules(self.manager)
        self._executor = self._rules.execute()
        with ExitStack() as on_error:
            on_error.callback(self._executor.close)
            self._build()
            on_error.pop_all()
        self._number = 0
        self._failure: Exception | None = None
        self._sound = True
        """Whether requests and blocks are as they should be between two verbs: not where a step was torn."""
        self._closed = False
        self._untold: deque[tuple[StepReport | None, list[LiveRequest]]] = deque()
        self._next_full_check_s = self.clock.now()

    @classmethod
    def load(
        cls, path: Path | str | None = None, overrides: Sequence[str] = (), *, plugins: Iterable[object] = (), **values: Any
    ) -> Engine:
        """An engine from a configuration file, overrides ("admit.every_steps=2") and values (admit="windowed").

        Where any of them sets `log_level`, logs are set up too.
        """
        settings = load(path, overrides, values=values)
        if ("log_level",) in settings.origins:
            logs.configure(settings.root.log_level)
        return cls(settings, plugins)

    def _build(self) -> None:
        model = self._executor.model
        self.clock = self._executor.clock
        kv_format = self._rules.quantize(model)
        self._check_format(kv_format)
        pool, swap_space = self._open_pool(kv_format)
        sizes = (pool.block_size, pool.num_blocks, swap_space.num_blocks)
        self.info = EngineInfo(model, kv_format, *sizes, self.clock, self._executor.memory)
        self.kv_cache = KVCache(
            pool,
            swap_space,
            self._hook,
            index_blocks=self.manager.has_trait(Trait.PREFIX_REUSE),
            max_pinned=self.settings.root.pool.max_pinned,
        )
        self.queues = Queues(self.kv_cache, self._hook)
        self._scheduler = Scheduler(
            self.kv_cache,
            self.queues,
            self._rules,
            self._hook,
            vocab_size=model.vocab_size,
            drafts=self.manager.implements("propose"),
            urgent_preempt=self.manager.has_trait(Trait.URGENT_REQUESTS_PREEMPT),
        )
        self._isolation = Isolation(self.kv_cache, self.queues)
        seed, claims = self.settings.root.seed, self.manager.extras
        self._inbox = Inbox(self.info, self.queues, self._rules, self.tokenizer, seed=seed, claims=claims)
        self._loop = Loop(self.step, self.clock, self._give_up)
        self._hook.engine_started(engine=self.info)
        for failure in self.manager.ledger.failures:
            raise failure.__cause__ if isinstance(failure.__cause__, TreadleError) else failure

    def _open_pool(self, kv_format: KVFormat) -> tuple[BlockPool, SwapSpace]:
        choice = self.settings.choices["allocate"]
        if not isinstance(choice.settings, BlockSettings):
            raise ConfigError(f"{choice.offer.label}: the Settings of an allocation strategy must derive from BlockSettings")
        pool = self.settings.root.pool
        size = self._rules.open_pool(
            self._executor, PoolSpec(choice.settings.block_size, kv_format, pool.num_blocks, pool.memory, pool.swap_memory)
        )
        return BlockPool(size.num_blocks, choice.settings.block_size), SwapSpace(size.num_swap_blocks)

    def _check_format(self, kv_format: KVFormat) -> None:
        if not kv_format.history_dependent:
            return
        for trait in (Trait.PREFIX_REUSE, Trait.CHUNKED_PREFILL, Trait.RECOMPUTE):
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
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> Handle:
        """Post a request: text, token ids, or messages of a conversation. It is seen at the start of the next step.

        `options` are those of RequestOptions: priority, timeout_s, cache_salt, adapter, labels, group, reuse, pin_s. Raises
        InvalidRequest for a prompt or values that could never be served, EngineStopped after the engine's end. Whether the model
        and the pool can hold it, and whether it is accepted, is told by its completion.
        """
        return self._post(prompt, params, request_id, None, options)[0]

    def submit_group(
        self, prompt: Prompt, params: SamplingParams | None, n: int, *, request_id: str | None = None, **options: Any
    ) -> list[Handle]:
        """Post `n` requests of one prompt, which share its full blocks; otherwise as `submit`.

        Their names are `request_id-0`, ... With a seed, theirs are seed, seed + 1, ..., the least seed behind the largest.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InvalidRequest(f"n={n!r} is not a whole number of at least 1")
        return self._post(prompt, params, request_id, n, options)

    def _post(
        self, prompt: Prompt, params: SamplingParams | None, name: str | None, n: int | None, options: Mapping[str, Any]
    ) -> list[Handle]:
        self._loop.check_process()
        params = SamplingParams() if params is None else params
        requests = self._inbox.post(prompt, params, _request_options(options), name=name, n=n)
        self._loop.wake()
        return [Handle(self._loop, request, self.tokenizer, self._cancel) for request in requests]

    def cancel(self, request_id: str) -> None:
        """End the request that has this name now, at the start of the next step. Unknown names are ignored: it may have ended."""
        self._inbox.cancel_named(request_id)
        self._loop.wake()

    def _cancel(self, request: LiveRequest) -> None:
        if request.progress[1] is None:
            self._inbox.cancel(request)
            self._loop.wake()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        ahead: int = 256,
        **options: Any,
    ) -> Iterator[Completion]:
        """Complete one prompt, or many in their order. At most `ahead` are under way at once, so that any number may come.

        An invalid or failed request yields a completion with its error; the others go on. Wrong options raise at once. Those
        under way are cancelled when the iterator is dropped.
        """
        _request_options(options)
        return self._generate(_several(prompts), params, ahead, options)

    def _generate(
        self, prompts: Iterable[Any], params: SamplingParams | None, ahead: int, options: Mapping[str, Any]
    ) -> Iterator[Completion]:
        under_way: deque[Handle | Completion] = deque()
        try:
            for prompt in prompts:
                try:
                    under_way.append(self.submit(prompt, params, **options))
                except InvalidRequest as error:
                    under_way.append(Completion.of_invalid(error, self.clock.now()))
                if len(under_way) >= ahead:
                    yield _awaited(under_way.popleft())
            while under_way:
                yield _awaited(under_way.popleft())
        finally:
            for item in under_way:  # given up early
                if isinstance(item, Handle):
                    item.cancel()

    # --- steps ------------------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is to be done: posted, waiting or running requests, blocks held by finished ones, news to be told."""
        queues = self.queues
        return bool(self._inbox.pending or queues.waiting or queues.running or queues.held or self._untold)

    def step(self) -> float | None:
        """One step. Never sleeps: returns the clock time at which it wants to be called again, or None for the next arrival.

        Raises EngineStopped after the engine's end, WrongCall from within a hook or in a forked process.
        """
        with self._loop.turn("step()"):
            step = self._begin()
            with self._giving_up_when_torn():
                return self._step(step)

    def _step(self, step: Step) -> float | None:
        self._inbox.drain(step)
        plan = self._schedule(step)
        outcome = self._run(step, plan)
        self._scheduler.commit(step, plan, outcome)
        return self._finish(step, plan, outcome)

    def advance(self, most_s: float | None = None) -> None:
        """One step, then sleep until the next one is due, a request arrives or `most_s` seconds have passed."""
        self._loop.pause(self.step(), most_s)

    def drain(self) -> None:
        """Step until nothing is left to do, waiting where a strategy wants to wait."""
        self._loop.check_caller("drain()")
        while self.busy:
            self._loop.pause(self.step())

    def _begin(self) -> Step:
        if self._failure is not None:
            raise EngineStopped(f"the engine failed: {self._failure}") from self._failure
        if self._loop.closed:
            raise EngineStopped("the engine was closed")
        self._number += 1
        self._loop.begin_step()
        step = self._view()
        self.kv_cache.begin_step(step.now)
        return step

    def _view(self) -> Step:
        queues = self.queues
        return Step(self._number, self.clock, self.kv_cache.pool, queues.running, queues.waiting, self._scheduler.giving_way)

    def _schedule(self, step: Step) -> StepPlan:
        for suspect in self._isolation.suspects():
            plan = self._scheduler.schedule(step, alone=suspect)
            if plan.works:
                return plan
        return self._scheduler.schedule(step)

    def _run(self, step: Step, plan: StepPlan) -> Outcome | None:
        """Launch the pass, tell what the step before brought while it is computed, and collect it."""
        if not plan.works and not plan.swap_out:
            return None
        try:
            self._executor.launch(plan)
            self._publish_meanwhile()
            outcome = self._rules.outcome(plan, self._executor.collect())
        except Exception as error:  # whatever the executor raises, the other requests go on
            self._isolation.pass_failed(step, plan, self._scheduler.scheduled, error)
            return None
        except BaseException:
            # an interrupt: who catches it may step on, and must not find blocks in the index that were never written
            self._isolation.undo(step)
            self._sound = True
            raise
        self.kv_cache.confirm()
        self._isolation.acquit()
        return outcome

    def _finish(self, step: Step, plan: StepPlan, outcome: Outcome | None) -> float | None:
        self._hook.step_committed(step=step)
        self._note(self._report(step, plan, outcome.copy_s if outcome else 0.0))
        if not (self._executor.overlaps and self.queues.running):
            self._publish()
        if self.manager.ledger.failures:
            self._fail(step, self.manager.ledger.failures[0])
        elif not (self.queues.waiting or self.queues.running or self.queues.held):
            self._check_while_idle(step)
        return self._next_call(step)

    def _note(self, report: StepReport | None) -> None:
        """Keep what is to be published of a step. Names of those that ended may be given again."""
        ended = self.queues.ended
        self._untold.append((report, [*self._scheduler.changed, *ended]))
        self._inbox.forget(ended)
        ended.clear()
        self._scheduler.changed = []

    def _publish(self) -> None:
        """Tell plugins of the steps that are over, and callers what these brought."""
        while self._untold:
            report, news = self._untold[0]
            if report is not None:
                self._untold[0] = (None, news)
                self._hook.step_finished(report=report)
            for request in news:
                watchers = request.publish()
                if watchers:
                    _call(watchers, request)
            # last, so that an interrupt loses nobody's end
            self._untold.popleft()

    def _publish_meanwhile(self) -> None:
        """Publish while a pass is computed. It is waited for whatever comes: who catches an interrupt may launch the next one."""
        try:
            self._publish()
        except BaseException:
            with suppress(Exception):
                self._executor.collect()
            raise

    def _report(self, step: Step, plan: StepPlan, copy_s: float) -> StepReport:
        pool = self.kv_cache.pool
        return StepReport(
            step=step.number,
            started_s=step.now,
            ended_s=self.clock.now(),
            num_works=len(plan.works),
            num_tokens=plan.num_tokens,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_swapped=len(plan.swap_out) + len(plan.swap_in),
            copy_s=copy_s,
            num_running=len(self.queues.running),
            num_waiting=len(self.queues.waiting),
            blocks_free=pool.num_free,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            finished=tuple(self.queues.ended),
        )

    def _next_call(self, step: Step) -> float | None:
        if self._inbox.pending or self.queues.running or self._isolation.active or self._untold:
            return step.now
        if not self.queues.waiting:
            return None
        wake_s = step.now if self._scheduler.wake_s is None else self._scheduler.wake_s
        expiry_s = self._inbox.next_expiry_s
        return wake_s if expiry_s is None else min(wake_s, expiry_s)

    # --- the end ----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _giving_up_when_torn(self) -> Iterator[None]:
        """A step that was interrupted outside of a pass leaves books that cannot be trusted: the engine ends, and says why."""
        self._sound = False
        try:
            yield
            self._sound = True
        except BaseException as error:
            if not self._sound:
                self._give_up(error)
            raise

    def _fail(self, step: Step, error: Exception) -> None:
        """The engine cannot go on: every request ends with the error."""
        self._failure = error
        log.error("engine_failed", error=str(error))
        self._inbox.close(str(error))
        self._inbox.end_all(step, FinishReason.ERROR, error)
        self._isolation.clear()
        self._publish_ends()

    def _give_up(self, error: BaseException) -> None:
        """What no rule foresees ended a step, or the engine's thread: every request ends with the error, whatever its state."""
        failure = self._failure or error
        if not isinstance(failure, TreadleError):
            failure = EngineStopped(f"a step was ended by {type(error).__name__}" + (f": {error}" if str(error) else ""))
            failure.__cause__ = error
        if self._failure is None and self._sound:
            self._fail(self._view(), failure)
        if self._failure is None:
            self._failure = failure
            log.error("engine_failed", error=str(failure))
            self._inbox.close(str(failure))
        # those that ended in a step of which nothing is told yet are not in the inbox any more
        for request in [*self._inbox.everybody(), *(request for _, news in self._untold for request in news)]:
            if request.progress[1] is None:
                _call(request.publish_end(failure), request)

    def _publish_ends(self) -> None:
        self._note(None)
        self._publish()

    def start(self) -> Engine:
        """Step on a thread of the engine's own until `close`."""
        self._loop.start()
        return self

    def close(self) -> None:
        """End every request that is under way, stop, and give the model back. May be called again, also after an interrupt."""
        self._loop.check_caller("close()")
        self._inbox.close("it was closed")
        self._loop.close()
        with self._loop.turn("close()"):
            if self._closed:
                return
            if self._sound:
                self._inbox.end_all(self._view(), FinishReason.CANCELLED)
                self._publish_ends()
            self._closed = True
            self._hook.engine_stopped()
            self._executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- proof ------------------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Prove the books. Raises IntegrityError, with what plugins know of it. Between steps only."""
        self._prove(lambda: self.kv_cache.check_integrity(list(self.queues)))

    def _check_while_idle(self, step: Step) -> None:
        """With nothing left to do, the books balance: a look each time, a full proof now and then."""
        self._prove(self.kv_cache.check_balance)
        if step.now >= self._next_full_check_s:
            self._next_full_check_s = step.now + FULL_CHECK_S
            self.check_integrity()

    def _prove(self, check: Callable[[], None]) -> None:
        try:
            check()
        except IntegrityError as error:
            self._hook.integrity_broken(error=error)
            raise


def _request_options(options: Mapping[str, Any]) -> RequestOptions:
    """The options of a request. Raises InvalidRequest, which says where a name that is unknown here belongs."""
    known = [f.name for f in fields(RequestOptions)]
    for name in options:
        if name in {f.name for f in fields(SamplingParams)}:
            raise InvalidRequest(f"{name} is a sampling parameter: give it as SamplingParams({name}=...)")
        if name not in known:
            raise InvalidRequest(f"unknown option {name!r} of a request; {nearest(name, known)}")
    return RequestOptions(**options)


def _several(prompts: Prompt | Iterable[Prompt]) -> Iterable[Any]:
    """Prompts one by one; a text, token ids or a conversation alone are one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], (int, Mapping)):
        return [prompts]
    return prompts


def _call(watchers: Iterable[Callable[[], None]], request: LiveRequest) -> None:
    for watcher in watchers:
        try:
            watcher()
        except Exception as error:  # noqa: PERF203  # a caller's callback may raise anything, and must not end a step
            log.error("callback_failed", request_id=request.id, error=f"{type(error).__name__}: {error}")


def _awaited(item: Handle | Completion) -> Completion:
    return item if isinstance(item, Completion) else item.result()
