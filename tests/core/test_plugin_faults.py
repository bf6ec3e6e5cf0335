"""Plugins that would be silent, or fail in every step: refused when the stack is built, by name, with what to change."""

from __future__ import annotations

import types
from collections.abc import Generator, Iterator
from functools import wraps
from typing import Any

import pluggy
import pytest

from treadle import Engine, Open, Request, SamplingParams, Step, hookimpl
from treadle.errors import ConfigError, EngineStopped, PluginError
from treadle.registry import Registry
from treadle.testing import FakeExecutor, drain_checked, make_engine


def refused(plugin: object, registry: Registry, **options: Any) -> str:
    """What is said when an engine is to be made with the plugin; nothing was computed."""
    executor = FakeExecutor()
    with pytest.raises(ConfigError) as raised:
        make_engine(plugin, executor=executor, registry=registry, **options)
    assert not executor.plans
    return str(raised.value)


class Good:
    @hookimpl
    def gate(self) -> None:
        """Pass on."""


# --- what is no plugin ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        (["telemetry"], r"'telemetry' among the plugins is a str.*plugins = \["),
        ("telemetry", r"plugins='telemetry' is not a list of plugins"),
        (Good(), "is not a list of plugins"),
        ([None], "None among the plugins is a NoneType"),
        ([{"plugin": "telemetry"}], "is a dict, not an object with hooks"),
        ([Good], r"Good of added by the program is a class, not a plugin; hand over an object of it: Good\(\)"),
        ([object()], "object of added by the program implements no hook"),
    ],
)
def test_what_is_no_plugin_is_refused(plugins: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine.load(plugins=plugins, execute="simulated")


def test_a_configured_plugin_without_hooks_is_refused(offered: Any, build: Any) -> None:
    class Idle:
        """Does nothing."""

    with pytest.raises(ConfigError, match=r"plugin\.idle of test 1\.0 implements no hook, so it does nothing"):
        build(registry=offered(plugin_idle=Idle), values={"plugins": ["idle"]})


def test_a_module_is_a_plugin_too(build: Any) -> None:
    module = types.ModuleType("loom_rules")
    asked: list[int] = []

    def gate(step: Step) -> None:
        asked.append(step.number)

    module.gate = hookimpl(gate)  # type: ignore[attr-defined]  # as a module has its functions
    engine = build(module)
    engine.submit([1], SamplingParams(max_tokens=1))
    drain_checked(engine)
    assert asked == [1]
    assert "loom_rules" in [item.name for item in engine.manager.registered]


# --- methods that would never be called -----------------------------------------------------------------------------------------


class Unmarked(Good):
    def admit(self, request: Request) -> None:
        pass


class UnmarkedStatic(Good):
    @staticmethod
    def admit(request: Request) -> None:
        pass


class OtherMark(Good):
    @pluggy.HookimplMarker("pytest")
    def admit(self, request: Request) -> None:
        pass


class Assigned(Good):
    def __init__(self) -> None:
        self.admit = lambda request: None


@pytest.mark.parametrize("make", [Unmarked, UnmarkedStatic, OtherMark, Assigned])
def test_a_method_named_like_a_hook_but_unmarked_is_refused(make: type, registry: Registry) -> None:
    text = refused(make(), registry)
    assert f"{make.__name__} of added by the program has a method 'admit'" in text
    assert "not marked @treadle.hookimpl" in text
    assert "call it _admit" in text


def test_a_strategy_whose_only_hook_is_unmarked_is_told_so(offered: Any) -> None:
    class Mine:
        def admit(self, request: Request) -> None:
            pass

    text = refused(Good(), offered(admit_mine=Mine), admit="mine")
    assert "admit.mine of test 1.0 has a method 'admit'" in text


def test_helpers_and_data_may_be_called_as_they_like(build: Any) -> None:
    class Helped(Good):
        budget = 3

        def __init__(self) -> None:
            self.order: list[int] = []

        @property
        def evict(self) -> int:
            raise AssertionError("no property is read")

        def _admit(self) -> None:
            pass

    build(Helped())


class MarkAboveStatic(Good):
    @hookimpl
    @staticmethod
    def admit(request: Request) -> None:
        pass


class Passing:
    def __call__(self, request: Request) -> None:
        pass


class MarkedObject(Good):
    admit = hookimpl(Passing())


@pytest.mark.parametrize("make", [MarkAboveStatic, MarkedObject])
def test_a_mark_that_is_not_on_a_function_is_refused(make: Any, registry: Registry) -> None:
    assert "'admit' is marked @treadle.hookimpl, but is no plain function" in refused(make(), registry)


# --- functions that cannot work -------------------------------------------------------------------------------------------------


class Yields:
    @hookimpl
    def gate(self) -> Any:
        yield


class YieldsWhenTold:
    @hookimpl
    def request_queued(self) -> Any:
        yield


class YieldsBlocks:
    @hookimpl
    def evict(self) -> Iterator[int]:
        yield 1


class Async:
    @hookimpl
    async def gate(self) -> None:
        pass


class OldWrapper:
    @hookimpl(hookwrapper=True)
    def gate(self) -> Any:
        yield


class Defaulted:
    @hookimpl
    def gate(self, step: object = None) -> None:
        pass


class Keywords:
    @hookimpl
    def gate(self, **given: object) -> None:
        pass


class KeywordOnly:
    @hookimpl
    def gate(self, *, step: object) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Yields, "'gate' yields; write hookimpl(wrapper=True)"),
        (YieldsWhenTold, "'request_queued' yields; write hookimpl(wrapper=True)"),
        (YieldsBlocks, "'evict' yields"),
        (Async, "'gate' is async"),
        (OldWrapper, "'gate' is a wrapper of the old kind"),
        (Defaulted, "the argument 'step' of 'gate' would never be passed; take some of step"),
        (Keywords, "would never be passed"),
        (KeywordOnly, "would never be passed"),
    ],
)
def test_a_function_that_cannot_work_is_refused(make: type, words: str, registry: Registry) -> None:
    text = refused(make(), registry)
    assert text.startswith(f"{make.__name__} of added by the program")
    assert words in text


