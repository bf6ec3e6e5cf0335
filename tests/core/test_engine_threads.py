"""The engine from many threads: submit, stream, wait, cancel, close."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from treadle import Completion, FinishReason, NotBefore, Refuse, SamplingParams, Step, hookimpl
from treadle.clocks import MonotonicClock
from treadle.errors import EngineStopped, InvalidRequest, PluginError
from treadle.testing import FakeExecutor, drain_checked


@pytest.fixture
def real_time() -> FakeExecutor:
    """An executor on the real clock."""
    executor = FakeExecutor()
    executor.clock = MonotonicClock()
    return executor


class Closed:
    """Nobody starts for a long time."""

    @hookimpl
    def gate(self, step: Step) -> NotBefore:
        return NotBefore(step.now + 100)


def _prompt(number: int) -> list[int]:
    return list(range(1, 20)) + [number % 997] * (1 + number % 40)


@pytest.mark.parametrize("started", [True, False], ids=["own thread", "the callers' threads"])
def test_many_threads_submit_stream_wait_and_cancel(started: bool, build: Any, truth: Any) -> None:
    engine = build(num_blocks=24)
    if started:
        engine.start()

    def use(number: int) -> None:
        handle = engine.submit(_prompt(number), SamplingParams(max_tokens=1 + number % 23))
        expected = truth(handle)
        if number % 3 == 0:
            streamed = [token for chunk in handle.stream() for token in chunk.token_ids]
            assert tuple(streamed) == handle.completion().token_ids == expected
        elif number % 3 == 1:
            assert handle.result(60).token_ids == expected
        else:
            handle.cancel()
            completion = handle.result(60)
            assert completion.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
            assert completion.token_ids == expected[: len(completion.token_ids)]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(120)))
    if not started:
        drain_checked(engine)


def test_a_request_is_streamed_to_several_threads_at_once(build: Any, truth: Any) -> None:
    engine = build().start()
    handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=200))

    def read(_: int) -> tuple[int, ...]:
        return tuple(token for chunk in handle.stream() for token in chunk.token_ids)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(read, range(4))) == {truth(handle)}


def test_a_stream_yields_tokens_as_they_come(build: Any, truth: Any) -> None:
    engine = build()
    handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=5))
    stream = handle.stream()
    assert next(stream).token_ids == truth(handle)[:1]
    assert not handle.finished
    assert [chunk.token_ids for chunk in stream] == [(token,) for token in truth(handle)[1:]]


def test_a_result_may_be_waited_for_in_vain_and_then_again(build: Any, real_time: FakeExecutor) -> None:
    engine = build(Closed(), executor=real_time)
    handle = engine.submit([1])
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.05"):
        handle.result(0.05)
    assert time.monotonic() - before < 5
    handle.cancel()
    assert handle.result(30).finish_reason is FinishReason.CANCELLED


def test_a_result_may_be_waited_for_in_vain_beside_the_engines_thread(build: Any, real_time: FakeExecutor) -> None:
    engine = build(Closed(), executor=real_time).start()
    handle = engine.submit([1])
    with pytest.raises(TimeoutError):
        handle.result(0.05)
    handle.cancel()
    assert handle.result(30).finish_reason is FinishReason.CANCELLED


def test_an_idle_engine_wakes_for_an_arrival(build: Any, real_time: FakeExecutor, truth: Any) -> None:
    engine = build(executor=real_time).start()
    for number in range(3):
        time.sleep(0.02)
        handle = engine.submit([number], SamplingParams(max_tokens=3))
        assert handle.result(30).token_ids == truth(handle)


class Never:
    """Nobody ever starts."""

    @hookimpl
    def gate(self) -> NotBefore:
        return NotBefore(float("inf"))


def test_a_time_that_never_comes_is_waited_for(build: Any, real_time: FakeExecutor) -> None:
    engine = build(Never(), executor=real_time).start()
    handle = engine.submit([1])
    with pytest.raises(TimeoutError):
        handle.result(0.05)
    handle.cancel()
    assert handle.result(30).finish_reason is FinishReason.CANCELLED


def test_a_step_of_another_thread_ends_the_wait_of_one_about_to_sleep(
    build: Any, real_time: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's step ends the request, and takes the arrival that would have ended the sleep."""
    engine = build(Closed(), executor=real_time)
    handle = engine.submit([1])
    pause = engine._loop.pause

    def late(*arguments: Any) -> None:
        handle.cancel()
        engine.step()
        pause(*arguments)

    monkeypatch.setattr(engine._loop, "pause", late)
    before = time.monotonic()
    assert handle.result(30).finish_reason is FinishReason.CANCELLED
    assert time.monotonic() - before < 15


