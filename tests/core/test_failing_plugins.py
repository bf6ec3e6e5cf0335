"""Plugins that raise instead of answering, and answers that cannot be read: the plugin is named, the others go on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from treadle import Engine, Handle, NotBefore, Open, Request, SamplingParams, Step, hookimpl
from treadle.errors import ConfigError, InvalidRequest, ModelError, PluginError, Refused
from treadle.hookspecs import Hooks
from treadle.testing import FakeExecutor, drain_checked

GUILTY = "guilty"
ABOUT_ONE = ("accept", "admit", "match_prefix", "allocate", "release")


def _boom(**_: Any) -> Any:
    raise ZeroDivisionError("a mistake of the plugin")


def _contend(engine: Engine) -> tuple[Handle, list[Handle]]:
    """The guilty request grows first and longest, among others that grow as well, until no block is left."""
    guilty = engine.submit([8] * 20, SamplingParams(max_tokens=160), request_id=GUILTY)
    others = [engine.submit([n] * 25, SamplingParams(max_tokens=60 + n)) for n in range(5)]
    drain_checked(engine, 5000)
    return guilty, others


def _play(engine: Engine) -> tuple[Handle, list[Handle]]:
    """Some run when the guilty request comes, some arrive with it, some afterwards."""
    handles = [engine.submit([50 + n] * (41 + 4 * n), SamplingParams(max_tokens=14 + n)) for n in range(3)]
    for _ in range(3):
        engine.step()
        engine.check_integrity()
    handles.append(engine.submit([7] * 43, SamplingParams(max_tokens=12)))
    guilty = engine.submit([8] * 72, SamplingParams(max_tokens=40), request_id=GUILTY)
    handles.append(engine.submit([9] * 20, SamplingParams(max_tokens=9)))
    drain_checked(engine, 5000)
    handles += [engine.submit([n] * 30, SamplingParams(max_tokens=5)) for n in range(2)]
    drain_checked(engine, 5000)
    return guilty, handles


def _for_guilty(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **given: function(**given) if given["request"].id == GUILTY else given.get("answer")


@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.parametrize("hook", [*ABOUT_ONE, "preempt"])
def test_a_plugin_that_raises_about_one_request_ends_that_request(
    hook: str, wrapper: bool, build: Any, plugin_with: Any, assert_right: Any
) -> None:
    plugin = plugin_with(hook, _for_guilty(_boom), wrapper=wrapper)
    guilty, others = _contend(build(plugin, num_blocks=13)) if hook == "preempt" else _play(build(plugin))
    assert_right(others)
    error = guilty.result().error
    assert isinstance(error, PluginError), repr(error)
    assert (error.plugin, error.hook) == ("culprit", hook)
    assert "ZeroDivisionError: a mistake of the plugin" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("kind", [ConfigError, ModelError, InvalidRequest, Refused])
@pytest.mark.parametrize("hook", ["admit", "match_prefix", "allocate", "release"])
def test_an_error_of_treadles_own_kinds_is_the_plugins_all_the_same(
    hook: str, kind: type[Exception], build: Any, plugin_with: Any, assert_right: Any
) -> None:
    def raises(**_: Any) -> Any:
        raise kind("nothing for you")

    guilty, others = _play(build(plugin_with(hook, _for_guilty(raises))))
    assert_right(others)
    error = guilty.result().error
    assert isinstance(error, PluginError), repr(error)
    assert (error.plugin, error.hook) == ("culprit", hook)


@pytest.mark.parametrize("kind", [ConfigError, ModelError])
def test_an_accept_rule_that_raises_an_error_of_treadles_own_ends_its_request_only(
    kind: type[Exception], build: Any, plugin_with: Any, assert_right: Any
) -> None:
    def raises(**_: Any) -> Any:
        raise kind("nothing for you")

    guilty, others = _play(build(plugin_with("accept", _for_guilty(raises))))
    assert_right(others)
    assert guilty.result().error is not None


def _lazily_failing(**_: Any) -> Iterator[int]:
    yield 1
    raise ZeroDivisionError("a mistake of the plugin")


@pytest.mark.parametrize("hook", ["match_prefix", "allocate"])
def test_an_answer_that_fails_while_it_is_read_is_the_plugins(hook: str, build: Any, plugin_with: Any, assert_right: Any) -> None:
    guilty, others = _play(build(plugin_with(hook, _for_guilty(_lazily_failing))))
    assert_right(others)
    error = guilty.result().error
    assert isinstance(error, PluginError), repr(error)
    assert (error.plugin, error.hook) == ("culprit", hook)


class Once:
    """Raises once, when the guilty request waits; whoever waits shares its fate, whoever runs does not."""

    name = "culprit"

    def __init__(self) -> None:
        self.armed = False

    @hookimpl
    def request_queued(self, request: Request) -> None:
        self.armed = self.armed or request.id == GUILTY

    @hookimpl
    def request_finished(self, request: Request) -> None:
        self.armed = self.armed and request.id != GUILTY


class OnceInOrder(Once):
    @hookimpl
    def order(self) -> Any:
        return _boom() if self.armed else None


class OnceWhileRead(Once):
    @hookimpl
    def order(self) -> Any:
        return (_boom() for _ in range(3)) if self.armed else None


class OnceInGate(Once):
    @hookimpl
    def gate(self) -> Any:
        return _boom() if self.armed else None


class OnceWithoutTime(Once):
    """An answer of the right kind, with nonsense in it."""

    @hookimpl
    def gate(self) -> Any:
        return NotBefore(None) if self.armed else None  # type: ignore[arg-type]


class OnceNegative(Once):
    @hookimpl
    def gate(self) -> Any:
        return Open(-1) if self.armed else None


class OnceInBudget(Once):
    @hookimpl
    def budget(self) -> Any:
        return _boom() if self.armed else None


@pytest.mark.parametrize(
    ("make", "hook"),
    [
        (OnceInOrder, "order"),
        (OnceWhileRead, "order"),
        (OnceInGate, "gate"),
        (OnceWithoutTime, "gate"),
        (OnceNegative, "gate"),
        (OnceInBudget, "budget"),
    ],
)
def test_a_plugin_that_raises_about_all_is_named_and_later_requests_are_served(
    make: type[Once], hook: str, build: Any, assert_right: Any
) -> None:
    guilty, others = _play(build(make()))
    error = guilty.result().error
    assert isinstance(error, PluginError), repr(error)
    assert (error.plugin, error.hook) == ("culprit", hook)
    running, waiting, late = others[:3], others[3:5], others[5:]
    assert [handle.result().error for handle in waiting] == [error] * 2
    if hook == "budget":
        assert [handle.result().error for handle in running] == [error] * 3
        assert_right(late)
    else:
        assert_right(running + late)


class Take:
    name = "culprit"
    may_shrink = True

    @hookimpl
    def budget(self) -> Take:
        return self

    def take(self, request: Request, wanted: int) -> int:
        return _boom() if request.id == GUILTY else wanted


class Unreadable:
    name = "culprit"

    @property
    def may_shrink(self) -> bool:
        raise ZeroDivisionError("a mistake of the plugin")

    def take(self, request: Request, wanted: int) -> int:
        return wanted

    @hookimpl
    def budget(self) -> Unreadable:
        return self


def test_a_budget_that_cannot_be_read_is_the_plugins(build: Any) -> None:
    engine = build(Unreadable(), num_blocks=8)
    handles = [engine.submit([n] * 60, SamplingParams(max_tokens=20)) for n in range(3)]
    drain_checked(engine)
    errors = [handle.result().error for handle in handles]
    assert any(isinstance(error, PluginError) and error.hook == "budget" for error in errors), errors


def test_a_budget_that_raises_about_one_request_ends_that_request(build: Any, assert_right: Any) -> None:
    guilty, others = _play(build(Take()))
    assert_right(others)
    error = guilty.result().error
    assert isinstance(error, PluginError)
    assert (error.plugin, error.hook) == ("culprit", "budget")


class Evict:
    name = "culprit"

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer
        self._asking = ""

    @hookimpl
    def allocate(self, step: Step, request: Request) -> None:
        self._asking = request.id

    @hookimpl
    def evict(self) -> Any:
        return self._answer() if self._asking == GUILTY else None


@pytest.mark.parametrize("answer", [_boom, _lazily_failing])
def test_an_evict_rule_that_raises_ends_the_request_that_needs_room(
    answer: Callable[..., Any], build: Any, assert_right: Any
) -> None:
    guilty, others = _play(build(Evict(answer), num_blocks=10))
    assert_right(others)
    error = guilty.result().error
    assert isinstance(error, PluginError)
    assert (error.plugin, error.hook) == ("culprit", "evict")


@pytest.mark.parametrize("hook", ["quantize", "execute"])
def test_a_plugin_that_raises_at_start_up_is_named(hook: str, build: Any, plugin_with: Any, executor: FakeExecutor) -> None:
    with pytest.raises(PluginError, match="ZeroDivisionError") as raised:
        build(plugin_with(hook, _boom), executor=executor)
    assert (raised.value.plugin, raised.value.hook) == ("culprit", hook)
    assert executor.closed == (hook == "quantize")


def test_every_decision_is_tried_here() -> None:
    """`propose` is tried in test_engine_decoding.py."""
    decisions = {
        name for name, spec in vars(Hooks).items() if inspect.isfunction(spec) and spec.__annotations__["return"] != "None"
    }
    assert decisions == {*ABOUT_ONE, "preempt", "propose", "order", "gate", "budget", "evict", "quantize", "execute"}
