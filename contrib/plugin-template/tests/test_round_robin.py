"""order.round_robin, by what an engine does with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from treadle import Engine, Handle, SamplingParams
from treadle.testing import VirtualClock, drain_checked, make_engine, run_prompts


def submit(engine: Engine, tenants: str) -> list[Handle]:
    """One request for each letter, in this order, all at the same clock time."""
    params = SamplingParams(max_tokens=4)
    return [engine.submit([1, 2, 3], params, labels={"tenant": tenant}) for tenant in tenants]


def started(handles: Sequence[Handle], tenants: str) -> str:
    """The tenants' letters in the order in which their requests started."""
    times = [handle.completion().admitted_s or 0.0 for handle in handles]
    return "".join(tenant for _, tenant in sorted(zip(times, tenants, strict=True), key=lambda pair: pair[0]))


@pytest.mark.parametrize(
    ("arrive", "start"),
    [("aaaabb", "ababaa"), ("abab", "abab"), ("aaa", "aaa"), ("aaabbbccc", "abcabcabc"), ("bbbba", "babbb")],
)
def test_tenants_take_turns(arrive: str, start: str) -> None:
    with make_engine(order="round_robin", admit={"strategy": "continuous", "max_batch_size": 1}) as engine:
        handles = submit(engine, arrive)
        drain_checked(engine)
        assert started(handles, arrive) == start


def test_who_comes_later_takes_turns_with_those_that_are_left() -> None:
    with make_engine(order="round_robin", admit={"strategy": "continuous", "max_batch_size": 1}) as engine:
        early = submit(engine, "aaaaaa")
        while sum(handle.finished for handle in early) < 3:
            engine.step()
        late = submit(engine, "bb")
        drain_checked(engine)
        assert started([*early[3:], *late], "aaabb") == "babaa"


def test_the_wait_is_bounded_under_endless_arrivals() -> None:
    """Each step brings a request of a tenant nobody has seen, and one place is free; the second of `a` still gets its turn."""
    order = {"strategy": "round_robin", "turn_s": 60, "max_delay_s": 0.5}
    with make_engine(order=order, admit={"strategy": "continuous", "max_batch_size": 1}) as engine:
        second = submit(engine, "aa")[1]
        for number in range(2000):
            if second.finished:
                break
            engine.submit([1, 2, 3], SamplingParams(max_tokens=1), labels={"tenant": f"new{number}"})
            engine.step()
        completion = second.completion()
        assert isinstance(engine.clock, VirtualClock)
        assert completion.admitted_s is not None
        # by then all who arrived within max_delay_s went before, each for one step of a millisecond
        assert 0.5 <= completion.admitted_s - completion.arrival_s <= 0.6


def test_a_preempted_request_keeps_its_turn_and_its_tokens() -> None:
    prompts = [[n] * 30 for n in range(1, 5)]
    short = run_prompts(prompts=prompts, max_tokens=20, num_blocks=4, order="round_robin", labels={"tenant": "a"})
    plenty = run_prompts(prompts=prompts, max_tokens=20, order="round_robin")
    assert any(completion.num_preempted for completion in short)
    assert [c.token_ids for c in short] == [c.token_ids for c in plenty]


def test_cancelled_requests_leave_the_queue() -> None:
    with make_engine(order="round_robin", admit={"strategy": "continuous", "max_batch_size": 1}) as engine:
        handles = submit(engine, "aaab")
        engine.step()
        handles[1].cancel()
        drain_checked(engine)
        assert started([handles[0], handles[2], handles[3]], "aab") == "aba"
