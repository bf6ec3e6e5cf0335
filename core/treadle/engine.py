"""The engine: a small core that steps, announces each decision as a hook, checks the answer and keeps the books."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from treadle.blocks import BlockPool, IntegrityError
from treadle.books import Books, SwapSpace
from treadle.commit import Committer
from treadle.contracts import EngineInfo, Executor, KVFormat, PoolSpec, StepReport, Tokenizer
from treadle.decisions import Decisions
from treadle.errors import ConfigError, EngineStopped, ExecutionError, InvalidRequest, TreadleError
from treadle.handles import Completion, Handle
from treadle.intake import Intake, Prompt
from treadle.logs import get_logger
from treadle.plan import Outcome, StepPlan
from treadle.planner import PRIORITY_TRAIT, Planner
from treadle.plugin_manager import REUSE_TRAIT, PluginManager
from treadle.request import FinishReason, LiveRequest, Phase, RequestOptions
from treadle.sampling_params import SamplingParams
from treadle.settings import BlockSettings, Settings, load
from treadle.step import Step

log = get_logger(__name__)


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
        self._suspects: deque[LiveRequest] = deque()
        self._number = 0
        self._failure: Exception | None = None
        self._closed = False
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
            model,
            kv_format,
            pool[0].block_size,
            pool[0].num_blocks,
            pool[1].num_blocks,
            self.clock,
            self._executor.memory,
        )
        self.books = Books(
            *pool, self._hook, index_blocks=self.manager.has_trait(REUSE_TRAIT), max_pinned=self.settings.root.pool.max_pinned
        )
        self._planner = Planner(
            self.books,
            self._decisions,
            self._hook,
            vocab_size=model.vocab_size,
            drafts=self.manager.implements("propose"),
            urgent_preempt=self.manager.has_trait(PRIORITY_TRAIT),
        )
        self._intake = Intake(self.info, self.books, self._decisions, self.tokenizer, self.settings.root.seed)
        self._committer = Committer(self.books, self._decisions, model.vocab_size)
        self._hook.engine_started(engine=self.info)
        for failure in self.manager.ledger.failures:
            raise failure.__cause__ if isinstance(failure.__cause__, TreadleError) else failure

    def _open_pool(self, kv_format: KVFormat) -> tuple[BlockPool, SwapSpace]:
        choice = self.settings.choices["allocate"]
        if not isinstance(choice.settings, BlockSettings):
            raise ConfigError(f"{choice.offer.label}: the Settings of an allocation strategy must derive from BlockSettings")
        pool = self.settings.root.pool
        size = self._decisions.open_pool(
            self._executor, PoolSpec(choice.settings.block_size, kv_format, pool.num_blocks, pool.memory, pool.swap_memory)
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
        reuse: bool = True,
        pin_s: float | None = None,
    ) -> Handle:
        """Post a request: text, or token ids. It is seen at the start of the next step.

        Raises InvalidRequest for a prompt or values that could never be served, EngineStopped after the engine's end. Whether the
        model and the pool can hold it, and whether it is accepted, is told by its completion.
        """
        options = RequestOptions(priority, timeout_s, cache_salt, _copied(labels), group, reuse, pin_s)
        return self._post(prompt, [(params or SamplingParams(), request_id)], options)[0]

    def submit_group(self, prompt: Prompt, params: SamplingParams, n: int, **options: Any) -> list[Handle]:
        """Post `n` requests of one prompt, which share its full blocks. With a seed, their seeds are seed, seed + 1, ..."""
        wanted_n: object = n
        if not isinstance(wanted_n, int) or isinstance(wanted_n, bool) or n < 1:
            raise InvalidRequest(f"n={n!r} is not a whole number of at least 1")
        base = options.pop("request_id", None) or self._intake.new_name("g")
        seeds = [None if params.seed is None else params.seed + place for place in range(n)]
        wanted = [(replace(params, seed=seed), f"{base}-{place}") for place, seed in enumerate(seeds)]
        return self._post(prompt, wanted, RequestOptions(group=base, **options))

    def _post(self, prompt: Prompt, wanted: Sequence[tuple[SamplingParams, str | None]], options: RequestOptions) -> list[Handle]:
        requests = self._intake.post(prompt, wanted, options)
        self._arrival.set()
        return [Handle(self, request, self.tokenizer) for request in requests]

    def cancel(self, request_id: str) -> None:
        """End a request at the start of the next step. Unknown and finished ids are ignored: it may just have ended."""
        self._intake.post_cancel(request_id)
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

    # --- steps ------------------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is to be done: posted, waiting or running requests, or blocks held by finished ones."""
        return bool(self._intake.pending or self.books.waiting or self.books.running or self.books.held)

    def step(self) -> float | None:
        """One step. Never sleeps: returns the clock time at which it wants to be called again, or None for the next arrival."""
        with self._step_lock:
            step = self._begin()
            self._intake.take_in(step)
            self.books.unpin_expired(step.now)
            plan = self._plan(step)
            outcome = self._execute(step, plan)
            if outcome is not None:
                self._committer.commit(step, plan, outcome)
            return self._end(step, plan, outcome)

    def advance(self, most_s: float | None = None) -> None:
        """One step, then sleep until the next one is due, a request arrives or `most_s` seconds have passed."""
        self._pause(self.step(), most_s)

    def drain(self) -> None:
        """Step until nothing is left to do, waiting where a strategy wants to wait."""
        while self.busy:
            self._pause(self.step())

    def _begin(self) -> Step:
        if self._failure is not None:
            raise EngineStopped(f"the engine failed: {self._failure}") from self._failure
        if self._closed:
            raise EngineStopped("the engine was closed")
        self._number += 1
        self._arrival.clear()
        self.books.open_journal()
        return Step(self._number, self.clock, self.books.pool, self.books.running, self.books.waiting)

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
        except BaseException:
            # an interrupt: who catches it may step on, and must not find blocks in the index that were never written
            self.books.undo(step)
            raise
        self.books.close_journal()
        if self._suspects:
            self._suspects.popleft()
        return outcome

    def _pass_failed(self, step: Step, plan: StepPlan, error: Exception) -> None:
        """Undo the step. Its requests are computed one by one next, so that only the one that cannot be computed ends."""
        num_copies = len(plan.swap_out) + len(plan.swap_in)
        problem = f"{type(error).__name__}: {error}"
        log.error("pass_failed", step=step.number, requests=len(plan.works), copies=num_copies, error=problem)
        running = {work.request_id: self.books.running[work.request_id] for work in plan.works}
        self.books.undo(step)
        if num_copies or len(running) != 1:
            # with copies nobody is to blame yet: undone, they do not come again, as what they were for is computed anew
            self._suspects = self._suspects or deque(running.values())
            return
        if self._suspects:
            self._suspects.popleft()
        if not isinstance(error, TreadleError):
            cause, error = error, ExecutionError(f"the executor failed: {problem}")
            error.__cause__ = cause
        _let_go(error)
        for request in running.values():
            self._intake.end(step, request, FinishReason.ERROR, error)

    def _end(self, step: Step, plan: StepPlan, outcome: Outcome | None) -> float | None:
        self._committer.release_held(step)
        self._report(step, plan, outcome.copy_s if outcome else 0.0)
        if self.manager.ledger.failures:
            self._fail(step, self.manager.ledger.failures[0])
        self._forget_ended()
        return self._next_call(step)

    def _forget_ended(self) -> None:
        self._intake.forget(self.books.ended)
        self.books.ended.clear()
        with self._changed:
            self._changed.notify_all()

    def _report(self, step: Step, plan: StepPlan, copy_s: float) -> None:
        pool = self.books.pool
        self._hook.step_finished(
            step=step,
            report=StepReport(
                step=step.number,
                started_s=step.now,
                ended_s=self.clock.now(),
                num_works=len(plan.works),
                num_tokens=plan.num_tokens,
                num_prefill_tokens=plan.num_prefill_tokens,
                num_swapped=len(plan.swap_out) + len(plan.swap_in),
                copy_s=copy_s,
                num_running=len(self.books.running),
                num_waiting=len(self.books.waiting),
                blocks_free=pool.num_free,
                blocks_used=pool.num_used,
                blocks_cached=pool.num_cached,
                finished=tuple(self.books.ended),
            ),
        )

    def _next_call(self, step: Step) -> float | None:
        if self._intake.pending or self.books.running or self._suspects:
            return step.now
        if not self.books.waiting:
            return None
        wake_s = step.now if self._planner.wake_s is None else self._planner.wake_s
        expiry_s = self._intake.next_expiry_s
        return wake_s if expiry_s is None else min(wake_s, expiry_s)

    def _fail(self, step: Step, error: Exception) -> None:
        """The engine cannot go on: every request ends with the error."""
        self._failure = error
        log.error("engine_failed", error=str(error))
        self._intake.close(str(error))
        self._intake.end_all(step, FinishReason.ERROR, error)
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
                try:
                    until_s = self.step()
                except EngineStopped:
                    if reached():  # another thread's step was the engine's last
                        return
                    raise
                self._pause(until_s, left)

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
            while True:
                until_s = self.step()
                if self._closed:  # looked at after the step has cleared the arrival: `close` sets it once more
                    break
                if until_s is None:
                    self._arrival.wait()
                else:
                    self._pause(until_s)
        except EngineStopped:
            pass  # closed between two steps
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
        with self._changed:
            if self._closed:
                return
            self._closed = True
        self._intake.close("it was closed")
        self._arrival.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._step_lock:
            self._intake.end_all(self._step_after_failure(), FinishReason.CANCELLED)
            self._hook.engine_stopped()
            self._executor.close()
        self._forget_ended()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check_integrity(self) -> None:
        """Prove the books. Raises IntegrityError. Between steps only."""
        try:
            self.books.check_integrity()
        except IntegrityError as error:
            self._hook.integrity_broken(error=error)
            raise


def _copied(labels: object) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, Mapping) or not all(isinstance(text, str) for pair in labels.items() for text in pair):
        raise InvalidRequest(f"labels={labels!r} is not a mapping of texts to texts")
    return dict(labels)


def _awaited(item: Handle | Completion) -> Completion:
    return item if isinstance(item, Completion) else item.result()


def _let_go(error: BaseException | None) -> None:
    """Empty the frames of a failed pass. They hold its tensors, and the error lives as long as somebody keeps the completion."""
    seen: list[BaseException] = []
    # causes only: the context of an error may be one that the caller of the step is handling
    while error is not None and error not in seen:
        traceback.clear_frames(error.__traceback__)
        seen.append(error)
        error = error.__cause__


@contextmanager
def _closing_on_error(executor: Executor) -> Iterator[None]:
    try:
        yield
    except BaseException:
        executor.close()
        raise
