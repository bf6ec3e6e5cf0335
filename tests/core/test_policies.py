"""What the admission policies promise, on the virtual clock: bounds on waiting, and the classic base line."""

from __future__ import annotations

from typing import Any

import pytest

from treadle import Engine, FinishReason, Handle, Phase, Request, SamplingParams, hookimpl
from treadle.testing import FakeExecutor, drain_checked

STEP_S = 0.001


def _run_until(engine: Engine, time_s: float) -> None:
    """Step until the clock reads `time_s`; where the engine wants to wait, the clock jumps."""
    while engine.clock.now() < time_s:
        until_s = engine.step()
        engine.check_integrity()
        now = engine.clock.now()
        if until_s is None or until_s > now:
            engine.clock.wait(min(time_s, until_s if until_s is not None else time_s))


# --- windowed -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap_ms", [0.3, 1.0, 2.5, 4.9, 5.1, 12.0])
@pytest.mark.parametrize("min_batch", [1, 4, 20])
def test_nobody_waits_longer_than_two_windows_where_there_is_a_place(
    gap_ms: float, min_batch: int, build: Any, assert_right: Any
) -> None:
    windowed = {"strategy": "windowed", "window_ms": 5, "min_batch": min_batch, "max_batch_size": 1000}
    engine = build(admit=windowed, num_blocks=200, executor=FakeExecutor(step_s=STEP_S))
    handles = []
    for number in range(60):
        _run_until(engine, number * gap_ms / 1000)
        handles.append(engine.submit([number] * 5, SamplingParams(max_tokens=6)))
    drain_checked(engine)
    assert_right(handles)
    waits = [_admitted_s(handle) - handle.request.arrival_s for handle in handles]
    # a request that arrives within a step is seen when that step is over
    assert max(waits) <= 0.010 + STEP_S + 1e-9


def test_a_window_gathers_arrivals_and_a_full_batch_goes_with_the_window(build: Any, assert_right: Any) -> None:
    engine = build(admit={"strategy": "windowed", "window_ms": 5, "min_batch": 4}, executor=FakeExecutor(step_s=STEP_S))
    handles = []
    for at_ms in (0, 1, 2, 3):
        _run_until(engine, at_ms / 1000)
        handles.append(engine.submit([at_ms] * 5, SamplingParams(max_tokens=3)))
    drain_checked(engine)
    assert_right(handles)
    assert [_admitted_s(handle) for handle in handles] == [pytest.approx(0.005)] * 4


def _admitted_s(handle: Handle) -> float:
    admitted_s = handle.request.admitted_s
    assert admitted_s is not None
    return admitted_s


# --- aging ----------------------------------------------------------------------------------------------------------------------


class Admissions:
    """Requests in the order in which they start."""

    def __init__(self) -> None:
        self.started: list[Request] = []

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        self.started.append(request)

    def before(self, handle: Handle) -> list[Request]:
        return self.started[: self.started.index(handle.request)]


def _flood(engine: Engine, until_started: Handle, params: SamplingParams, **options: Any) -> None:
    """Favoured requests keep arriving, twice as many as can be served, until the other one starts."""
    number = 0
    while until_started.request.admitted_s is None:
        for _ in range(4):
            number += 1
            engine.submit([number % 900] * 4, params, **options)
        engine.step()
        assert number < 10_000
    for request in [*engine.queues.running, *engine.queues.waiting]:
        engine.cancel(request.id)
    drain_checked(engine)


SCARCE = {"accept": "open", "admit": {"strategy": "continuous", "max_batch_size": 2}}


@pytest.mark.parametrize("levels", [1, 3])
def test_priority_is_overtaken_only_within_its_levels_of_time(levels: int, build: Any) -> None:
    order = {"strategy": "priority", "level_s": 0.05, "preempt": False}
    admissions = Admissions()
    engine = build(admissions, order=order, executor=FakeExecutor(step_s=STEP_S), **SCARCE)
    engine.clock.wait(1.0)
    low = engine.submit([7] * 5, SamplingParams(max_tokens=1))
    _flood(engine, low, SamplingParams(max_tokens=1), priority=levels)
    arrivals = [request.arrival_s - low.request.arrival_s for request in admissions.before(low)]
    assert levels * 0.05 - 2 * STEP_S < max(arrivals) <= levels * 0.05


def test_shortest_first_is_overtaken_only_within_its_delay(build: Any) -> None:
    order = {"strategy": "shortest_first", "token_s": 0.01, "max_delay_s": 0.1}
    admissions = Admissions()
    engine = build(admissions, order=order, executor=FakeExecutor(step_s=STEP_S), **SCARCE)
    engine.clock.wait(1.0)
    long = engine.submit([7] * 300, SamplingParams(max_tokens=200))
    _flood(engine, long, SamplingParams(max_tokens=1))
    arrivals = [request.arrival_s - long.request.arrival_s for request in admissions.before(long)]
    # the short ones have 5 tokens, which move them back too
    assert 0.05 - 2 * STEP_S < max(arrivals) <= 0.1


def test_fcfs_is_never_overtaken(build: Any, assert_right: Any) -> None:
    engine = build(admit={"strategy": "continuous", "max_batch_size": 3}, num_blocks=12)
    handles = [engine.submit([n] * (1 + 37 * n % 90), SamplingParams(max_tokens=1 + 13 * n % 20)) for n in range(20)]
    drain_checked(engine)
    assert_right(handles)
    starts = [_admitted_s(handle) for handle in handles]
    assert starts == sorted(starts)


