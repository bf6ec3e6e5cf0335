"""What the executor brings is checked like any other plugin's answer: the rules of `execute` that hold in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from treadle import Engine, FinishReason, Handle, SamplingParams, hookimpl
from treadle.errors import ExecutionError, PluginContractError
from treadle.plan import Outcome, StepPlan, Work
from treadle.testing import FakeExecutor, drain_checked

GUILTY = "guilty"
Change = Callable[[Work, tuple[int, ...]], Any]


class OddExecutor(FakeExecutor):
    """Brings something wrong for the guilty request, or when it is in the plan."""

    name = "odd"

    def __init__(self, *, tokens: Change | None = None, outcome: Callable[[Outcome], Any] | None = None) -> None:
        super().__init__()
        self._change = tokens
        self._outcome = outcome

    @hookimpl
    def execute(self) -> OddExecutor:
        return self

    def run(self, plan: StepPlan) -> Outcome:
        right = super().run(plan)
        if GUILTY not in [work.request_id for work in plan.works]:
            return right
        if self._outcome is not None:
            changed: Outcome = self._outcome(right)
            return changed
        assert self._change is not None
        pairs = zip(plan.works, right.tokens, strict=True)
        return replace(right, tokens=tuple(self._change(w, t) if w.request_id == GUILTY else t for w, t in pairs))


def _late(value: Any) -> Change:
    """Right at first, then wrong: tokens that came before stand."""
    return lambda work, tokens: value if work.num_output >= 3 else tokens


ONE_EACH = "a sampled work brings 1 token, and at most 1 for each drafted one"
IN_VOCABULARY = "tokens are ids of the model's vocabulary"
UNSAMPLED = "a work that is not sampled brings no token"
SHAPES = "an Outcome has an entry for each work"
RETURNS = "collect returns an Outcome"
WRONG_TOKENS: list[tuple[str, Change]] = [
    (ONE_EACH, _late(())),
    (ONE_EACH, _late((1, 2))),
    (ONE_EACH, lambda work, tokens: ()),
    (IN_VOCABULARY, _late((-1,))),
    (IN_VOCABULARY, _late((997,))),
    (IN_VOCABULARY, _late((True,))),
    (IN_VOCABULARY, _late((1.0,))),
    (IN_VOCABULARY, _late(("a",))),
    (IN_VOCABULARY, _late((None,))),
    (UNSAMPLED, lambda work, tokens: tokens if work.sampling else (1,)),
]
WRONG_OUTCOMES: list[tuple[str, Callable[[Outcome], Any]]] = [
    (RETURNS, lambda right: None),
    (RETURNS, lambda right: right.tokens),
    (SHAPES, lambda right: replace(right, tokens=right.tokens[:-1])),
    (SHAPES, lambda right: replace(right, tokens=(*right.tokens, (1,)))),
]


def _play(engine: Engine) -> tuple[Handle, list[Handle]]:
    """The guilty request among three others; its prompt is computed in two chunks."""
    others = [engine.submit(list(range(1, 30 + n)), SamplingParams(max_tokens=9 + n)) for n in range(2)]
    guilty = engine.submit(list(range(1, 71)), SamplingParams(max_tokens=12), request_id=GUILTY)
    others.append(engine.submit([5] * 20, SamplingParams(max_tokens=15)))
    drain_checked(engine, 3000)
    return guilty, others


CHUNKS = {"budget": {"strategy": "decode_first", "max_prefill_tokens": 40}}


@pytest.mark.parametrize(("rule", "change"), WRONG_TOKENS)
def test_wrong_tokens_end_their_request_only(rule: str, change: Change, build: Any, assert_right: Any, truth: Any) -> None:
    guilty, others = _play(build(executor=OddExecutor(tokens=change), **CHUNKS))
    assert_right(others)
    done = guilty.result()
    assert isinstance(done.error, PluginContractError)
    assert (done.error.plugin, done.error.hook, done.error.rule) == ("odd", "execute", rule)
    assert done.token_ids == truth(guilty)[: len(done.token_ids)], "what came before the breach stands"


@pytest.mark.parametrize(("rule", "change"), WRONG_OUTCOMES)
def test_a_wrong_outcome_ends_the_request_that_brings_it(
    rule: str, change: Callable[[Outcome], Any], build: Any, assert_right: Any
) -> None:
    guilty, others = _play(build(executor=OddExecutor(outcome=change), **CHUNKS))
    assert_right(others)
    error = guilty.result().error
    assert isinstance(error, PluginContractError)
    assert (error.plugin, error.hook, error.rule) == ("odd", "execute", rule)


@pytest.mark.parametrize("tokens", [None, 5])
def test_an_entry_that_is_no_sequence_is_a_breach_too(tokens: Any, build: Any, assert_right: Any) -> None:
    guilty, others = _play(build(executor=OddExecutor(tokens=_late(tokens))))
    assert_right(others)
    assert isinstance(guilty.result().error, PluginContractError)


def test_the_executors_own_word_for_a_failed_work_is_told(build: Any, assert_right: Any) -> None:
    def failed(right: Outcome) -> Outcome:
        return replace(right, errors={len(right.tokens) - 1: "not a number in layer 3"})

    engine = build(executor=OddExecutor(outcome=failed))
    others = [engine.submit([5] * 20, SamplingParams(max_tokens=15))]
    engine.step()
    guilty = engine.submit([7] * 20, SamplingParams(max_tokens=15), request_id=GUILTY)
    drain_checked(engine)
    assert_right(others)
    assert guilty.result().finish_reason is FinishReason.ERROR
    with pytest.raises(ExecutionError, match="guilty: not a number in layer 3"):
        guilty.result().raise_for_error()


def test_drafted_tokens_may_bring_fewer_or_as_many_tokens(build: Any, assert_right: Any, plugin_with: Any) -> None:
    def propose(step: object, requests: Any, most: Sequence[int]) -> list[list[int]]:
        return [[1, 2][:limit] for limit in most]

    _, others = _play(build(plugin_with("propose", propose)))
    assert_right(others)
