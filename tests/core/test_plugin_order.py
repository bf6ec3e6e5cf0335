"""The stack: who is in it, and who is asked before whom."""

from __future__ import annotations

from typing import Any

import pytest

from treadle import Accept, Engine, Open, SamplingParams, StrategySettings, hookimpl
from treadle.plugin_manager import PluginManager
from treadle.registry import Offer, Registry
from treadle.settings import load
from treadle.testing import drain_checked


def _order(engine: Engine, hook: str) -> list[str]:
    return dict(engine.manager.callers())[hook]


def _gate(name: str, asked: list[str] | None = None, **more: Any) -> type:
    """A class of plugins that are asked `gate`, pass it on and note that they were asked."""

    def gate(self: object) -> None:
        if asked is not None:
            asked.append(name)

    def gate_around(self: object) -> Any:
        if asked is not None:
            asked.append(name)
        return (yield)

    wrapper = more.pop("wrapper", False)
    return type(name, (), {"gate": hookimpl(wrapper=wrapper, **more)(gate_around if wrapper else gate), "name": name})


def test_strangers_are_asked_before_built_ins_and_the_last_comes_first(build: Any, offered: Any) -> None:
    asked: list[str] = []
    known = offered(plugin_a=_gate("A", asked), plugin_b=_gate("B", asked))
    engine = build(_gate("C", asked)(), _gate("D", asked)(), registry=known, values={"plugins": ["a", "b"]})
    engine.submit([1], SamplingParams(max_tokens=1))
    drain_checked(engine)
    assert asked == ["D", "C", "B", "A"]
    assert _order(engine, "gate") == ["D", "C", "plugin.b", "plugin.a", "admit.continuous"]


def test_the_order_of_the_plugins_list_is_the_users(build: Any, offered: Any) -> None:
    known = offered(plugin_a=_gate("A"), plugin_b=_gate("B"))
    assert _order(build(registry=known, values={"plugins": ["b", "a"]}), "gate")[:2] == ["plugin.a", "plugin.b"]


def test_the_first_answer_stands_and_nobody_behind_it_is_asked(build: Any, plugin_with: Any) -> None:
    asked: list[str] = []
    first = plugin_with("gate", lambda step: Open(), name="first")
    engine = build(_gate("behind", asked)(), first)
    engine.submit([1], SamplingParams(max_tokens=1))
    drain_checked(engine)
    assert asked == []


def test_wrappers_tryfirst_and_trylast_are_placed_as_pluggy_says(build: Any) -> None:
    engine = build(
        _gate("last", trylast=True)(), _gate("around", wrapper=True)(), _gate("first", tryfirst=True)(), _gate("plain")()
    )
    assert _order(engine, "gate") == ["around (wrapper)", "first", "plain", "admit.continuous", "last"]


def test_a_strategy_of_a_stranger_is_asked_before_built_ins_of_later_slots(build: Any, offered: Any) -> None:
    """As `quantize` and `attention`: whatever slot it fills."""

    class Ordering:
        @hookimpl
        def order(self) -> None:
            pass

        @hookimpl
        def admit(self) -> None:
            pass

        @hookimpl(wrapper=True)
        def allocate(self) -> Any:
            return (yield)

    engine = build(registry=offered(order_mine=Ordering), order="mine")
    assert _order(engine, "admit") == ["order.mine", "admit.continuous"]
    assert _order(engine, "allocate") == ["order.mine (wrapper)", "allocate.paged"]
    assert _order(engine, "order") == ["order.mine"]


@pytest.mark.parametrize("attention", ["auto", "numba", "torch"])
def test_a_codec_is_asked_for_its_attention_before_built_ins_that_raise(attention: str, offered: Any) -> None:
    class Codec:
        @hookimpl
        def quantize(self) -> None:
            pass

        @hookimpl
        def attention(self) -> None:
            pass

    class Fallback:
        @hookimpl(trylast=True)
        def attention(self) -> None:
            pass

    chosen = {"quantize": "mine", "attention": attention, "execute": "torch", "plugins": ["fallback"]}
    known = offered(quantize_mine=Codec, plugin_fallback=Fallback)
    asked = dict(PluginManager(load(environment=False, registry=known, values=chosen)).callers())["attention"]
    assert asked == ["quantize.mine", "plugin.fallback", f"attention.{attention}"]