def test_the_order_of_a_policy_is_kept_when_all_are_there_at_once(build: Any, assert_right: Any) -> None:
    one_place = {"strategy": "continuous", "max_batch_size": 1}
    lengths = [50, 3, 20, 90, 7]
    for order, key in (("shortest_first", lambda h: len(h.request.token_ids())), ("priority", lambda h: -h.request.priority)):
        engine = build(order=order, admit=one_place)
        handles = [engine.submit([1] * n, SamplingParams(max_tokens=2), priority=n % 4) for n in lengths]
        expected = sorted(handles, key=key)
        drain_checked(engine)
        assert_right(handles)
        assert sorted(handles, key=_admitted_s) == expected


# --- continuous -----------------------------------------------------------------------------------------------------------------


def test_most_inserts_a_step_and_every_few_steps(build: Any, assert_right: Any) -> None:
    engine = build(admit={"strategy": "continuous", "max_inserts": 2, "every_steps": 3})
    handles = [engine.submit([n], SamplingParams(max_tokens=30)) for n in range(7)]
    drain_checked(engine)
    assert_right(handles)
    batches = [sum(h.request.admitted_s == s for h in handles) for s in sorted({_admitted_s(h) for h in handles})]
    assert batches == [2, 2, 2, 1]


def test_a_place_is_filled_in_between_when_a_request_is_near_its_end(build: Any, assert_right: Any) -> None:
    engine = build(admit={"strategy": "continuous", "every_steps": 1000, "near_end_tokens": 2}, executor=FakeExecutor(step_s=1))
    first = engine.submit([1], SamplingParams(max_tokens=10))
    engine.step()
    second = engine.submit([2], SamplingParams(max_tokens=10))
    drain_checked(engine)
    assert_right([first, second])
    assert _admitted_s(second) == pytest.approx(8.0)


# --- the classic base line ------------------------------------------------------------------------------------------

CLASSIC = {
    "admit": {"strategy": "static", "batch_size": 3, "max_wait_ms": 50},
    "allocate": "contiguous",
    "prefix": "none",
    "release": "with_batch",
}


def test_a_static_batch_starts_full_or_after_its_wait(build: Any, assert_right: Any) -> None:
    engine = build(executor=FakeExecutor(step_s=STEP_S), **CLASSIC)
    handles = [engine.submit([n] * 9, SamplingParams(max_tokens=5)) for n in range(5)]
    drain_checked(engine)
    assert_right(handles)
    assert [_admitted_s(handle) for handle in handles[:3]] == [0.0] * 3
    assert [_admitted_s(handle) for handle in handles[3:]] == [pytest.approx(0.05)] * 2


def test_nobody_joins_a_static_batch_that_runs(build: Any, assert_right: Any) -> None:
    engine = build(executor=FakeExecutor(step_s=STEP_S), **CLASSIC)
    handles = [engine.submit([n] * 9, SamplingParams(max_tokens=2 + 30 * (n == 1))) for n in range(3)]
    engine.step()
    engine.step()
    handles += [engine.submit([n] * 9, SamplingParams(max_tokens=2)) for n in range(3)]
    drain_checked(engine)
    assert_right(handles)
    longest_ends = handles[1].result().finished_s
    assert all(_admitted_s(handle) >= longest_ends for handle in handles[3:])


def test_every_slot_is_held_until_the_longest_is_done(build: Any, assert_right: Any) -> None:
    engine = build(executor=FakeExecutor(step_s=STEP_S), **CLASSIC)
    handles = [engine.submit([n] * 9, SamplingParams(max_tokens=3 if n else 60)) for n in range(3)]
    engine.step()
    used = engine.kv_cache.pool.num_used
    # contiguous: the prompt and `max_tokens`, less the last token, which is never computed
    assert used == -(-68 // 16) + 2 * 1
    while not handles[0].finished:
        assert engine.kv_cache.pool.num_used == used
        engine.step()
    assert engine.kv_cache.pool.num_used == 0
    assert_right(handles)


def test_a_cancelled_member_leaves_its_batch(build: Any, assert_right: Any) -> None:
    engine = build(**CLASSIC)
    handles = [engine.submit([n] * 9, SamplingParams(max_tokens=3 if n else 60)) for n in range(3)]
    for _ in range(5):
        engine.step()
    handles[0].cancel()
    engine.step()
    assert handles[0].result().finish_reason is FinishReason.CANCELLED
    assert engine.kv_cache.pool.num_used == 0
    assert_right(handles[1:])


@pytest.mark.parametrize("reserve", ["max_tokens", "model_length"])
def test_contiguous_gives_one_run_of_neighbours(reserve: str, build: Any, assert_right: Any) -> None:
    engine = build(
        executor=FakeExecutor(max_length=100),
        num_blocks=20,
        prefix="none",
        allocate={"strategy": "contiguous", "reserve": reserve},
    )
    handles = [engine.submit([n] * (5 + 9 * n), SamplingParams(max_tokens=20)) for n in range(5)]
    while any(not handle.finished for handle in handles):
        engine.step()
        engine.check_integrity()
        for handle in handles:
            table = handle.request.block_table
            assert table == tuple(range(table[0], table[0] + len(table))) if table else True
            if handle.request.phase is Phase.RUNNING:
                length = 100 if reserve == "model_length" else handle.request.max_total_tokens - 1
                assert len(table) == -(-length // 16), "reserved at once"
    assert_right(handles)
