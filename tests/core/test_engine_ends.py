"""How requests end: cancelled, timed out, refused, failed. Whatever ends, the others get the right tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from treadle import Engine, FinishReason, Handle, NotBefore, Phase, Refuse, Request, SamplingParams, Step, Trim, hookimpl
from treadle.errors import ExecutionError, InvalidRequest, Refused
from treadle.plan import Outcome, StepPlan
from treadle.testing import FakeExecutor, drain_checked, expected_tokens

LONG = SamplingParams(max_tokens=60)


def _until(engine: Engine, reached: Callable[[], bool]) -> None:
    for _ in range(1000):
        if reached():
            return
        engine.step()
        engine.check_integrity()
    raise AssertionError("not reached within 1000 steps")


# --- cancel ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", list(Phase))
def test_cancel_in_each_phase(phase: Phase, build: Any, truth: Any, assert_right: Any) -> None:
    engine = build(num_blocks=7, admit={"strategy": "continuous", "max_batch_size": 3}, prefix="none")
    handles = [engine.submit([n] * 25, SamplingParams(max_tokens=40)) for n in range(4)]
    _until(engine, lambda: any(handle.request.phase is phase for handle in handles))
    target = next(handle for handle in handles if handle.request.phase is phase)
    num_before = target.request.num_output
    target.cancel()
    engine.step()
    engine.check_integrity()
    completion = target.result(0)
    if phase is Phase.FINISHED:
        assert completion.finish_reason is FinishReason.LENGTH
    else:
        assert completion.finish_reason is FinishReason.CANCELLED
        assert completion.error is None
        assert len(completion.token_ids) == num_before
        assert target.request.block_table == ()
    assert completion.token_ids == truth(target)[: len(completion.token_ids)]
    drain_checked(engine)
    assert_right([handle for handle in handles if handle is not target])


def test_cancel_of_an_unknown_or_ended_request_is_ignored(build: Any, assert_right: Any) -> None:
    engine = build()
    handle = engine.submit([1], SamplingParams(max_tokens=2), request_id="mine")
    engine.cancel("nobody")
    drain_checked(engine)
    engine.cancel("mine")
    engine.step()
    assert_right([handle])


def test_cancel_of_one_that_shares_blocks_leaves_them_valid(build: Any, assert_right: Any) -> None:
    engine = build()
    common = list(range(1, 50))
    first, second = (engine.submit([*common, n], SamplingParams(max_tokens=20)) for n in range(2))
    engine.step()
    assert set(first.request.block_table) & set(second.request.block_table)
    first.cancel()
    drain_checked(engine)
    assert_right([second])


def test_a_cancelled_id_may_be_used_again(build: Any, assert_right: Any) -> None:
    engine = build()
    engine.submit([1], request_id="mine").cancel()
    engine.step()
    again = engine.submit([1], SamplingParams(max_tokens=2), request_id="mine")
    drain_checked(engine)
    assert_right([again])


# --- time ---------------------------------------------------------------------------------------------------------------------


class Closed:
    """Opens when the clock reads 10 seconds."""

    @hookimpl
    def gate(self, step: Step) -> NotBefore | None:
        return NotBefore(10.0) if step.now < 10 else None


def test_a_request_times_out_in_the_queue_at_its_time(build: Any, assert_right: Any) -> None:
    engine = build(Closed())
    short, patient = engine.submit([1], LONG, timeout_s=2.5), engine.submit([2], LONG, timeout_s=1000)
    drain_checked(engine)
    completion = short.result()
    assert completion.finish_reason is FinishReason.TIMEOUT
    assert completion.token_ids == ()
    assert completion.finished_s == pytest.approx(2.5)
    assert_right([patient])


def test_a_request_times_out_while_it_runs_and_keeps_its_tokens(build: Any, truth: Any, assert_right: Any) -> None:
    engine = build(executor=FakeExecutor(step_s=0.1))
    short, other = engine.submit([1], LONG, timeout_s=1.05), engine.submit([2], LONG)
    drain_checked(engine)
    completion = short.result()
    assert completion.finish_reason is FinishReason.TIMEOUT
    assert completion.token_ids == truth(short)[:11]
    assert_right([other])


def test_a_request_that_ends_in_time_does_not_time_out(build: Any, assert_right: Any) -> None:
    engine = build()
    handles = [engine.submit([n], SamplingParams(max_tokens=3), timeout_s=0.5) for n in range(3)]
    drain_checked(engine)
    engine.clock.wait(10)
    late = engine.submit([9], SamplingParams(max_tokens=3))
    drain_checked(engine)
    assert_right([*handles, late])


# --- refused ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "holder"),
    [(129, None, "the KV pool"), (100, 30, "the KV pool"), (300, None, "the model fake"), (10, 300, "the model fake")],
)
def test_what_is_too_large_is_refused_at_once_and_the_next_one_runs(
    prompt_length: int, max_tokens: int | None, holder: str, build: Any, assert_right: Any
) -> None:
    engine = build(num_blocks=8, executor=FakeExecutor(max_length=200))
    large = engine.submit([1] * prompt_length, SamplingParams(max_tokens=max_tokens))
    small = engine.submit([2] * 20, SamplingParams(max_tokens=5))
    engine.step()
    completion = large.result()
    assert completion.finish_reason is FinishReason.REFUSED
    assert isinstance(completion.error, InvalidRequest)
    for part in (str(prompt_length), holder, "shorten the prompt", "lower max_tokens"):
        assert part in str(completion.error)
    drain_checked(engine)
    assert_right([small])


def test_what_just_fits_the_pool_is_served(build: Any, assert_right: Any) -> None:
    engine = build(num_blocks=8)
    # the last token is never computed, so it needs no place
    handles = [engine.submit([1] * 100, SamplingParams(max_tokens=29)), engine.submit([2] * 128, SamplingParams(max_tokens=1))]
    drain_checked(engine)
    assert_right(handles)


def test_without_max_tokens_the_pool_or_the_model_is_filled(build: Any) -> None:
    for engine, most in ((build(num_blocks=8), 129), (build(executor=FakeExecutor(max_length=50)), 50)):
        handle = engine.submit([1] * 20)
        drain_checked(engine)
        completion = handle.result()
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.token_ids == expected_tokens([1] * 20, SamplingParams(max_tokens=most - 20), engine.info.model)


def test_an_accept_rule_refuses_and_trims(build: Any, plugin_with: Any, assert_right: Any) -> None:
    def accept(request: Request, load: object) -> Refuse | Trim | None:
        if request.labels.get("tenant") == "a":
            return Refuse("tenant a is suspended", retry_after_s=7.0)
        return Trim(16) if request.prompt_length > 16 else None

    engine = build(plugin_with("accept", accept))
    refused = engine.submit([1], labels={"tenant": "a"})
    trimmed = engine.submit(list(range(1, 41)), SamplingParams(max_tokens=4))
    short = engine.submit([1, 2], SamplingParams(max_tokens=4))
    drain_checked(engine)
    error = refused.result().error
    assert isinstance(error, Refused)
    assert error.retry_after_s == 7.0
    assert str(error) == "tenant a is suspended"
    done = assert_right([trimmed, short])
    assert [completion.was_trimmed for completion in done] == [True, False]
    assert done[0].prompt_token_ids == tuple(range(25, 41))


def test_an_id_in_use_is_refused_and_the_first_is_not_touched(build: Any, assert_right: Any) -> None:
    engine = build()
    first = engine.submit([1], SamplingParams(max_tokens=3), request_id="mine")
    with pytest.raises(InvalidRequest, match=r"request_id='mine' is in use"):
        engine.submit([2], request_id="mine")
    engine.step()
    with pytest.raises(InvalidRequest, match="mine"):
        engine.submit([2], request_id="mine")
    drain_checked(engine)
    again = engine.submit([2], SamplingParams(max_tokens=3), request_id="mine")
    drain_checked(engine)
    assert_right([first, again])


# --- failed passes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "num_blocks"), list(itertools.product(["hash_chain", "radix", "none"], [64, 14])))
def test_a_request_that_cannot_be_computed_ends_alone(prefix: str, num_blocks: int, build: Any, assert_right: Any) -> None:
    executor = FakeExecutor()
    engine = build(executor=executor, prefix=prefix, num_blocks=num_blocks)
    common = list(range(1, 41))
    params = SamplingParams(max_tokens=20)
    first = [engine.submit([*common, n], params) for n in range(2)]
    for _ in range(3):
        engine.step()
    guilty = engine.submit([*common, *range(100, 130)], params, request_id="guilty")
    later = [engine.submit([*common, *range(100, 100 + 10 * n), 7], params) for n in range(3)]
    executor.fail_on = {"guilty"}
    drain_checked(engine, 5000)
    completion = guilty.result()
    assert completion.finish_reason is FinishReason.ERROR
    assert isinstance(completion.error, ExecutionError)
    assert "cannot compute ['guilty']" in str(completion.error)
    assert isinstance(completion.error.__cause__, RuntimeError)
    done = assert_right([*first, *later])
    if prefix != "none" and num_blocks == 64:
        assert any(completion.num_cached_tokens for completion in done)


class Flaky(FakeExecutor):
    """Fails in the first and the sixth pass of several requests, after it has written; alone, each can be computed."""

    num_passes = 0

    @hookimpl
    def execute(self) -> Flaky:
        return self

    def run(self, plan: StepPlan) -> Outcome:
        outcome = super().run(plan)
        self.num_passes += len(plan.works) > 1
        if len(plan.works) > 1 and self.num_passes in (1, 6):
            raise RuntimeError("out of memory")
        return outcome


@pytest.mark.parametrize("prefix", ["hash_chain", "radix", "none"])
def test_a_pass_that_fails_once_costs_nobody_a_token(prefix: str, build: Any, assert_right: Any) -> None:
    engine = build(executor=Flaky(), prefix=prefix)
    handles: list[Handle] = [engine.submit(list(range(1, 40 + n)), SamplingParams(max_tokens=15)) for n in range(4)]
    for _ in range(5):
        engine.step()
        engine.check_integrity()
    handles += [engine.submit(list(range(1, 36 + n)), SamplingParams(max_tokens=15)) for n in range(4)]
    drain_checked(engine)
    assert_right(handles)


def test_when_every_pass_fails_every_request_ends(build: Any, assert_right: Any) -> None:
    executor = FakeExecutor()
    engine = build(executor=executor)
    handles = [engine.submit([n] * 20, LONG) for n in range(5)]
    engine.step()
    executor.fail_on = {handle.id for handle in handles}
    drain_checked(engine, 200)
    assert all(isinstance(handle.result().error, ExecutionError) for handle in handles)
    after = engine.submit([1] * 20, SamplingParams(max_tokens=4))
    drain_checked(engine)
    assert_right([after])


def test_a_request_may_be_cancelled_while_the_culprit_is_sought(build: Any, assert_right: Any) -> None:
    executor = FakeExecutor()
    engine = build(executor=executor)
    handles = [engine.submit([n] * 20, SamplingParams(max_tokens=10), request_id=f"q{n}") for n in range(4)]
    executor.fail_on = {"q2"}
    engine.step()
    engine.cancel("q0")
    engine.cancel("q2")
    drain_checked(engine)
    assert [handle.result().finish_reason for handle in handles[::2]] == [FinishReason.CANCELLED] * 2
    assert_right(handles[1::2])


def test_a_failed_pass_leaves_nothing_to_match(build: Any, assert_right: Any) -> None:
    executor = FakeExecutor()
    engine = build(executor=executor)
    executor.fail_on = {"guilty"}
    engine.submit(list(range(1, 60)), LONG, request_id="guilty")
    drain_checked(engine)
    assert engine.kv_cache.pool.num_cached == 0
    executor.fail_on = set()
    same = engine.submit(list(range(1, 60)), SamplingParams(max_tokens=5))
    drain_checked(engine)
    assert assert_right([same])[0].num_cached_tokens == 0
