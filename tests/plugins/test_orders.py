"""Orders and budgets that look further than arrival: affinity, buckets, deadlines, an adaptive budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from treadle import Engine, FinishReason, SamplingParams, hookimpl
from treadle.contracts import StepReport
from treadle.testing import FakeExecutor, drain_checked, make_engine
from treadle_plugins.budget.adaptive import Adaptive, AdaptiveSettings

SHORT = SamplingParams(max_tokens=4)


class Starts:
    """Who starts, when, in which step."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.at_s: dict[str, float] = {}
        self.batch: dict[str, int | None] = {}

    @hookimpl
    def request_admitted(self, step: Any, request: Any) -> None:
        self.order.append(request.id)
        self.at_s[request.id] = step.now
        self.batch[request.id] = request.batch


def one_at_a_time(starts: Starts, **slots: Any) -> Engine:
    return make_engine(starts, admit={"strategy": "continuous", "max_batch_size": 1}, **slots)


@pytest.mark.parametrize(("prefix", "places"), [("hash_chain", 1), ("none", 2)])
def test_requests_that_begin_like_cached_or_running_ones_go_first(prefix: str, places: int) -> None:
    starts = Starts()
    with make_engine(
        starts,
        prefix=prefix,
        admit={"strategy": "continuous", "max_batch_size": places, "max_inserts": 1},
        order={"strategy": "prefix_affinity", "prefix_tokens": 16, "max_delay_s": 60},
    ) as engine:
        for name, token in (("a1", 1), ("b1", 2), ("a2", 1), ("b2", 2), ("a3", 1)):
            engine.submit([token] * 40, SHORT, request_id=name)
        drain_checked(engine)
    assert starts.order == ["a1", "a2", "a3", "b1", "b2"]


def test_a_cold_request_is_scheduled_within_its_bound_under_endless_hot_arrivals() -> None:
    starts = Starts()
    bound_s = 0.05
    with make_engine(
        starts,
        admit={"strategy": "continuous", "max_batch_size": 2},
        order={"strategy": "prefix_affinity", "prefix_tokens": 16, "max_delay_s": bound_s},
    ) as engine:
        handles = [engine.submit([1] * 40, SHORT, request_id=f"h{n}") for n in range(4)]
        engine.step()
        cold = engine.submit([2] * 40, SHORT, request_id="cold")
        for n in range(4, 300):
            handles.append(engine.submit([1] * 40, SHORT, request_id=f"h{n}"))
            engine.step()
            engine.check_integrity()
        assert cold.finished
        # it is the first to start once it is overdue: within the time of one request
        assert starts.at_s["cold"] - cold.request.arrival_s <= bound_s + 0.006
        assert starts.order.index("cold") > 10
        drain_checked(engine)


def test_buckets_start_together_after_a_small_wait() -> None:
    starts = Starts()
    order = {"strategy": "length_bucket", "limits": [16, 64], "min_batch": 3, "wait_ms": 20}
    with make_engine(starts, order=order) as engine:
        for name, length in (("s1", 4), ("l1", 50), ("s2", 5), ("s3", 6)):
            engine.submit([1] * length, SHORT, request_id=name)
        drain_checked(engine)
    assert starts.order == ["s1", "s2", "s3", "l1"]
    assert len({starts.batch[name] for name in ("s1", "s2", "s3")}) == 1
    assert starts.at_s["s1"] == 0.0
    assert 0.02 <= starts.at_s["l1"] <= 0.022


def test_the_earliest_first_token_goes_first() -> None:
    starts = Starts()
    with one_at_a_time(starts, order="deadline") as engine:
        engine.submit([1], SHORT, request_id="bulk")
        engine.submit([2], SHORT, request_id="chat", labels={"lane": "interactive"})
        engine.submit([3], SHORT, request_id="stated", labels={"ttft_ms": "50"})
        engine.submit([4], SHORT, request_id="text", labels={"ttft_ms": "soon"})
        drain_checked(engine)
    assert starts.order == ["stated", "chat", "bulk", "text"]


