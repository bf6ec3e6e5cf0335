"""Bad input: an error with the value and a way out, at once; the engine and everyone else go on."""

from __future__ import annotations

from typing import Any

import pytest

from treadle import SamplingParams
from treadle.errors import InvalidRequest, TreadleError
from treadle.testing import drain_checked


@pytest.fixture
def survives(build: Any, assert_right: Any) -> Any:
    """Post something bad beside two good requests, which must be served."""

    def check(bad: Any, *, order: str) -> None:
        engine = build(order=order)
        first = engine.submit([1, 2, 3], SamplingParams(max_tokens=5))
        engine.step()
        bad(engine)
        second = engine.submit([4, 5, 6], SamplingParams(max_tokens=5))
        drain_checked(engine)
        assert_right([first, second])

    return check


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "empty"),
        ((), "empty"),
        ([-1], "-1"),
        ([997], "997.*0 to 996"),
        ([1, 2.0], "2.0"),
        ([True], "True"),
        ([None], "None"),
        (["a"], "'a'"),
        ([2**70], str(2**70)),
        ("text", "'text'.*token ids"),
        (None, "None"),
        (5, "5"),
    ],
)
def test_a_bad_prompt(prompt: Any, told: str, survives: Any) -> None:
    def bad(engine: Any) -> None:
        with pytest.raises(InvalidRequest, match=told):
            engine.submit(prompt)

    survives(bad, order="fcfs")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "high"),
        ("priority", None),
        ("priority", float("nan")),
        ("timeout_s", 0),
        ("timeout_s", -1.5),
        ("timeout_s", float("nan")),
        ("timeout_s", "soon"),
        ("cache_salt", ["a"]),
        ("request_id", 7),
        ("request_id", ["a"]),
        ("params", {"max_tokens": 3}),
        ("labels", 5),
    ],
)
@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_a_bad_option_names_itself_and_its_value(name: str, value: Any, order: str, survives: Any) -> None:
    def bad(engine: Any) -> None:
        with pytest.raises(InvalidRequest) as raised:
            engine.submit([1, 2, 3], **{name: value})
        assert name in str(raised.value)
        assert repr(value) in str(raised.value)

    survives(bad, order=order)


@pytest.mark.parametrize("request_id", [7, None, ["a"]])
def test_cancel_of_what_is_no_id_does_no_harm(request_id: Any, survives: Any) -> None:
    def bad(engine: Any) -> None:
        try:
            engine.cancel(request_id)
        except TreadleError as error:
            assert repr(request_id) in str(error)  # noqa: PT017  # either answer will do

    survives(bad, order="fcfs")


@pytest.mark.parametrize("n", [0, -2, 1.5, "2", True, None])
def test_a_bad_group_size(n: Any, survives: Any) -> None:
    def bad(engine: Any) -> None:
        with pytest.raises(InvalidRequest) as raised:
            engine.submit_group([1, 2], SamplingParams(max_tokens=1), n)
        assert f"n={n!r}" in str(raised.value)

    survives(bad, order="fcfs")


def test_a_prompt_is_copied(build: Any, assert_right: Any) -> None:
    engine = build()
    prompt = [1, 2, 3]
    handle = engine.submit(prompt, SamplingParams(max_tokens=5))
    prompt.append(4)
    drain_checked(engine)
    assert assert_right([handle])[0].prompt_token_ids == (1, 2, 3)


def test_seeds_of_a_group_go_on_behind_the_largest_with_the_least(build: Any) -> None:
    engine = build()
    params = SamplingParams(max_tokens=2, temperature=1.0, seed=2**64 - 2)
    handles = engine.submit_group([1, 2], params, 3)
    assert [handle.request.params.seed for handle in handles] == [2**64 - 2, 2**64 - 1, -(2**63)]
