"""Plugins that fail when they are told something: the books and all other plugins stay right, the engine ends with a name."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from treadle import Engine, FinishReason, Handle, Phase, SamplingParams, hookimpl
from treadle.blocks import IntegrityError
from treadle.errors import EngineStopped, PluginContractError, PluginError
from treadle.hookspecs import Hooks
from treadle.testing import FakeExecutor, drain_checked

TELLS = [
    name
    for name, spec in vars(Hooks).items()
    if inspect.isfunction(spec) and spec.__annotations__["return"] == "None" and not name.startswith("register_")
]
RARE = {"swap_released", "integrity_broken"}
"""Told only when a request ends while it is swapped out, and when the books are wrong."""
IN_A_STEP = [name for name in TELLS if name not in {"engine_started", "engine_stopped", *RARE}]


FEW = {"strategy": "continuous", "max_batch_size": 4}


def _listener(name: str) -> Any:
    """A plugin that counts what it is told, `queued`, `finished` and all others."""
    told: Counter[str] = Counter()

    def hears(hook: str) -> Callable[[object], None]:
        def method(self: object) -> None:
            told[hook] += 1

        return hookimpl(method)

    methods: dict[str, Any] = {hook: hears(hook) for hook in TELLS}
    return type("Listener", (), {"name": name, "told": told, **methods})()


def _failing(**_: Any) -> Any:
    raise ZeroDivisionError("a mistake of the plugin")


def _chatty(**_: Any) -> Any:
    return "thanks"


@pytest.fixture
def busy(build: Any) -> Callable[..., tuple[Engine, list[Handle]]]:
    """An engine with so few blocks that every kind of event occurs: sharing, eviction, swapping, resumption, a refusal."""

    def make(*plugins: object) -> tuple[Engine, list[Handle]]:
        engine = build(*plugins, num_blocks=12, executor=FakeExecutor(num_swap_blocks=9), preempt="swap", admit=FEW)

        common = list(range(1, 41))
        prompts = [[*common, n] for n in range(3)] + [[n] * (20 + 9 * n) for n in range(4)]
        prompts.insert(6, [*common, 9])
        handles = [engine.submit(p, SamplingParams(max_tokens=18 + 5 * n)) for n, p in enumerate(prompts)]
        engine.submit([1] * 400)  # larger than the pool
        return engine, handles

    return make


def _drain_until_it_fails(engine: Engine) -> None:
    for _ in range(5000):
        if not engine.busy:
            break
        engine.step()
        engine.check_integrity()
    with pytest.raises(EngineStopped, match="culprit"):
        engine.step()


def test_every_event_occurs(busy: Any, assert_right: Any) -> None:
    listener = _listener("listener")
    engine, handles = busy(listener)
    drain_checked(engine, 5000)
    assert_right(handles)
    engine.close()
    assert {hook for hook in TELLS if listener.told[hook]} == set(TELLS) - RARE


def test_swap_space_that_is_given_up_is_told(busy: Any) -> None:
    listener = _listener("listener")
    engine, handles = busy(listener)
    while not listener.told["blocks_swapped_out"]:
        engine.step()
    assert not listener.told["swap_released"]
    for handle in handles:
        handle.cancel()
    engine.step()
    assert listener.told["swap_released"]


def test_books_that_contradict_themselves_are_told_and_what_plugins_know_is_in_the_error(build: Any) -> None:
    class Knows:
        @hookimpl
        def integrity_broken(self, error: IntegrityError) -> None:
            error.attach("block 3 was last given to r7")

    engine = build(Knows())
    engine.kv_cache.pool.take([3])
    with pytest.raises(IntegrityError, match=r"block 3: count 1, held by 0\nblock 3 was last given to r7"):
        engine.check_integrity()
    engine.submit([1, 2, 3], SamplingParams(max_tokens=1))
    with pytest.raises(IntegrityError, match="no request is left, and 1 blocks of the pool"):
        engine.step()
    engine.kv_cache.pool.drop([3])


@pytest.mark.parametrize("wrapper", [False, True], ids=["plain", "wrapper"])
@pytest.mark.parametrize("hook", IN_A_STEP)
def test_a_plugin_that_fails_when_told_stops_the_engine_in_order(
    hook: str, wrapper: bool, busy: Any, plugin_with: Any, truth: Any
) -> None:
    first, last = _listener("first"), _listener("last")
    engine, handles = busy(first, plugin_with(hook, _failing, wrapper=wrapper), last)
    _drain_until_it_fails(engine)

    assert first.told == last.told, "every other plugin was told all the same"
    assert first.told[hook] >= 1
    assert engine.kv_cache.pool.num_used == 0
    failed = [handle for handle in handles if handle.result().error is not None]
    for handle in handles:
        completion = handle.result()
        assert completion.token_ids == truth(handle)[: len(completion.token_ids)]
        if handle not in failed:
            assert completion.token_ids == truth(handle)
            continue
        assert completion.finish_reason is FinishReason.ERROR
        error = completion.error
        assert isinstance(error, PluginError)
        assert (error.plugin, error.hook) == ("culprit", hook)
        assert "ZeroDivisionError: a mistake of the plugin" in str(error)
    assert failed
    with pytest.raises(EngineStopped, match="culprit"):
        engine.submit([1, 2, 3])
    engine.close()
    assert first.told["engine_stopped"] == last.told["engine_stopped"] == 1
    assert first.told["request_finished"] == first.told["request_queued"] == len(handles)


@pytest.mark.parametrize("hook", IN_A_STEP)
def test_a_plugin_that_answers_when_told_breaks_a_rule(hook: str, busy: Any, plugin_with: Any) -> None:
    engine, handles = busy(plugin_with(hook, _chatty))
    _drain_until_it_fails(engine)
    errors = [handle.result().error for handle in handles if handle.result().error is not None]
    assert errors
    for error in errors:
        assert isinstance(error, PluginContractError)
        assert (error.plugin, error.hook, error.rule) == ("culprit", hook, "returns nothing")
        assert "thanks" in str(error)


@pytest.mark.parametrize("function", [_failing, _chatty])
def test_a_plugin_that_fails_when_the_engine_starts_is_named_and_nothing_is_left_open(
    function: Callable[..., Any], build: Any, plugin_with: Any, executor: FakeExecutor
) -> None:
    listener = _listener("listener")
    with pytest.raises(PluginError) as raised:
        build(listener, plugin_with("engine_started", function), executor=executor)
    assert (raised.value.plugin, raised.value.hook) == ("culprit", "engine_started")
    assert executor.closed
    assert listener.told["engine_started"] == 1


@pytest.mark.parametrize("wrapper", [False, True])
def test_a_plugin_that_fails_when_the_engine_stops_keeps_nothing_open(
    wrapper: bool, build: Any, plugin_with: Any, executor: FakeExecutor
) -> None:
    first, last = _listener("first"), _listener("last")
    engine = build(first, plugin_with("engine_stopped", _failing, wrapper=wrapper), last, executor=executor)
    engine.close()
    assert executor.closed
    assert first.told["engine_stopped"] == last.told["engine_stopped"] == 1


def test_a_failure_in_a_thread_ends_every_wait(build: Any, plugin_with: Any) -> None:
    engine = build(plugin_with("request_preempted", _failing), num_blocks=6)
    engine.start()
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=40)) for n in range(4)]
    errors = [handle.result(30).error for handle in handles]
    assert any(isinstance(error, PluginError) and error.hook == "request_preempted" for error in errors)
    assert all(handle.request.phase is Phase.FINISHED for handle in handles)
    with pytest.raises(EngineStopped):
        engine.submit([1])
