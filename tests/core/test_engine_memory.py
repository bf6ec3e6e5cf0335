"""When memory is short: preemption by recompute and by swap, priority, held blocks, and progress whatever the policy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from treadle import FinishReason, Phase, Preemption, PreemptionMode, Request, SamplingParams, Step, hookimpl
from treadle.testing import FakeExecutor, drain_checked

POLICIES = pytest.mark.parametrize("preempt", ["recompute", "none"])
PREFIXES = pytest.mark.parametrize("prefix", ["hash_chain", "radix", "none"])


class Swap:
    """The last admitted request is swapped out."""

    name = "swap"

    def __init__(self) -> None:
        self.modes: list[PreemptionMode] = []

    @hookimpl
    def preempt(self, step: Step, request: Request) -> Preemption | None:
        victims = [v for v in step.victims() if not request.is_waiting or v.priority < request.priority]
        return Preemption(victims[0], PreemptionMode.SWAP) if victims else None

    @hookimpl
    def request_preempted(self, mode: PreemptionMode) -> None:
        self.modes.append(mode)


@POLICIES
@PREFIXES
def test_two_requests_of_60_percent_of_the_pool_both_finish(prefix: str, preempt: str, build: Any, assert_right: Any) -> None:
    engine = build(num_blocks=10, prefix=prefix, preempt=preempt)
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=66)) for n in range(2)]
    drain_checked(engine, 5000)
    done = assert_right(handles)
    assert done[0].num_preempted == 0, "the first is never the victim"
    assert done[1].num_preempted > 0


@POLICIES
@PREFIXES
@pytest.mark.parametrize("budget", ["decode_first", "whole_prompt", {"strategy": "decode_first", "max_tokens": 10}])
def test_many_requests_through_a_tiny_pool(prefix: str, preempt: str, budget: Any, build: Any, assert_right: Any) -> None:
    engine = build(num_blocks=6, prefix=prefix, preempt=preempt, budget=budget)
    common = list(range(1, 36))
    handles = [engine.submit([*common[: 9 * (n % 5)], n + 50], SamplingParams(max_tokens=5 + 7 * n)) for n in range(8)]
    drain_checked(engine, 5000)
    assert_right(handles)


@POLICIES
def test_a_request_of_the_whole_pool_finishes_among_others(preempt: str, build: Any, assert_right: Any) -> None:
    engine = build(num_blocks=6, preempt=preempt)
    handles = [engine.submit([n] * 20, SamplingParams(max_tokens=77 if n == 2 else 20)) for n in range(5)]
    drain_checked(engine, 5000)
    assert_right(handles)


def test_a_victim_keeps_its_place_in_the_order(build: Any, assert_right: Any) -> None:
    admitted: list[str] = []

    class Witness:
        @hookimpl
        def request_admitted(self, request: Request) -> None:
            admitted.append(request.id)

        @hookimpl
        def request_resumed(self, request: Request) -> None:
            admitted.append(request.id)

    engine = build(Witness(), num_blocks=8, admit={"strategy": "continuous", "max_batch_size": 2})
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=50)) for n in range(4)]
    drain_checked(engine, 5000)
    assert_right(handles)
    assert handles[1].result().num_preempted
    ids = [handle.id for handle in handles]
    assert admitted.index(ids[2]) > len(admitted) - 1 - admitted[::-1].index(ids[1]), "nobody starts before it resumes"


# --- swap -----------------------------------------------------------------------------------------------------------------------


@PREFIXES
@pytest.mark.parametrize("num_swap_blocks", [1, 3, 5, 64])
def test_a_request_survives_the_round_trip_through_swap_space(
    num_swap_blocks: int, prefix: str, build: Any, assert_right: Any
) -> None:
    swap, executor = Swap(), FakeExecutor(num_swap_blocks=num_swap_blocks)
    engine = build(swap, executor=executor, num_blocks=8, prefix=prefix)
    common = list(range(1, 20))
    handles = [engine.submit([*common, *[n] * (5 * n)], SamplingParams(max_tokens=30 + 9 * n)) for n in range(5)]
    drain_checked(engine, 5000)
    done = assert_right(handles)
    assert sum(completion.num_preempted for completion in done) == len(swap.modes) > 0
    assert any(plan.swap_out for plan in executor.plans) == (PreemptionMode.SWAP in swap.modes)
    assert any(plan.swap_in for plan in executor.plans) == (PreemptionMode.SWAP in swap.modes)
    if num_swap_blocks == 64:
        assert set(swap.modes) == {PreemptionMode.SWAP}
    if num_swap_blocks == 1:
        assert PreemptionMode.RECOMPUTE in swap.modes, "what does not fit is computed again"
    assert engine.kv_cache.swap_space.num_free == num_swap_blocks


def test_what_is_swapped_out_is_not_computed_again(build: Any, assert_right: Any) -> None:
    executor = FakeExecutor(num_swap_blocks=64)
    engine = build(Swap(), executor=executor, num_blocks=8, prefix="none")
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=50)) for n in range(2)]
    drain_checked(engine, 5000)
    done = assert_right(handles)
    assert done[1].num_preempted == 1
    positions = [
        (work.request_id, work.start + place)
        for plan in executor.plans
        for work in plan.works
        for place in range(len(work.tokens))
    ]
    assert len(positions) == len(set(positions)) == 2 * 79


def test_a_swapped_request_may_be_cancelled(build: Any, assert_right: Any) -> None:
    engine = build(Swap(), executor=FakeExecutor(num_swap_blocks=16), num_blocks=8, prefix="none")
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=50)) for n in range(3)]
    while not any(handle.request.phase is Phase.PREEMPTED for handle in handles):
        engine.step()
    out = next(handle for handle in handles if handle.request.phase is Phase.PREEMPTED)
    assert engine.kv_cache.swap_space.num_free < 16
    out.cancel()
    drain_checked(engine)
    assert out.result().finish_reason is FinishReason.CANCELLED
    assert_right([handle for handle in handles if handle is not out])
    assert engine.kv_cache.swap_space.num_free == 16


@pytest.mark.parametrize("failing_copy", ["swap_out", "swap_in"])
def test_a_pass_that_fails_while_blocks_are_copied_costs_no_token(failing_copy: str, build: Any, assert_right: Any) -> None:
    class Fails(FakeExecutor):
        failures = 0

        @hookimpl
        def execute(self) -> Fails:
            return self

        def run(self, plan: Any) -> Any:
            if getattr(plan, failing_copy) and self.failures < 2:
                self.failures += 1
                raise RuntimeError("the copy failed")
            return super().run(plan)

    executor = Fails(num_swap_blocks=16)
    engine = build(Swap(), executor=executor, num_blocks=8)
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=50)) for n in range(4)]
    drain_checked(engine, 5000)
    assert executor.failures
    ended = [handle for handle in handles if handle.result().error is not None]
    assert len(ended) <= 1, "at most the request that was computed alone when the copy failed again"
    assert_right([handle for handle in handles if handle not in ended])
    assert engine.kv_cache.swap_space.num_free == 16


@PREFIXES
@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("num_blocks", [1, 2, 50])
def test_a_victim_may_keep_its_first_blocks(
    num_blocks: int, mode: PreemptionMode, prefix: str, build: Any, assert_right: Any
) -> None:
    class Part:
        @hookimpl
        def preempt(self, step: Step) -> Preemption:
            return Preemption(next(step.victims()), mode, num_blocks)

    executor = FakeExecutor(num_swap_blocks=4)
    engine = build(Part(), executor=executor, num_blocks=8, prefix=prefix)
    handles = [engine.submit([*range(1, 20), *[n] * (5 * n)], SamplingParams(max_tokens=30 + 9 * n)) for n in range(5)]
    drain_checked(engine, 5000)
    assert any(completion.num_preempted for completion in assert_right(handles))
    assert engine.kv_cache.swap_space.num_free == 4


# --- priority -------------------------------------------------------------------------------------------------------------------


def test_an_urgent_request_takes_a_place_in_the_batch(build: Any, assert_right: Any) -> None:
    engine = build(order="priority", admit={"strategy": "continuous", "max_batch_size": 2})
    low = [engine.submit([n] * 10, SamplingParams(max_tokens=30), priority=n) for n in range(2)]
    for _ in range(5):
        engine.step()
    urgent = engine.submit([9] * 10, SamplingParams(max_tokens=5), priority=7)
    engine.step()
    assert urgent.request.phase is Phase.RUNNING
    assert [handle.request.phase for handle in low] == [Phase.PREEMPTED, Phase.RUNNING], "the lowest gives way"
    drain_checked(engine)
    assert_right([*low, urgent])


def test_an_urgent_request_takes_blocks(build: Any, assert_right: Any) -> None:
    engine = build(order="priority", num_blocks=8)
    low = [engine.submit([n] * 50, SamplingParams(max_tokens=14), priority=n) for n in range(2)]
    for _ in range(3):
        engine.step()
    urgent = engine.submit([9] * 60, SamplingParams(max_tokens=5), priority=7)
    engine.step()
    assert urgent.request.phase is Phase.RUNNING
    drain_checked(engine)
    done = assert_right([*low, urgent])
    assert [completion.num_preempted for completion in done] == [1, 0, 0]


@pytest.mark.parametrize("options", [{"order": {"strategy": "priority", "preempt": False}}, {"order": "fcfs"}])
def test_without_the_trait_nobody_is_preempted_for_a_place(options: Any, build: Any, assert_right: Any) -> None:
    engine = build(admit={"strategy": "continuous", "max_batch_size": 1}, **options)
    low = engine.submit([1] * 10, SamplingParams(max_tokens=30))
    engine.step()
    urgent = engine.submit([9] * 10, SamplingParams(max_tokens=5), priority=7)
    drain_checked(engine)
    assert [completion.num_preempted for completion in assert_right([low, urgent])] == [0, 0]


def test_equals_do_not_preempt_each_other(build: Any, assert_right: Any) -> None:
    engine = build(order="priority", admit={"strategy": "continuous", "max_batch_size": 1})
    handles = [engine.submit([n] * 10, SamplingParams(max_tokens=9), priority=3) for n in range(3)]
    drain_checked(engine)
    assert [completion.num_preempted for completion in assert_right(handles)] == [0, 0, 0]


# --- held blocks ----------------------------------------------------------------------------------------------------------------


def test_held_blocks_are_taken_back_when_a_running_request_needs_them(
    build: Any, assert_right: Any, plugin_with: Callable[..., object]
) -> None:
    holding = plugin_with("release", lambda step, request: step.num_running == 0)
    engine = build(holding, num_blocks=8, prefix="none")
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=2 if n else 90)) for n in range(3)]
    drain_checked(engine, 2000)
    assert [completion.num_preempted for completion in assert_right(handles)] == [0, 0, 0]


def test_a_held_request_is_asked_about_again_only_when_another_ended(build: Any, assert_right: Any) -> None:
    asked: list[str] = []

    class Holding:
        @hookimpl
        def release(self, step: Step, request: Request) -> bool:
            asked.append(request.id)
            return step.num_running == 0

    engine = build(Holding())
    handles = [engine.submit([n], SamplingParams(max_tokens=m), request_id=f"q{m}") for n, m in enumerate((2, 50))]
    drain_checked(engine)
    assert_right(handles)
    assert len(asked) <= 4, "once when it finished, once when the other did, and perhaps at the end of those two steps"


def test_blocks_that_are_never_released_come_back_when_the_engine_is_idle(
    build: Any, assert_right: Any, plugin_with: Callable[..., object]
) -> None:
    engine = build(plugin_with("release", lambda step, request: False), num_blocks=8)
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=4)) for n in range(6)]
    drain_checked(engine, 2000)
    assert_right(handles)


def test_blocks_are_taken_back_without_a_look_at_all_who_wait(build: Any, assert_right: Any) -> None:
    """Only who was preempted may hold any, and those stand in front."""
    num_looks = 0

    class Counting(OrderedDict[Any, None]):
        def __iter__(self) -> Iterator[Any]:
            return self._counted(super().__iter__())

        def __reversed__(self) -> Any:
            return self._counted(super().__reversed__())

        def _counted(self, requests: Iterator[Any]) -> Iterator[Any]:
            nonlocal num_looks
            for request in requests:
                num_looks += 1
                yield request

    engine = build(num_blocks=8, preempt={"strategy": "recompute", "partial": True})
    engine.queues.waiting = Counting()
    running = [engine.submit([n] * 30, SamplingParams(max_tokens=60)) for n in range(4)]
    engine.step()
    waiting = [engine.submit([9, n], SamplingParams(max_tokens=1)) for n in range(500)]
    engine.step()
    num_looks = 0
    for _ in range(40):
        engine.step()
    assert any(handle.request.num_preempted for handle in running)
    assert num_looks < 40 * 20
    drain_checked(engine)
    assert_right([*running, *waiting])
