"""What a gate says of a full batch is a promise: once a running request gives up its place, it opens in this same step."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from treadle import NotBefore, Open, RequestOptions, SamplingParams, Step, hookimpl
from treadle.blocks import PoolView
from treadle.request import LiveRequest
from treadle.testing import FakeExecutor, VirtualClock, make_engine
from treadle_plugins.admit.continuous import Continuous, ContinuousSettings
from treadle_plugins.admit.windowed import Windowed, WindowedSettings
from treadle_plugins.budget.adaptive import Adaptive, AdaptiveSettings
from treadle_plugins.order.length_bucket import LengthBucket, LengthBucketSettings

FULL, CLOSED = Open(0, full=True), Open(0)


def request(sequence: int, *, arrival_s: float = 0.0, left: int = 100) -> LiveRequest:
    made = LiveRequest(f"r{sequence}", [1], SamplingParams(), RequestOptions(), arrival_s=arrival_s, sequence=sequence)
    made.queue(1 + left, frozenset(), None)
    return made


class Moment:
    """A step to ask about, in which one that runs can be made to wait."""

    def __init__(self, number: int, now: float, running: list[LiveRequest], waiting: list[LiveRequest]) -> None:
        clock = VirtualClock()
        clock.wait(now)
        self.running = dict.fromkeys(running)
        self.waiting = OrderedDict.fromkeys(waiting)
        self.step = Step(number, clock, PoolView(8, 16), self.running, self.waiting)

    def preempt(self, victim: LiveRequest) -> None:
        del self.running[victim]
        self.waiting[victim] = None
        self.waiting.move_to_end(victim, last=False)


def wrapped(plugin: Any, step: Step, inner: Open | NotBefore | None) -> Open | NotBefore | None:
    """What a wrapper makes of an answer."""
    asked = plugin.gate(step)
    next(asked)
    try:
        asked.send(inner)
    except StopIteration as answer:
        found: Open | NotBefore | None = answer.value
        return found
    raise AssertionError("a wrapper yields once")


def test_continuous_is_full_only_when_it_is_its_turn() -> None:
    running, waiting = [request(1), request(2)], [request(3)]
    admit = Continuous(ContinuousSettings(max_batch_size=2, every_steps=4))
    assert [admit.gate(Moment(number, 0.0, running, waiting).step) for number in (3, 4, 5)] == [CLOSED, FULL, CLOSED]
    always = Continuous(ContinuousSettings(max_batch_size=2))
    assert always.gate(Moment(3, 0.0, running, waiting).step) == FULL


@pytest.mark.parametrize("victim", [0, 1])
def test_continuous_keeps_its_word_when_the_one_that_ends_soon_gives_way(victim: int) -> None:
    running = [request(1, left=2), request(2)]
    admit = Continuous(ContinuousSettings(max_batch_size=2, every_steps=100, near_end_tokens=3))
    moment = Moment(7, 0.0, running, [request(3)])
    assert admit.gate(moment.step) == FULL
    moment.preempt(running[victim])
    assert admit.gate(moment.step) == Open(1)
    assert admit.gate(Moment(8, 0.0, [*running[1:], request(4)], [request(3)]).step) == CLOSED


def windowed_at(now: float, *, waiting_since: float = 0.0) -> tuple[Windowed, Moment, list[LiveRequest]]:
    """A batch that was filled at 1.0 s, when a window of 10 ms began."""
    running = [request(1), request(2)]
    admit = Windowed(WindowedSettings(max_batch_size=2, window_ms=10, min_batch=1))
    assert admit.gate(Moment(1, 1.0, [], running).step) == Open(2)
    return admit, Moment(2, now, running, [request(3, arrival_s=waiting_since)]), running


@pytest.mark.parametrize("waiting_since", [0.0, 1.002])
def test_windowed_is_not_full_before_its_window_is_over(waiting_since: float) -> None:
    admit, moment, _ = windowed_at(1.004, waiting_since=waiting_since)
    assert admit.gate(moment.step) == NotBefore(pytest.approx(1.01))


@pytest.mark.parametrize("waiting_since", [0.0, 1.002, 1.0101])
@pytest.mark.parametrize("victim", [0, 1])
def test_windowed_keeps_its_word(victim: int, waiting_since: float) -> None:
    admit, moment, running = windowed_at(1.0102, waiting_since=waiting_since)
    assert admit.gate(moment.step) == FULL
    moment.preempt(running[victim])
    assert admit.gate(moment.step) == Open(1)
    assert admit.gate(moment.step) == Open(1), "asked again in the same step it is still open"
    later = Moment(3, 1.012, running[:1], [request(4, arrival_s=1.011)])
    assert admit.gate(later.step) == NotBefore(pytest.approx(1.0202))


def adaptive(limit: int) -> Adaptive:
    return Adaptive(AdaptiveSettings(max_batch_size=limit))


@pytest.mark.parametrize(
    ("limit", "inner", "answer"),
    [
        (2, CLOSED, CLOSED),
        (2, NotBefore(9.0), NotBefore(9.0)),
        (2, FULL, FULL),
        (2, Open(3), FULL),
        (2, None, FULL),
        (1, FULL, CLOSED),
        (1, Open(3), CLOSED),
        (5, FULL, FULL),
        (5, CLOSED, CLOSED),
        (5, Open(), Open(3)),
    ],
)
def test_adaptive_promises_no_place_that_it_would_not_give(limit: int, inner: Any, answer: Any) -> None:
    """Two requests run."""
    moment = Moment(1, 0.0, [request(1), request(2)], [request(3)])
    assert wrapped(adaptive(limit), moment.step, inner) == answer


@pytest.mark.parametrize("inner", [CLOSED, FULL, NotBefore(9.0), Open(1), None])
@pytest.mark.parametrize("ripe", [False, True])
def test_length_bucket_hands_on_what_it_does_not_close(inner: Any, ripe: bool) -> None:
    order = LengthBucket(LengthBucketSettings(wait_ms=10))
    waiting = request(3, arrival_s=1.0)
    order.request_queued(request=waiting)
    moment = Moment(1, 1.02 if ripe else 1.0, [request(1)], [waiting])
    closed = inner if ripe or isinstance(inner, NotBefore) else NotBefore(pytest.approx(1.01))
    assert wrapped(order, moment.step, inner) == closed


@pytest.mark.parametrize(
    "admit",
    [
        {"strategy": "continuous", "max_batch_size": 2, "every_steps": 7},
        {"strategy": "continuous", "max_batch_size": 2, "every_steps": 50, "near_end_tokens": 4},
        {"strategy": "windowed", "max_batch_size": 2, "window_ms": 7, "min_batch": 3},
    ],
)
@pytest.mark.parametrize("budget", ["decode_first", {"strategy": "adaptive", "tpot_ms": 0.1, "max_batch_size": 3}])
@pytest.mark.parametrize("order", ["priority", "length_bucket"])
def test_every_promise_of_a_run_is_kept(admit: dict[str, Any], budget: Any, order: str) -> None:
    """Whenever a gate says full, take one place away and ask again."""
    promised = []

    class Doubter:
        engine: Any = None

        @hookimpl(wrapper=True)
        def gate(self, step: Step) -> Any:
            answer = yield
            if answer == FULL and promised[-1:] != [step.number]:
                promised.append(step.number)
                running = self.engine.queues.running
                victim, _ = running.popitem()
                try:
                    again = self.engine.manager.hook.gate(step=step)
                    assert isinstance(again, Open), f"{again} after {answer}"
                    assert again.most != 0, f"{again} after {answer}"
                finally:
                    running[victim] = None
            return answer

    doubter = Doubter()
    with make_engine(doubter, executor=FakeExecutor(), num_blocks=64, order=order, admit=admit, budget=budget) as engine:
        doubter.engine = engine
        handles = [
            engine.submit([number + 1] * 10, SamplingParams(max_tokens=5 + number % 23), priority=number % 4)
            for number in range(24)
        ]
        while engine.busy:
            until_s = engine.step()
            if until_s is not None:
                engine.clock.wait(until_s)
        assert all(handle.completion().error is None for handle in handles)
    assert promised