def test_a_lane_keeps_places_for_those_in_a_hurry() -> None:
    starts = Starts()
    with make_engine(
        starts,
        admit={"strategy": "continuous", "max_batch_size": 3},
        order={"strategy": "deadline", "max_bulk_running": 2},
    ) as engine:
        for n in range(4):
            engine.submit([n + 1], SamplingParams(max_tokens=50), request_id=f"bulk{n}")
        engine.step()
        assert starts.order == ["bulk0", "bulk1"]
        engine.submit([9], SHORT, request_id="chat", labels={"lane": "interactive"})
        engine.step()
        assert starts.order == ["bulk0", "bulk1", "chat"]
        drain_checked(engine)
        assert len(starts.order) == 5


def report(seconds: float, num_running: int) -> StepReport:
    return StepReport(1, 0.0, seconds, num_running, num_running, 0, 0, 0.0, num_running, 0, 1, 1, 0)


def test_the_adaptive_budget_gives_way_and_recovers() -> None:
    adaptive = Adaptive(AdaptiveSettings(tpot_ms=50, max_prefill_tokens=1024, min_prefill_tokens=16, max_batch_size=64))
    shares: list[tuple[int, int]] = []
    for _ in range(60):
        adaptive.step_finished(report=report(0.2, 32))
        shares.append((adaptive.prefill_tokens, adaptive.batch_size))
    assert shares[-1] == (16, 1)
    first_batch_cut = next(n for n, (_, batch) in enumerate(shares) if batch < 64)
    assert shares[first_batch_cut - 1][0] == 16, "the prefill share gives way first"
    for _ in range(600):
        adaptive.step_finished(report=report(0.01, 4))
    assert (adaptive.prefill_tokens, adaptive.batch_size) == (1024, 64)


class Sluggish(FakeExecutor):
    """Each token of a step takes a millisecond."""

    @hookimpl
    def execute(self) -> Sluggish:
        return self

    def run(self, plan: Any) -> Any:
        outcome = super().run(plan)
        self.clock.wait(self.clock.now() + 0.001 * plan.num_tokens)
        return outcome


def test_steps_come_down_to_the_target_in_an_overloaded_engine() -> None:
    budget = {"strategy": "adaptive", "tpot_ms": 20.0, "max_prefill_tokens": 512, "max_batch_size": 64}
    seconds: list[float] = []

    class Watch:
        @hookimpl
        def step_finished(self, report: StepReport) -> None:
            seconds.append(report.ended_s - report.started_s)

    with make_engine(Watch(), executor=Sluggish(), num_blocks=600, budget=budget, prefix="none") as engine:
        handles = [engine.submit([n + 1] * 60, SamplingParams(max_tokens=40)) for n in range(60)]
        drain_checked(engine)
        assert {handle.result().finish_reason for handle in handles} == {FinishReason.LENGTH}
    late = sorted(seconds[len(seconds) // 2 :])
    assert max(seconds) > 0.1
    assert late[len(late) // 2] <= 0.025


def texts(engine: Engine, prompts: Sequence[Sequence[int]], **labels: str) -> list[Any]:
    return [engine.submit(prompt, SHORT, labels=labels) for prompt in prompts]


@pytest.mark.parametrize(("above", "expected"), [("trim_above", "length"), ("refuse_long_above", "refused")])
def test_long_prompts_of_non_core_traffic_give_way_as_the_queue_deepens(above: str, expected: str) -> None:
    accept = {"strategy": "queue_limit", above: 4, "trim_to_tokens": 8, "non_core": {"lane": "bulk"}}
    with make_engine(accept=accept, admit={"strategy": "continuous", "max_batch_size": 1}) as engine:
        early = texts(engine, [[1] * 30] * 2, lane="bulk")
        filling = texts(engine, [[2] * 4] * 4, lane="bulk")
        late_bulk, short_bulk = texts(engine, [[3] * 30, [4] * 8], lane="bulk")
        late_core = texts(engine, [[5] * 30], lane="chat")[0]
        drain_checked(engine)
        assert [handle.result().was_trimmed for handle in (*early, *filling, short_bulk, late_core)] == [False] * 8
        assert late_bulk.result().finish_reason.value == expected
        assert late_bulk.result().was_trimmed == (above == "trim_above")
        assert len(late_core.result().prompt_token_ids) == 30
