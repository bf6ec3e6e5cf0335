"""Values that a caller controls: ids that are given again, labels that are no numbers, priorities that no float can hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from treadle import Request, RequestOptions, SamplingParams, hookimpl
from treadle.registry import Registry
from treadle.request import LiveRequest
from treadle.testing import drain_checked, make_engine
from treadle_plugins.order.deadline import Deadline, DeadlineSettings
from treadle_plugins.order.priority import Priority, PrioritySettings
from treadle_plugins.order.waiting_queue import WaitingQueue

REGISTRY = Registry.installed()
HUGE = 2**63 - 1


def request(sequence: int, name: str = "x", *, arrival_s: float = 0.0, **options: Any) -> LiveRequest:
    return LiveRequest(name, [1, 2], SamplingParams(), RequestOptions(**options), arrival_s=arrival_s, sequence=sequence)


def keys(key: Callable[[Request], float], values: list[Mapping[str, Any]]) -> list[float]:
    return [key(request(number, **options)) for number, options in enumerate(values)]


def test_two_holders_of_an_id_do_not_stand_in_for_each_other() -> None:
    queue = WaitingQueue()
    first, second = request(1), request(2)
    queue.add(first, 1.0)
    queue.add(second, 2.0)
    assert list(queue) == [first, second]
    queue.discard(first)
    assert list(queue) == [second]
    assert queue.first() is second


def test_requests_may_leave_and_come_while_a_queue_is_read() -> None:
    queue = WaitingQueue()
    waiting = [request(number) for number in range(300)]
    for number, one in enumerate(waiting):
        queue.add(one, float(number))
    read = []
    for one in queue:
        read.append(one)
        queue.discard(one)
        if one.sequence % 2 == 0 and one.sequence + 1 < 300:
            queue.discard(waiting[one.sequence + 1])
    assert read == waiting[::2]
    assert list(queue) == []
    for one in waiting[:200]:
        queue.add(one, float(one.sequence))
    reader = iter(queue)
    assert [next(reader) for _ in range(100)] == waiting[:100]
    for one in waiting[50:150]:
        queue.discard(one)
    assert next(reader) is waiting[150]
    reader.close()  # type: ignore[attr-defined]  # it is a generator
    assert list(queue) == waiting[:50] + waiting[150:200]


def test_a_queue_keeps_no_more_than_a_few_times_those_that_wait() -> None:
    queue = WaitingQueue()
    queue.add(request(0), -1.0)
    for number in range(1, 10_000):
        queue.add(request(number), float(number))
        queue.discard(request(number))
    assert len(queue._heap) <= 64 + 4 * len(queue)
    assert [one.sequence for one in queue] == [0]


def test_the_largest_priorities_have_a_place() -> None:
    key = Priority(PrioritySettings()).key
    found = keys(key, [{"priority": p} for p in (HUGE, 10**9, 3, 0, -3, -(10**9), -HUGE)])
    assert found == sorted(found)
    assert len(set(found)) == 5


@pytest.mark.parametrize("text", ["nan", "-nan", "inf", "-inf", "1e999", "-1", "soon", "", "0x10", "1" * 5000])
def test_a_label_that_is_no_target_states_none(text: str) -> None:
    key = Deadline(DeadlineSettings()).key
    stated, silent = keys(key, [{"labels": {"ttft_ms": text}}, {}])
    assert stated == silent


def test_a_stated_target_is_no_later_than_that_of_bulk_traffic() -> None:
    key = Deadline(DeadlineSettings(bulk_target_ms=1000)).key
    found = keys(key, [{"labels": {"ttft_ms": text}} for text in ("0", "1e-300", "999", "1001", "1e300")])
    assert found == [0.0, pytest.approx(0.0), 0.999, 1.0, 1.0]


@pytest.mark.parametrize("setting", ["order.level_s=inf", "order.level_s=nan"])
def test_a_level_that_is_no_number_of_seconds_is_refused(setting: str) -> None:
    name, value = setting.removeprefix("order.").split("=")
    with pytest.raises(ValueError, match=name):
        PrioritySettings.model_validate({name: float(value)})


@pytest.mark.parametrize("name", REGISTRY.names("order"))
def test_an_order_stands_whatever_callers_say(name: str) -> None:
    """Every request is served, though priorities, labels and ids are as odd as they may be."""
    starts: list[str] = []

    class Starts:
        @hookimpl
        def request_admitted(self, request: Request) -> None:
            starts.append(request.id)

    with make_engine(Starts(), order=name, admit={"strategy": "continuous", "max_batch_size": 2}, registry=REGISTRY) as engine:
        for number, (priority, text) in enumerate(itertools.product((HUGE, 0, -HUGE), ("nan", "inf", "-1", "1e999", "5", ""))):
            labels = {"ttft_ms": text, "lane": text, "tenant": text}
            engine.submit([number + 1] * (1 + 40 * (number % 2)), SamplingParams(max_tokens=3), priority=priority, labels=labels)
        drain_checked(engine)
    assert len(starts) == 18


@pytest.mark.parametrize("name", REGISTRY.names("order"))
def test_an_id_may_be_given_again(name: str) -> None:
    """At once, for requests that end in every way: each of them is served in its own right."""
    with make_engine(order=name, release="with_batch", num_blocks=12, registry=REGISTRY) as engine:
        engine.submit([9] * 20, SamplingParams(max_tokens=80))
        for number in range(40):
            handle = engine.submit([number + 1] * 20, SamplingParams(max_tokens=1 + number % 4), request_id="again")
            if number % 5 == 0:
                handle.cancel()
            while not handle.finished:
                until_s = engine.step()
                engine.check_integrity()
                if until_s is not None:
                    engine.clock.wait(until_s)
        drain_checked(engine)