def test_a_built_in_tryfirst_is_first_among_built_ins_only(build: Any, offered: Any) -> None:
    class Accepting:
        @hookimpl
        def accept(self) -> None:
            pass

        @hookimpl
        def admit(self) -> None:
            pass

    engine = build(registry=offered(accept_mine=Accepting), values={"accept": "mine", "order": "deadline"})
    assert _order(engine, "admit") == ["accept.mine", "order.deadline", "admit.continuous"]


def test_who_wants_to_be_last_is_asked_behind_the_built_ins(build: Any, offered: Any) -> None:
    known = offered(accept_mine=_accepting(trylast=True), plugin_a=_accepting(tryfirst=True), plugin_b=_accepting())
    engine = build(registry=known, values={"accept": "mine", "plugins": ["a", "b"], "order": "deadline"})
    assert _order(engine, "admit") == ["plugin.a", "plugin.b", "order.deadline", "admit.continuous", "accept.mine"]


def _accepting(**options: Any) -> type:
    class Accepting:
        @hookimpl
        def accept(self) -> None:
            pass

        @hookimpl(**options)
        def admit(self) -> None:
            pass

    return Accepting


def test_strangers_are_told_in_their_slots_place(build: Any, offered: Any) -> None:
    class Evicting:
        @hookimpl
        def evict(self) -> None:
            pass

        @hookimpl
        def blocks_evicted(self) -> None:
            pass

    order = _order(build(registry=offered(evict_mine=Evicting), evict="mine"), "blocks_evicted")
    assert order.index("prefix.hash_chain") < order.index("evict.mine")


def test_block_keepers_are_told_before_those_who_decide_by_them(build: Any) -> None:
    order = _order(build(), "blocks_evicted")
    assert order.index("prefix.hash_chain") < order.index("evict.lru")
    order = _order(build(), "blocks_freed")
    assert order[0] == "allocate.paged"


def test_a_plugin_of_no_slot_may_implement_many_hooks_and_take_settings(build: Any, offered: Any) -> None:
    class MostSettings(StrategySettings):
        most: int = 1

    class Most:
        Settings = MostSettings

        def __init__(self, settings: MostSettings) -> None:
            self.settings = settings

        @hookimpl
        def accept(self) -> Accept:
            return Accept()

        @hookimpl
        def gate(self, step: Any) -> Open:
            return Open(max(0, self.settings.most - step.num_running))

    engine = build(registry=offered(plugin_most=Most), values={"plugins": ["most"], "plugin": {"most": {"most": 2}}})
    handles = [engine.submit([n], SamplingParams(max_tokens=9)) for n in range(4)]
    engine.step()
    assert len(engine.queues.running) == 2
    drain_checked(engine)
    assert all(handle.finished for handle in handles)


def test_a_plugin_may_be_named_by_its_module(build: Any) -> None:
    engine = build(values={"plugins": ["treadle_plugins.accept.open:Open"]})
    assert _order(engine, "accept")[0] == "plugin.treadle_plugins.accept.open:Open"


def test_a_blocked_plugin_is_not_loaded_and_a_note_says_so(build: Any, registry: Registry) -> None:
    def load() -> Any:
        raise AssertionError("a blocked plugin is not imported")

    known = registry.with_offers([Offer("plugin", "a", "test 1.0", load)])
    engine = build(registry=known, values={"plugins": ["a"], "blocked": ["a"]})
    assert "plugin.a" not in [item.name for item in engine.manager.registered]
    assert engine.settings.notes == ("plugin a is blocked",)


def test_what_is_installed_changes_nothing_until_it_is_named(build: Any, offered: Any) -> None:
    before = build().manager.callers()
    assert build(registry=offered(plugin_a=_gate("A"), admit_b=_gate("B"))).manager.callers() == before