def test_a_step_of_another_thread_leaves_the_engines_own_no_arrival_to_wait_for(
    build: Any, real_time: FakeExecutor, truth: Any
) -> None:
    engine = build(executor=real_time)
    arrival = engine._loop._arrival
    handles = []

    class Arrival(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if not handles:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(
                        lambda: (handles.append(engine.submit([1], SamplingParams(max_tokens=3))), engine.step())
                    ).result()
            return super().wait(timeout)

    engine._loop._arrival = Arrival()
    assert not arrival.is_set()
    engine.start()
    while not handles:
        time.sleep(0.01)
    assert handles[0].result(20).token_ids == truth(handles[0])


def test_starting_twice_starts_one_thread(build: Any) -> None:
    before = threading.active_count()
    engine = build().start().start()
    assert threading.active_count() == before + 1
    engine.close()
    assert threading.active_count() == before


# --- the end --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [True, False])
def test_close_ends_what_is_under_way(started: bool, build: Any, executor: FakeExecutor, truth: Any) -> None:
    engine = build(executor=executor, admit={"strategy": "continuous", "max_batch_size": 2})
    handles = [engine.submit([n], SamplingParams(max_tokens=900)) for n in range(3)]
    engine.step()
    if started:
        engine.start()
    late = engine.submit([9])
    engine.close()
    engine.close()
    assert executor.closed
    for handle in [*handles, late]:
        completion = handle.result(10)
        assert completion.finish_reason is FinishReason.CANCELLED
        assert completion.token_ids == truth(handle)[: len(completion.token_ids)]
    with pytest.raises(EngineStopped, match="closed"):
        engine.submit([1])
    with pytest.raises(EngineStopped):
        engine.step()
    engine.drain()


def test_leaving_the_with_block_closes(build: Any, executor: FakeExecutor) -> None:
    with build(executor=executor) as engine:
        handle = engine.submit([1])
    assert executor.closed
    assert handle.finished


def test_close_returns_whenever_it_comes(build: Any) -> None:
    """A thread that is about to begin an idle step must not miss that the engine was closed meanwhile."""
    engine = build()

    class Arrival(threading.Event):
        """Lets `close` run at the worst moment: between the stepping thread's look at `closed` and its `clear`."""

        def clear(self) -> None:
            if not began.is_set():
                closing.start()
                began.set()
                while not (engine._loop.closed and self.is_set()):
                    time.sleep(0.001)
            super().clear()

    began = threading.Event()
    closing = threading.Thread(target=engine.close, daemon=True)
    engine._loop._arrival = Arrival()
    engine.start()
    assert began.wait(5)
    closing.join(2)
    hangs = closing.is_alive()
    engine._loop._arrival.set()
    closing.join(5)
    assert not hangs


def test_close_while_others_wait_gives_each_a_completion(build: Any, real_time: FakeExecutor) -> None:
    engine = build(Closed(), executor=real_time)
    handles = [engine.submit([n]) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(handle.result, 20) for handle in handles]
        time.sleep(0.05)
        engine.close()
        assert {future.result(20).finish_reason for future in waiting} == {FinishReason.CANCELLED}


class SlowlyFailing:
    """Fails when told of the third step's end, while others wait to step."""

    name = "culprit"

    def __init__(self) -> None:
        self.num_steps = 0

    @hookimpl
    def step_finished(self) -> None:
        self.num_steps += 1
        if self.num_steps == 3:
            time.sleep(0.05)
            raise ZeroDivisionError


@pytest.mark.parametrize("started", [True, False])
def test_a_failure_reaches_all_who_wait_as_a_completion(started: bool, build: Any) -> None:
    engine = build(SlowlyFailing())
    handles = [engine.submit([n], SamplingParams(max_tokens=100)) for n in range(4)]
    if started:
        engine.start()
    with ThreadPoolExecutor(4) as pool:
        done: list[Completion] = [future.result(20) for future in [pool.submit(handle.result, 20) for handle in handles]]
    assert all(isinstance(completion.error, PluginError) for completion in done)
    assert [completion.finish_reason for completion in done] == [FinishReason.ERROR] * 4


def test_generate_keeps_the_order_and_yields_errors_in_their_place(build: Any) -> None:
    engine = build(num_blocks=8)
    prompts: list[list[int]] = [[1], [], [2] * 10_000, [3], [-1], [4]]
    done = list(engine.generate(prompts, SamplingParams(max_tokens=4), ahead=2))
    reasons = [completion.finish_reason.value for completion in done]
    assert reasons == ["length", "refused", "refused", "length", "refused", "length"]
    assert [completion.prompt_token_ids[:1] for completion in done] == [(1,), (), (2,), (3,), (), (4,)]
    assert all(isinstance(done[place].error, InvalidRequest) for place in (1, 2, 4))


def test_generate_may_be_given_up_early(build: Any) -> None:
    engine = build()
    completions = engine.generate(([n] for n in range(1000)), SamplingParams(max_tokens=2), ahead=4)
    assert next(completions).token_ids
    completions.close()
    drain_checked(engine)


def test_what_a_hook_submits_is_for_the_next_step(build: Any) -> None:
    """Else one that tries again whatever is refused would keep the step for ever."""

    class Insists:
        name = "insists"

        def __init__(self) -> None:
            self.num_refused = 0

        @hookimpl
        def accept(self) -> Refuse:
            return Refuse("never")

        @hookimpl
        def request_refused(self) -> None:
            self.num_refused += 1
            if self.num_refused < 100:
                engine.submit([1])

    plugin = Insists()
    engine = build(plugin)
    engine.submit([1])
    engine.step()
    assert plugin.num_refused == 1
    drain_checked(engine)
    assert plugin.num_refused == 100


def test_submission_is_seen_from_hooks_on_the_stepping_thread_only(build: Any) -> None:
    threads: set[str] = set()

    class Witness:
        @hookimpl
        def request_queued(self) -> None:
            threads.add(threading.current_thread().name)

        @hookimpl
        def step_finished(self) -> None:
            threads.add(threading.current_thread().name)

    engine = build(Witness()).start()
    submit: Callable[[int], Any] = lambda n: engine.submit([n], SamplingParams(max_tokens=2)).result(20)  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(submit, range(12)))
    assert threads == {"treadle"}