def test_an_order_may_be_a_generator(build: Any) -> None:
    class Ordered:
        waiting: dict[str, Request]

        def __init__(self) -> None:
            self.waiting = {}

        @hookimpl
        def request_queued(self, request: Request) -> None:
            self.waiting[request.id] = request

        @hookimpl
        def request_admitted(self, request: Request) -> None:
            del self.waiting[request.id]

        @hookimpl
        def order(self) -> Iterator[Request]:
            yield from list(self.waiting.values())

    engine = build(Ordered())
    handle = engine.submit([1], SamplingParams(max_tokens=2))
    drain_checked(engine)
    assert handle.result().error is None


def test_a_decorated_method_takes_the_arguments_of_what_it_decorates(build: Any) -> None:
    def loudly(function: Any) -> Any:
        @wraps(function)
        def around(*arguments: Any) -> Any:
            return function(*arguments)

        return around

    class Decorated:
        seen = 0

        @hookimpl
        @loudly
        def gate(self, step: Step) -> Open:
            self.seen = step.number
            return Open()

    plugin = Decorated()
    engine = build(plugin)
    engine.submit([1], SamplingParams(max_tokens=1))
    drain_checked(engine)
    assert plugin.seen == 1


# --- wrappers -------------------------------------------------------------------------------------------------------------------


class Twice:
    @hookimpl(wrapper=True)
    def gate(self) -> Generator[None, Any, Any]:
        answer = yield
        yield
        return answer


class Never:
    @hookimpl(wrapper=True)
    def gate(self) -> Generator[None, Any, Any]:
        if self is None:
            yield
        return Open()


class TwiceForOne:
    @hookimpl(wrapper=True)
    def admit(self, request: Request) -> Generator[None, Any, Any]:
        answer = yield
        if request.id == "guilty":
            yield
        return answer


@pytest.mark.parametrize(("make", "words"), [(Twice, "yielded again"), (Never, "did not yield")])
def test_a_decide_wrapper_that_does_not_yield_once_is_named(make: type, words: str, build: Any) -> None:
    engine = build(make())
    handle = engine.submit([1], SamplingParams(max_tokens=1))
    drain_checked(engine)
    error = handle.result().error
    assert isinstance(error, PluginError)
    assert (error.plugin, error.hook) == (make.__name__, "gate")
    assert words in str(error)


def test_a_wrapper_that_yields_twice_about_one_request_ends_that_request(build: Any, assert_right: Any) -> None:
    engine = build(TwiceForOne())
    guilty = engine.submit([1], SamplingParams(max_tokens=3), request_id="guilty")
    other = engine.submit([2], SamplingParams(max_tokens=3))
    drain_checked(engine)
    assert "yielded again" in str(guilty.result().error)
    assert_right([other])


class TellsTwice:
    @hookimpl(wrapper=True)
    def request_queued(self) -> Generator[None, Any, Any]:
        yield
        yield


class TellsNever:
    @hookimpl(wrapper=True)
    def request_queued(self) -> Generator[None, Any, Any]:
        if self is None:
            yield


@pytest.mark.parametrize(("make", "words"), [(TellsTwice, "yielded again"), (TellsNever, "did not yield")])
def test_a_tell_wrapper_that_does_not_yield_once_stops_the_engine_by_name(make: type, words: str, build: Any) -> None:
    heard: list[str] = []

    class Hears:
        @hookimpl
        def request_queued(self, request: Request) -> None:
            heard.append(request.id)

    engine = build(Hears(), make())
    handle = engine.submit([1], SamplingParams(max_tokens=3), request_id="a")
    engine.drain()
    error = handle.result(1).error
    assert isinstance(error, PluginError)
    assert (error.plugin, error.hook) == (make.__name__, "request_queued")
    assert words in str(error)
    with pytest.raises(EngineStopped):
        engine.step()
    assert heard == ["a"], "the others are told nonetheless"


def test_a_wrapper_sees_what_is_raised_behind_it_and_may_answer_instead(build: Any, plugin_with: Any, assert_right: Any) -> None:
    class Catches:
        @hookimpl(wrapper=True)
        def gate(self) -> Generator[None, Any, Any]:
            try:
                return (yield)
            except PluginError:
                return Open()

    def boom(step: Step) -> None:
        raise ZeroDivisionError

    engine = build(plugin_with("gate", boom), Catches())
    handle = engine.submit([1], SamplingParams(max_tokens=1))
    drain_checked(engine)
    assert_right([handle])
