"""Tokens of a step, blocks to spare, and a queue from which requests leave while it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle import Admission, Request, SamplingParams, Step, hookimpl
from treadle.plan import StepPlan
from treadle.request import RequestOptions
from treadle.testing import FakeExecutor, drain_checked, make_engine
from treadle.testing.traffic import assert_right
from treadle_plugins.budget.decode_first import StepBudget
from treadle_plugins.budget.whole_prompt import WholeBudget
from treadle_plugins.order.waiting_queue import WaitingQueue


class FakeRequest:
    """As much of a request as a budget looks at."""

    def __init__(self, num_pending: int, num_output: int = 0) -> None:
        self.num_pending = num_pending
        self.num_output = num_output


def take(budget: Any, *requests: tuple[int, int]) -> list[int]:
    """Grants to requests of so many pending and generated tokens, in turn, all of which want what is pending."""
    return [budget.take(FakeRequest(pending, output), pending) for pending, output in requests]


def test_decode_and_prefill_have_a_share_each() -> None:
    budget = StepBudget(decode=2, prefill=10)
    assert take(budget, (1, 5), (7, 0), (1, 3), (7, 0), (1, 9), (7, 0)) == [1, 7, 1, 3, 0, 0]


def test_the_last_token_of_a_prompt_is_prefill() -> None:
    assert take(StepBudget(decode=0, prefill=1), (1, 0)) == [1]
    assert take(StepBudget(decode=1, prefill=0), (1, 0)) == [0]


def test_drafts_draw_on_the_share_of_decode() -> None:
    budget: Any = StepBudget(decode=4, prefill=0)
    assert budget.take(FakeRequest(1, 2), 3) == 3
    assert budget.take(FakeRequest(1, 2), 3) == 1


def test_a_whole_prompt_or_nothing() -> None:
    assert take(WholeBudget(10), (6, 0), (5, 0), (4, 0)) == [6, 0, 4]


def test_the_first_prompt_goes_however_long_it_is_and_every_decode_goes() -> None:
    assert take(WholeBudget(10), (1, 1), (50, 0), (1, 1), (2, 0)) == [1, 50, 1, 0]


def sizes(plans: Sequence[StepPlan]) -> list[list[int]]:
    """Tokens of each work of each step."""
    return [[len(work.tokens) for work in plan.works] for plan in plans]


def test_decode_comes_first_and_prefill_gets_the_rest() -> None:
    executor = FakeExecutor()
    with make_engine(executor=executor, budget={"strategy": "decode_first", "max_tokens": 10}) as engine:
        short = engine.submit([1], SamplingParams(max_tokens=4))
        engine.step()
        long_one = engine.submit([2] * 20, SamplingParams(max_tokens=1))
        drain_checked(engine)
        assert_right(engine, [short, long_one])
    assert sizes(executor.plans) == [[1], [1, 9], [1, 9], [1, 2]]


def test_prefill_goes_on_though_decode_wants_everything() -> None:
    executor = FakeExecutor()
    with make_engine(executor=executor, budget={"strategy": "decode_first", "max_tokens": 2}) as engine:
        handles = [engine.submit([n], SamplingParams(max_tokens=8)) for n in range(3)]
        for _ in range(3):
            engine.step()
        handles.append(engine.submit([9] * 3, SamplingParams(max_tokens=1)))
        drain_checked(engine)
        assert_right(engine, handles)
    assert handles[3].completion().finished_s < handles[2].completion().finished_s


def test_a_limit_of_prefill_tokens_holds() -> None:
    executor = FakeExecutor()
    budget = {"strategy": "decode_first", "max_tokens": 100, "max_prefill_tokens": 7}
    with make_engine(executor=executor, budget=budget) as engine:
        handles = [engine.submit([n] * 10, SamplingParams(max_tokens=1)) for n in range(2)]
        drain_checked(engine)
        assert_right(engine, handles)
    assert sizes(executor.plans) == [[7], [3, 4], [6]]


def test_blocks_are_spared_for_those_who_run() -> None:
    starts: dict[str, int] = {}

    class Starts:
        @hookimpl
        def request_admitted(self, step: Step, request: Request) -> None:
            starts[request.id] = step.num_running

    admit = {"strategy": "continuous", "spare_blocks": 2}
    with make_engine(Starts(), num_blocks=6, admit=admit, prefix="none") as engine:
        for name in "abcdef":
            engine.submit([ord(name)] * 10, SamplingParams(max_tokens=3), request_id=name)
        drain_checked(engine)
    # each takes one of six blocks, and two are left; the one that starts is counted already
    assert max(starts.values()) == 4


def request(number: int) -> Request:
    return Request(f"q{number}", [1], SamplingParams(), RequestOptions(), arrival_s=0.0, sequence=number)


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "read"]), st.integers(0, 9)), max_size=80))
def test_a_queue_is_a_sorted_list(actions: list[tuple[str, int]]) -> None:
    queue, model = WaitingQueue(), dict[int, float]()
    requests = [request(number) for number in range(10)]
    for position, (action, number) in enumerate(actions):
        if action == "add" and number not in model:
            model[number] = (position * 7) % 5
            queue.add(requests[number], model[number])
        elif action == "discard":
            model.pop(number, None)
            queue.discard(requests[number])
        elif action == "read":
            expected = sorted(model, key=lambda n: (model[n], n))[: number + 1]
            assert [r.sequence for r, _ in zip(queue, range(number + 1), strict=False)] == expected
        assert len(queue) == len(model)


@given(st.sets(st.integers(0, 99), max_size=30), st.sets(st.integers(0, 99), min_size=1))
def test_requests_may_leave_while_the_queue_is_read(kept: set[int], leaving: set[int]) -> None:
    """Most leave first, so that few of the heap's entries are live and its clearing up may fall into the reading."""
    queue = WaitingQueue()
    requests = [request(number) for number in range(100)]
    for each in requests:
        queue.add(each, each.sequence)
    for number in sorted(set(range(100)) - kept, reverse=True):
        queue.discard(requests[number])
    seen = []
    for each in queue:
        seen.append(each.sequence)
        if each.sequence in leaving:
            queue.discard(each)
    assert seen == sorted(kept)
    assert [each.sequence for each in queue] == sorted(kept - leaving)


class PassesOver:
    """A tenant's rule: one request is passed over as long as others run."""

    def __init__(self, name: str) -> None:
        self._name = name

    @hookimpl
    def admit(self, step: Step, request: Request) -> Admission | None:
        return Admission.SKIP if request.id == self._name and step.num_running else None


@pytest.mark.parametrize("num_left", [17, 18, 19])
def test_a_request_that_is_passed_over_is_not_read_twice(num_left: int) -> None:
    admit = {"strategy": "continuous", "max_batch_size": 8}
    with make_engine(PassesOver("first"), admit=admit, num_blocks=64) as engine:
        runs = engine.submit([1], SamplingParams(max_tokens=30))
        engine.step()
        names = ["first", *(f"n{number}" for number in range(4 * num_left - 1))]
        handles = [engine.submit([2], SamplingParams(max_tokens=2), request_id=name) for name in names]
        for handle in handles[num_left:]:
            handle.cancel()
        drain_checked(engine)
        assert_right(engine, [runs, *handles[:num_left]])
