"""Sampling parameters: validated when made, with errors that name every value that contradicts another."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle import SamplingParams
from treadle.errors import InvalidRequest


@pytest.mark.parametrize(
    ("values", "told"),
    [
        # out of range
        ({"max_tokens": 0}, ["max_tokens=0", "at least 1"]),
        ({"max_tokens": -1}, ["max_tokens=-1"]),
        ({"max_tokens": 1.5}, ["max_tokens=1.5", "whole number"]),
        ({"max_tokens": True}, ["max_tokens=True"]),
        ({"max_tokens": "3"}, ["max_tokens='3'"]),
        ({"min_tokens": -1}, ["min_tokens=-1", "at least 0"]),
        ({"min_tokens": None}, ["min_tokens=None"]),
        ({"temperature": -0.1}, ["temperature=-0.1", "0 to 100"]),
        ({"temperature": 101}, ["temperature=101"]),
        ({"temperature": float("nan")}, ["temperature=nan"]),
        ({"temperature": float("inf")}, ["temperature=inf"]),
        pytest.param({"temperature": 10**400}, ["temperature=1000"], id="a temperature too large for a float"),
        ({"temperature": "hot"}, ["temperature='hot'"]),
        ({"temperature": True}, ["temperature=True"]),
        ({"temperature": None}, ["temperature=None"]),
        ({"temperature": 1.0, "top_k": 0}, ["top_k=0", "at least 1"]),
        ({"temperature": 1.0, "top_k": 1.0}, ["top_k=1.0"]),
        ({"temperature": 1.0, "top_p": 1.1}, ["top_p=1.1", "0 to 1"]),
        ({"temperature": 1.0, "top_p": -0.5}, ["top_p=-0.5"]),
        ({"temperature": 1.0, "seed": 2**64}, [f"seed={2**64}"]),
        ({"temperature": 1.0, "seed": -(2**63) - 1}, ["seed=-"]),
        ({"temperature": 1.0, "seed": 0.5}, ["seed=0.5"]),
        ({"logprobs": -1}, ["logprobs=-1", "0 to 100"]),
        ({"logprobs": 101}, ["logprobs=101"]),
        ({"prompt_logprobs": "all"}, ["prompt_logprobs='all'"]),
        ({"stop": ""}, ["stop=''", "non-empty"]),
        ({"stop": ("a", "")}, ["stop=''"]),
        ({"stop": (3,)}, ["stop=3"]),
        ({"stop": 3}, ["stop=3"]),
        ({"stop": None}, ["stop=None"]),
        ({"stop_token_ids": (-1,)}, ["stop_token_ids=-1"]),
        ({"stop_token_ids": ("a",)}, ["stop_token_ids='a'"]),
        ({"stop_token_ids": 3}, ["stop_token_ids=3"]),
        ({"ignore_eos": "no"}, ["ignore_eos='no'"]),
        # contradictions: both values, and a way out
        ({"max_tokens": 3, "min_tokens": 4}, ["min_tokens=4", "max_tokens=3", "lower one or raise the other"]),
        ({"top_k": 5}, ["top_k=5", "temperature=0", "drop top_k"]),
        ({"top_p": 0.9}, ["top_p=0.9", "temperature=0", "drop top_p"]),
        ({"temperature": 1.0, "top_p": 0.0}, ["top_p=0", "temperature=0 for greedy"]),
        ({"top_p": 0.0}, ["top_p=0", "greedy"]),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_what_would_work(values: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**values)
    for part in told:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0.7, "top_k": 1, "top_p": 1e-9, "seed": 2**64 - 1},
        {"temperature": 100, "seed": -(2**63)},
        {"temperature": 0, "seed": 4, "top_p": 1.0},
        {"logprobs": 0, "prompt_logprobs": 100},
        {"stop": ["a", "b"], "stop_token_ids": [1, 2], "ignore_eos": True},
    ],
    ids=str,
)
def test_sensible_values_are_taken(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert pickle.loads(pickle.dumps(params)) == params  # noqa: S301  # our own bytes
    hash(params)


def test_one_stop_string_may_be_given_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]  # a convenience


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (0, True), (1e-6, False), (2.0, False)])
def test_temperature_0_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize("field", dataclasses.fields(SamplingParams), ids=lambda field: field.name)
def test_parameters_are_immutable(field: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(SamplingParams(), field.name, None)


def test_loose_values_name_their_origin() -> None:
    values: dict[str, object] = {"max_tokens": 3, "stop": ["x"]}
    assert SamplingParams.from_mapping(values, "line 4") == SamplingParams(max_tokens=3, stop=("x",))
    with pytest.raises(InvalidRequest, match=r"unknown sampling parameter 'max_token' in line 4; did you mean 'max_tokens'\?"):
        SamplingParams.from_mapping({"max_token": 3}, "line 4")
    with pytest.raises(InvalidRequest, match=r"max_tokens=0 .*\(in line 4\)"):
        SamplingParams.from_mapping({"max_tokens": 0}, "line 4")


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]), ANYTHING, max_size=4))
def test_whatever_is_given_it_is_taken_or_refused_with_its_name(values: dict[str, Any]) -> None:
    try:
        SamplingParams.from_mapping(values, "a test")
    except InvalidRequest as error:
        assert any(re.search(rf"\b{name}\b", str(error)) for name in values)  # noqa: PT017  # either outcome will do
