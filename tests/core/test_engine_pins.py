"""Prompts that are kept from eviction for a time, and requests that share nothing."""

from __future__ import annotations

from typing import Any

from treadle import Engine, SamplingParams
from treadle.testing import drain_checked


def _reused_after_pressure(engine: Engine, assert_right: Any, **options: Any) -> int:
    """Tokens that a prompt finds again after others have needed the whole pool."""
    first = engine.submit(list(range(1, 50)), SamplingParams(max_tokens=2), **options)
    drain_checked(engine)
    others = [engine.submit([n + 60] * 60, SamplingParams(max_tokens=30)) for n in range(6)]
    drain_checked(engine)
    again = engine.submit(list(range(1, 50)), SamplingParams(max_tokens=2))
    drain_checked(engine)
    return int(assert_right([first, *others, again])[-1].num_cached_tokens)


def test_a_pinned_prompt_outlives_others_need(build: Any, assert_right: Any) -> None:
    assert _reused_after_pressure(build(num_blocks=12), assert_right) == 0
    assert _reused_after_pressure(build(num_blocks=12), assert_right, pin_s=1000) == 48
    assert _reused_after_pressure(build(num_blocks=12), assert_right, pin_s=0.001) == 0


def test_no_more_is_pinned_than_the_settings_allow(build: Any, assert_right: Any) -> None:
    engine = build(values={"pool": {"num_blocks": 12, "max_pinned": 0.1}})
    assert _reused_after_pressure(engine, assert_right, pin_s=1000) == 0


def test_pins_yield_where_otherwise_nobody_could_go_on(build: Any, assert_right: Any) -> None:
    engine = build(num_blocks=12)
    first = engine.submit(list(range(1, 50)), SamplingParams(max_tokens=2), pin_s=1000)
    drain_checked(engine)
    large = engine.submit([7] * 180, SamplingParams(max_tokens=12))
    drain_checked(engine)
    assert_right([first, large])


def test_a_request_may_leave_nothing_and_take_nothing(build: Any, assert_right: Any) -> None:
    engine = build()
    prompt = list(range(1, 50))
    handles = []
    for reuse in (False, True, False, True):
        handles.append(engine.submit(prompt, SamplingParams(max_tokens=2), reuse=reuse))
        drain_checked(engine)
    assert [completion.num_cached_tokens for completion in assert_right(handles)] == [0, 0, 0, 48]
