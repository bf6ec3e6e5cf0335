"""What the plugin manager refuses when the stack is built, and what it says then."""

from __future__ import annotations

from typing import Any

import pytest

from treadle import BlockSettings, KVFormat, SamplingParams, StrategySettings, hookimpl
from treadle.errors import ConfigError
from treadle.registry import Registry, Slot
from treadle.testing import FakeExecutor, drain_checked, make_engine


def _refused(match: str, *plugins: object, **options: Any) -> None:
    executor = FakeExecutor()
    with pytest.raises(ConfigError, match=match):
        make_engine(*plugins, executor=executor, **options)
    assert not executor.plans


def test_a_misspelled_hook_suggests_the_nearest(registry: Registry) -> None:
    class Typo:
        @hookimpl
        def request_admited(self) -> None:
            pass

    _refused(r"Typo .*unknown hook 'request_admited'; did you mean 'request_admitted'\?", Typo(), registry=registry)


def test_an_optional_hook_may_be_unknown(build: Any) -> None:
    class Optional:
        @hookimpl(optionalhook=True)
        def attention(self, spec: object) -> None:
            pass

    build(Optional())


def test_a_wrong_argument_is_named(registry: Registry) -> None:
    class Wrong:
        @hookimpl
        def admit(self, step: object, req: object) -> None:
            pass

    _refused(r"Wrong .*asks the hook 'admit' for an argument 'req' .*did you mean 'request'\?", Wrong(), registry=registry)


def test_a_wrapper_that_yields_nothing_is_refused(registry: Registry) -> None:
    class Plain:
        @hookimpl(wrapper=True)
        def gate(self) -> None:
            pass

    _refused("Plain .*cannot be registered", Plain(), registry=registry)


def test_another_hook_version_is_refused(registry: Registry) -> None:
    class Old:
        treadle_hooks = 0

        @hookimpl
        def gate(self) -> None:
            pass

    _refused(
        r"Old .*hook version 0, this is 2\. No hook that it implements has changed: .*treadle_hooks = 2", Old(), registry=registry
    )


def test_the_same_name_twice_is_refused_in_one_line(registry: Registry, plugin_with: Any) -> None:
    plugin, other = (plugin_with("gate", lambda step: None, name="A") for _ in range(2))
    with pytest.raises(ConfigError, match=r"two plugins are called") as raised:
        make_engine(plugin, other, registry=registry)
    assert len(str(raised.value)) < 300


def test_a_strategy_without_its_slots_hook_is_refused(offered: Any) -> None:
    class Wrong:
        @hookimpl
        def accept(self) -> None:
            pass

    _refused(
        r"admit\.wrong of test 1\.0 \(from arguments\) implements no hook of its slot: gate, admit",
        registry=offered(admit_wrong=Wrong),
        admit="wrong",
    )


def test_a_constructor_that_fails_is_named(offered: Any) -> None:
    class Fails:
        def __init__(self) -> None:
            raise ZeroDivisionError("no")

        @hookimpl
        def gate(self) -> None:
            pass

    _refused(r"admit\.fails cannot be made: ZeroDivisionError: no", registry=offered(admit_fails=Fails), admit="fails")


def test_settings_of_another_kind_are_refused(offered: Any) -> None:
    class Odd:
        Settings = dict

        @hookimpl
        def gate(self) -> None:
            pass

    _refused(r"admit\.odd .*derive from treadle\.StrategySettings", registry=offered(admit_odd=Odd), admit="odd")


def test_an_allocation_without_block_settings_is_refused(offered: Any) -> None:
    class OddSettings(StrategySettings):
        block_size: int = 16

    class Odd:
        Settings = OddSettings

        def __init__(self, settings: OddSettings) -> None:
            pass

        @hookimpl
        def allocate(self) -> None:
            pass

    _refused(r"allocate\.odd of .*derive from treadle\.BlockSettings", registry=offered(allocate_odd=Odd), allocate="odd")


# --- traits ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["hash_chain", "radix"])
def test_contiguous_goes_with_no_prefix_reuse(prefix: str, registry: Registry, build: Any) -> None:
    _refused(
        rf"allocate\.contiguous does not go together with prefix\.{prefix} \(from arguments\): .*set prefix\.strategy to 'none'",
        registry=registry, allocate="contiguous", prefix=prefix,
    )  # fmt: skip
    build(allocate="contiguous", prefix="none")


def test_a_strangers_match_counts_as_reuse_unless_it_says_otherwise(build: Any, registry: Registry, plugin_with: Any) -> None:
    matching = plugin_with("match_prefix", lambda step, request: None, name="matching")
    _refused("does not go together with matching", matching, registry=registry, allocate="contiguous", prefix="none")
    harmless = plugin_with("match_prefix", lambda step, request: None, name="harmless")
    type(harmless).traits = ()
    build(harmless, allocate="contiguous", prefix="none")


@pytest.mark.parametrize(
    ("options", "trait"),
    [
        ({}, "prefix_reuse"),
        ({"prefix": "none"}, "chunked_prefill"),
        ({"prefix": "none", "budget": "whole_prompt"}, "recompute"),
    ],
)
def test_a_format_that_depends_on_history_is_refused_together_with(
    options: dict[str, Any], trait: str, registry: Registry, plugin_with: Any
) -> None:
    plugin = plugin_with("quantize", lambda model: KVFormat(key_bits=4, history_dependent=True))
    _refused(f"'k4vw' depends on the history .*{trait}", plugin, registry=registry, **options)


def test_a_format_that_depends_on_history_runs_without_them(build: Any, plugin_with: Any, assert_right: Any) -> None:
    plugin = plugin_with("quantize", lambda model: KVFormat(key_bits=4, history_dependent=True))
    engine = build(plugin, prefix="none", budget="whole_prompt", preempt="none")
    handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=3))
    drain_checked(engine)
    assert_right([handle])


def test_the_executor_is_closed_when_the_rest_cannot_be_built(registry: Registry, plugin_with: Any) -> None:
    executor = FakeExecutor()
    plugin = plugin_with("quantize", lambda model: KVFormat(key_bits=4, history_dependent=True))
    with pytest.raises(ConfigError):
        make_engine(plugin, executor=executor, registry=registry)
    assert executor.closed


def test_a_slot_whose_hook_the_executor_does_not_bring_is_explained(build: Any, registry: Registry, offered: Any) -> None:
    simulated = registry.find("execute", "simulated", "the test").load()
    careless = type("Careless", (simulated,), {"slots": (Slot("attention", ("attention",), "auto"),)})
    engine = build(registry=offered(execute_careless=careless), values={"execute": "careless"})
    unused = {item.name: item.unused for item in engine.manager.registered if item.unused}
    assert unused == {"attention.auto": "the executor execute.careless has no hook attention"}
    assert not any(item.unused for item in build().manager.registered)


def test_block_size_comes_from_the_allocation(build: Any) -> None:
    assert build(block_size=32).info.block_size == 32
    assert BlockSettings().block_size == 64
