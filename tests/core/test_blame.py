"""Who is named when a rule is broken: the plugin whose answer stood, be it a strategy, a wrapper, or one rule among several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from treadle import Admission, BlockSettings, KVFormat, NotBefore, Open, Request, SamplingParams, Step, hookimpl
from treadle.errors import PluginContractError, PluginError
from treadle.registry import Offer, Registry
from treadle.testing import FakeExecutor, drain_checked

PARAMS = SamplingParams(max_tokens=6)


def _breach(handle: Any) -> PluginContractError:
    error = handle.result().error
    assert isinstance(error, PluginContractError), repr(error)
    return error


class NeverRoom:
    """A strategy that finds no room for long prompts. None from a strategy is an answer: nobody stands behind it."""

    Settings = BlockSettings

    def __init__(self, settings: BlockSettings) -> None:
        pass

    @hookimpl
    def allocate(self, step: Step, request: Request, num_blocks: int) -> list[int] | None:
        if request.prompt_length > 30:
            return None
        free = [block_id for block_id in range(step.pool.num_blocks) if step.pool.is_free(block_id)]
        return free[:num_blocks] if len(free) >= num_blocks else None


@pytest.mark.parametrize("num_served_before", [0, 2])
def test_a_strategy_that_never_finds_room_is_named(
    num_served_before: int, build: Any, registry: Registry, assert_right: Any
) -> None:
    offers = [Offer("allocate", "never", "test 1.0", lambda: NeverRoom)]
    engine = build(registry=registry.with_offers(offers), allocate="never")
    others = [engine.submit([n] * 20, PARAMS) for n in range(num_served_before)]
    drain_checked(engine)
    guilty = engine.submit([7] * 40, PARAMS)
    others += [engine.submit([n] * 20, PARAMS) for n in range(2)]
    drain_checked(engine, 2000)
    assert_right(others)
    error = _breach(guilty)
    assert (error.plugin, error.hook) == ("allocate.never", "allocate")


class NobodyWaits:
    """An order that forgets whom it was told of."""

    @hookimpl
    def order(self) -> None:
        return None


def test_an_order_that_answers_nothing_at_all_is_named(build: Any, registry: Registry) -> None:
    offers = [Offer("order", "nobody", "test 1.0", lambda: NobodyWaits)]
    engine = build(registry=registry.with_offers(offers), order="nobody")
    handle = engine.submit([1, 2], PARAMS)
    drain_checked(engine, 2000)
    error = _breach(handle)
    assert (error.plugin, error.rule) == ("order.nobody", "yields at least one request while nothing runs")


class HoldBack:
    def __init__(self, tenant: str) -> None:
        self.name = tenant

    @hookimpl
    def admit(self, request: Request) -> Admission | None:
        return Admission.SKIP if request.labels.get("tenant") == self.name else None


def test_each_request_that_is_held_back_for_ever_names_the_rule_that_did(build: Any, assert_right: Any) -> None:
    engine = build(HoldBack("a"), HoldBack("b"))
    handles = {tenant: engine.submit([1, 2, 3], PARAMS, labels={"tenant": tenant}) for tenant in ("a", "b", "c")}
    drain_checked(engine, 2000)
    assert_right([handles["c"]])
    assert [_breach(handles[tenant]).plugin for tenant in ("a", "b")] == ["a", "b"]


class FailFor:
    name = "failing"

    @hookimpl
    def match_prefix(self, request: Request) -> None:
        if request.labels.get("tenant") == "b":
            raise ZeroDivisionError


def test_the_rule_that_held_back_is_named_though_another_answered_since(build: Any) -> None:
    engine = build(HoldBack("a"), FailFor())
    held, failed = (engine.submit([1] * 40, PARAMS, labels={"tenant": tenant}) for tenant in ("a", "b"))
    drain_checked(engine, 2000)
    assert _breach(held).plugin == "a"
    error = failed.result().error
    assert isinstance(error, PluginError)
    assert error.plugin == "failing"


# --- wrappers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "change"),
    [
        ("gate", lambda step, answer: Open(0)),
        ("gate", lambda step, answer: NotBefore(step.now)),
        ("gate", lambda step, answer: "open"),
        ("admit", lambda step, request, match, answer: Admission.SKIP),
        ("admit", lambda step, request, match, answer: 1),
        ("order", lambda step, answer: iter(())),
        ("order", lambda step, answer: ["nobody"]),
        ("budget", lambda step, answer: 12),
        ("match_prefix", lambda step, request, answer: [0, 0]),
        ("match_prefix", lambda step, request, answer: 5),
        ("allocate", lambda step, request, num_blocks, answer: answer[:-1]),
        ("allocate", lambda step, request, num_blocks, answer: None),
        ("release", lambda step, request, answer: "yes"),
        ("accept", lambda request, load, answer: answer is None),
    ],
)
def test_a_wrapper_that_spoils_an_answer_is_named(hook: str, change: Any, build: Any, plugin_with: Any) -> None:
    engine = build(plugin_with(hook, change, name="wrapper", wrapper=True))
    handle = engine.submit([3] * 40, PARAMS)
    drain_checked(engine, 2000)
    error = _breach(handle)
    assert (error.plugin, error.hook) == ("wrapper", hook)


@pytest.mark.parametrize("hook", ["quantize", "execute"])
def test_a_wrapper_that_spoils_a_start_is_named(hook: str, build: Any, plugin_with: Any, executor: FakeExecutor) -> None:
    with pytest.raises(PluginContractError) as raised:
        build(plugin_with(hook, lambda answer, **_: "none", name="wrapper", wrapper=True), executor=executor)
    assert (raised.value.plugin, raised.value.hook) == ("wrapper", hook)


@pytest.mark.parametrize("hook", ["gate", "admit", "match_prefix", "allocate", "release", "order", "budget"])
def test_a_wrapper_that_changes_nothing_is_not_named(hook: str, build: Any, plugin_with: Any) -> None:
    bad = plugin_with(hook, lambda **_: 12, name="culprit")
    engine = build(bad, plugin_with(hook, lambda answer, **_: answer, name="wrapper", wrapper=True))
    handle = engine.submit([3] * 40, PARAMS)
    drain_checked(engine, 2000)
    error = handle.result().error
    assert isinstance(error, PluginError)
    assert (error.plugin, error.hook) == ("culprit", hook)


class Generous:
    """Takes another's budget and doubles what it grants."""

    name = "generous"

    def __init__(self) -> None:
        self._inner: Any = None

    @property
    def may_shrink(self) -> bool:
        return bool(self._inner.may_shrink)

    @hookimpl(wrapper=True)
    def budget(self) -> Iterator[None]:
        self._inner = yield
        return self  # type: ignore[return-value]  # what pluggy sends on

    def take(self, request: Request, wanted: int) -> int:
        return 2 * int(self._inner.take(request, wanted))


def test_a_budget_put_around_another_is_named(build: Any) -> None:
    engine = build(Generous())
    handle = engine.submit([3] * 40, PARAMS)
    drain_checked(engine, 2000)
    error = _breach(handle)
    assert (error.plugin, error.rule) == ("generous", "take grants a whole number of 0 to wanted tokens")


def test_a_wrapper_may_mend_what_another_broke(build: Any, plugin_with: Any, assert_right: Any) -> None:
    bad = plugin_with("gate", lambda step: "open", name="culprit")
    engine = build(bad, plugin_with("gate", lambda answer, step: Open(), name="mender", wrapper=True))
    handle = engine.submit([3] * 40, PARAMS)
    drain_checked(engine)
    assert_right([handle])


def test_quantize_by_a_wrapper_is_what_the_engine_uses(build: Any, plugin_with: Any) -> None:
    engine = build(plugin_with("quantize", lambda answer, model: KVFormat(key_bits=8), wrapper=True))
    assert engine.info.kv_format.name == "k8vw"
