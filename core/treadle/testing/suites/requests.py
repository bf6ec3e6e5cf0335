"""Suites of the slots that deal with requests: who is accepted, in which order, when, with how many tokens, and what is held."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from treadle.contracts import Budget
from treadle.errors import Refused
from treadle.handles import Handle
from treadle.hookspecs import hookimpl
from treadle.plan import FinishReason
from treadle.plugin import missing_members
from treadle.request import Phase, Request
from treadle.sampling_params import SamplingParams
from treadle.step import Step
from treadle.testing.fake_executor import FakeExecutor
from treadle.testing.suites.base import Strategy, StrategySuite
from treadle.testing.traffic import Arrival, assert_right, serve


class AcceptSuite(StrategySuite):
    """Queue, trim or refuse; whoever is refused learns why, and an idle engine takes a short request."""

    slot = "accept"

    def served(self, handles: Sequence[Handle]) -> list[Handle]:
        """All but those that were refused, properly."""
        served = []
        for handle in handles:
            error = handle.completion().error
            if not isinstance(error, Refused):
                served.append(handle)
                continue
            assert handle.completion().finish_reason is FinishReason.REFUSED, f"{handle.request!r}: {error}"
            assert str(error), "a refusal says why"
            assert error.retry_after_s is None or error.retry_after_s >= 0, f"retry after {error.retry_after_s} s"
        return served

    def test_an_idle_engine_takes_a_short_request(self, strategy: Strategy) -> None:
        """Again and again."""
        with self.engine(strategy) as engine:
            for _ in range(20):
                handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=2))
                serve(engine, [])
                assert_right(engine, [handle])

    def test_in_a_flood_each_is_served_or_told_why_not(self, strategy: Strategy) -> None:
        """A thousand at once; trimmed prompts keep their end."""
        with self.engine(strategy, num_blocks=16) as engine:
            prompts = [(number % 900,) * (1 + number % 50) + (7,) for number in range(1000)]
            handles = serve(engine, [Arrival(0.0, prompt, SamplingParams(max_tokens=2)) for prompt in prompts])
            served = self.served(handles)
            assert_right(engine, served)
            for handle in served:
                prompt = handle.completion().prompt_token_ids
                assert prompt[-1] == 7, f"{handle.request!r} lost the end of its prompt"
                assert handle.completion().was_trimmed or len(prompt) > 1


class OrderSuite(StrategySuite):
    """Each waiting request has a place, keeps it when it is preempted, and waits no longer than a bound."""

    slot = "order"
    most_wait_s: ClassVar[float] = 60.0
    """Longest wait of a request that everything speaks against, with a request a second arriving before it."""

    def test_each_waiting_request_is_yielded_once(self, strategy: Strategy) -> None:
        """At the latest when it has waited a second."""
        spy = OrderSpy()
        self.play(strategy, spy, executor=FakeExecutor(step_s=0.1, num_swap_blocks=self.num_swap_blocks))
        assert spy.lists, "the strategy was never asked"

    def test_nobody_waits_for_ever(self, strategy: Strategy) -> None:
        """A long request of low priority, while short urgent ones of a running prefix keep coming."""
        executor = FakeExecutor(step_s=0.5, num_swap_blocks=self.num_swap_blocks)
        admit = {"strategy": "continuous", "max_batch_size": 1}
        with self.engine(strategy, executor=executor, num_blocks=32, admit=admit) as engine:
            for _ in range(3):
                engine.submit([5] * 80, SamplingParams(max_tokens=3), priority=3)
            engine.step()
            victim = engine.submit(range(300), SamplingParams(max_tokens=20), priority=0)
            while engine.clock.now() < self.most_wait_s and victim.request.admitted_s is None:
                if engine.queues.load.num_waiting < 10:
                    engine.submit([5] * 80, SamplingParams(max_tokens=2), priority=3)
                until_s = engine.step()
                engine.check_integrity()
                if until_s is not None:
                    engine.clock.wait(until_s)
            assert victim.request.admitted_s is not None, f"{victim.request!r} still waits after {self.most_wait_s} s"

    def test_a_preempted_request_keeps_its_place(self, strategy: Strategy) -> None:
        """Among its equals it comes before all who were submitted after it."""
        spy = OrderSpy()
        arrivals = [
            Arrival(number * 0.001, tuple(range(number * 40, number * 40 + 20)), SamplingParams(max_tokens=40))
            for number in range(12)
        ]
        tally = self.play(strategy, spy, arrivals=arrivals)
        assert tally["preempted"], "nobody was preempted: the pool is too large for this test"
        for requests in spy.lists:
            for place, request in enumerate(requests):
                if request.was_preempted:
                    overtakers = [other.id for other in requests[:place] if other.sequence > request.sequence]
                    assert not overtakers, f"{overtakers} come before {request.id}, which was preempted"


class Seen:
    """A waiting request, as it was when it was listed."""

    def __init__(self, request: Request) -> None:
        self.id = request.id
        self.sequence = request.sequence
        self.was_preempted = request.phase is Phase.PREEMPTED


class OrderSpy:
    """Reads the whole order of each step and compares it with who waits."""

    name = "order_spy"
    patience_s = 1.0

    def __init__(self) -> None:
        self.lists: list[list[Seen]] = []
        self._waiting: dict[int, Request] = {}
        """By number: an id may be given again."""

    @hookimpl
    def request_queued(self, request: Request) -> None:
        """It waits."""
        self._waiting[request.sequence] = request

    @hookimpl
    def request_preempted(self, request: Request) -> None:
        """It waits again."""
        self._waiting[request.sequence] = request

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        """It waits no more."""
        self._waiting.pop(request.sequence, None)

    @hookimpl
    def request_resumed(self, request: Request) -> None:
        """It waits no more."""
        self._waiting.pop(request.sequence, None)

    @hookimpl
    def request_finished(self, request: Request) -> None:
        """It waits no more."""
        self._waiting.pop(request.sequence, None)

    @hookimpl(wrapper=True)
    def order(self, step: Step) -> Generator[None, Iterable[Request] | None, Iterator[Request]]:
        """Hand on what was read."""
        answer = yield
        requests = list(answer or ())
        numbers = {request.sequence for request in requests}
        assert len(numbers) == len(requests), f"a request comes twice: {requests}"
        strangers = [request for request in requests if self._waiting.get(request.sequence) is not request]
        assert not strangers, f"{strangers} do not wait"
        others = (request for request in self._waiting.values() if request.sequence not in numbers)
        kept_back = [request for request in others if step.now - request.arrival_s > self.patience_s]
        assert not kept_back, f"{kept_back} wait for more than {self.patience_s} s and are not yielded"
        self.lists.append([Seen(request) for request in requests])
        return iter(requests)


class AdmitSuite(StrategySuite):
    """Whoever waits starts in time: alone, in a crowd, and behind others that never end."""

    slot = "admit"
    most_wait_s: ClassVar[float] = 1.0
    """Longest wait of a single request for a place in an empty batch."""

    def test_a_single_request_starts_in_time(self, strategy: Strategy) -> None:
        """There is nobody to wait for."""
        with self.engine(strategy) as engine:
            for _ in range(5):
                handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=2))
                serve(engine, [])
                done = assert_right(engine, [handle])[0]
                assert done.admitted_s is not None
                assert done.admitted_s - done.arrival_s <= self.most_wait_s, f"started after {done.admitted_s - done.arrival_s} s"

    def test_a_burst_starts_in_order(self, strategy: Strategy) -> None:
        """With first come, first served, and room for all."""
        with self.engine(strategy, num_blocks=64, order="fcfs") as engine:
            handles = serve(engine, [Arrival(0.0, (number,), SamplingParams(max_tokens=3)) for number in range(50)])
            starts = [done.admitted_s for done in assert_right(engine, handles)]
            assert starts == sorted(starts, key=lambda start_s: start_s or 0.0), f"out of order: {starts}"

    def test_nobody_waits_for_ever_while_others_keep_coming(self, strategy: Strategy) -> None:
        """Traffic never stops, and each is admitted within ten seconds of steps of 10 ms."""
        executor = FakeExecutor(step_s=0.01, num_swap_blocks=self.num_swap_blocks)
        with self.engine(strategy, executor=executor, num_blocks=12) as engine:
            coming = [Arrival(0.02 * number, (number % 900,) * 8, SamplingParams(max_tokens=2)) for number in range(300)]
            for done in assert_right(engine, serve(engine, coming)):
                assert done.admitted_s is not None
                assert done.admitted_s - done.arrival_s <= 10, f"{done.request_id} waited {done.admitted_s - done.arrival_s} s"


class BudgetSuite(StrategySuite):
    """Grants are within what is wanted, somebody always gets something, and every prompt is computed in time."""

    slot = "budget"

    def test_grants_are_within_what_is_wanted(self, strategy: Strategy) -> None:
        """In every step somebody gets something."""
        spy = BudgetSpy()
        self.play(strategy, spy)
        assert spy.num_asked, "the strategy was never asked"

    def test_a_long_prompt_alone_takes_no_more_steps_than_tokens(self, strategy: Strategy) -> None:
        """It makes progress in each."""
        executor = FakeExecutor()
        with self.engine(strategy, executor=executor, num_blocks=64) as engine:
            handle = engine.submit(range(600), SamplingParams(max_tokens=5))
            serve(engine, [])
            assert_right(engine, [handle])
            num_steps = len([plan for plan in executor.plans if plan.works])
            assert num_steps <= 605, f"{num_steps} steps"

    def test_a_crowd_in_decode_all_go_on(self, strategy: Strategy) -> None:
        """Nobody waits for more than a hundred steps for its next token."""
        executor = FakeExecutor()
        admit = {"strategy": "continuous", "max_batch_size": 64}
        with self.engine(strategy, executor=executor, num_blocks=256, admit=admit) as engine:
            handles = serve(engine, [Arrival(0.0, (number,), SamplingParams(max_tokens=12)) for number in range(60)])
            assert_right(engine, handles)
            last: dict[str, int] = {}
            for number, plan in enumerate(executor.plans):
                for work in plan.works:
                    gap = number - last.get(work.request_id, number)
                    assert gap <= 100, f"{work.request_id} waited {gap} steps for its next token"
                    last[work.request_id] = number


class BudgetSpy:
    """Watches what is granted."""

    name = "budget_spy"

    def __init__(self) -> None:
        self.num_asked = 0

    @hookimpl(wrapper=True)
    def budget(self) -> Generator[None, Budget | None, Budget | None]:
        """Put a watch around the answer."""
        answer = yield
        assert answer is not None, "nobody answered"
        assert not missing_members(Budget, answer), f"{answer!r} is no Budget"
        return WatchedBudget(answer, self)


class WatchedBudget:
    """A budget whose grants are looked at."""

    def __init__(self, budget: Budget, spy: BudgetSpy) -> None:
        self._budget = budget
        self._spy = spy

    @property
    def may_shrink(self) -> bool:
        """As it is."""
        return self._budget.may_shrink

    def take(self, request: Request, wanted: int) -> int:
        """Whole, and within bounds."""
        granted: Any = self._budget.take(request, wanted)
        self._spy.num_asked += 1
        assert isinstance(granted, int), f"take granted {granted!r} of {wanted}"
        assert 0 <= granted <= wanted, f"take granted {granted!r} of {wanted}"
        return granted


class ReleaseSuite(StrategySuite):
    """Blocks of finished requests come back: in the end, and when somebody needs them."""

    slot = "release"

    def test_nothing_is_held_when_nothing_runs(self, strategy: Strategy) -> None:
        """Not even for a step."""
        with self.engine(strategy) as engine:
            handles = [engine.submit([number], SamplingParams(max_tokens=number)) for number in range(1, 9)]
            while not all(handle.finished for handle in handles):
                engine.step()
                engine.check_integrity()
            assert engine.kv_cache.pool.num_used == 0, f"{engine.kv_cache.pool.num_used} blocks are held though nothing runs"
            assert_right(engine, handles)

    def test_held_blocks_do_not_stop_a_running_request(self, strategy: Strategy) -> None:
        """Of a batch that fills the pool, one goes on for long."""
        lengths = [1, 1, 1, 1, 90]
        arrivals = [Arrival(0.0, (number,) * 16, SamplingParams(max_tokens=n)) for number, n in enumerate(lengths)]
        tally = self.play(strategy, arrivals=arrivals, num_blocks=8, prefix="none")
        assert not tally["preempted"], "it was preempted for want of blocks that only finished requests hold"
