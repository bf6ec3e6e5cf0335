"""What a plugin says of itself: read once, checked, and answered for by name. And what an object lacks of a Protocol."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Protocol

import pytest

from treadle import Budget, Executor, Plugin, Trait, hookimpl
from treadle.errors import ConfigError
from treadle.plugin import Face, missing_members, read_face
from treadle.testing import FakeExecutor


def read(**attributes: Any) -> Face:
    return read_face(SimpleNamespace(**attributes), "loom of test 1.0", implied=[Trait.PREFIX_REUSE])


def test_a_plugin_needs_to_say_nothing() -> None:
    assert read() == Face(None, frozenset({"prefix_reuse"}), {}, {})


def test_a_plugin_may_inherit_from_the_protocol_and_says_nothing_by_it() -> None:
    class Loom(Plugin):
        traits = (Trait.RECOMPUTE,)

    class Plain(Plugin):
        pass

    assert read_face(Plain(), "plain", implied=[Trait.PREFIX_REUSE]) == read()
    assert read_face(Loom(), "loom").traits == {"recompute"}


@pytest.mark.parametrize("traits", [(Trait.RECOMPUTE,), ["recompute"], {"recompute"}, frozenset({Trait.RECOMPUTE})])
def test_traits_are_members_or_their_texts(traits: Any) -> None:
    assert read(traits=traits).traits == {Trait.RECOMPUTE}


def test_a_trait_of_ones_own_has_a_dot() -> None:
    assert read(traits=["loom.slow_start"], refuses={"weft.fast": "too fast"}) == Face(
        None, frozenset({"loom.slow_start"}), {"weft.fast": "too fast"}, {}
    )


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"traits": "recompute"}, r"traits='recompute' is not a collection of traits; write traits = \(Trait\.RECOMPUTE,\)"),
        ({"traits": 3}, "traits=3 is not a collection"),
        ({"traits": ["recompte"]}, r"unknown trait 'recompte' in its traits; did you mean 'recompute'\? .*has a dot"),
        ({"traits": [3]}, "3 in its traits is no trait, but a int"),
        ({"traits": ["loom."]}, r"unknown trait 'loom\.'"),
        ({"refuses": ["prefix_reuse"]}, r"refuses=\['prefix_reuse'\] does not say why"),
        ({"refuses": {"prefix_resue": "no"}}, r"unknown trait 'prefix_resue' in its refuses; did you mean 'prefix_reuse'\?"),
        ({"refuses": {"prefix_reuse": ""}}, r"refuses\['prefix_reuse'\]='' is not a reason"),
        ({"treadle_hooks": "2"}, "treadle_hooks='2' is not a whole number"),
        ({"extras": ["loom"]}, r"extras=\['loom'\] is not a table"),
        ({"extras": {"loom": int, 3: int}}, "3 in its extras is not the name"),
        ({"extras": {"loom": "int"}}, r"extras\['loom'\]='int' cannot be called"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^loom of test 1.0: .*{words}"):
        read(**attributes)


def test_an_attribute_that_cannot_be_read_is_the_plugins() -> None:
    class Broken:
        @property
        def traits(self) -> Any:
            raise ZeroDivisionError("a mistake")

    with pytest.raises(ConfigError, match=r"^loom: its 'traits' cannot be read: ZeroDivisionError: a mistake"):
        read_face(Broken(), "loom")


def test_the_engine_reads_it(build: Any, plugin_with: Any) -> None:
    plugin = plugin_with("gate", lambda step: None)
    type(plugin).traits = ("recompte",)
    with pytest.raises(ConfigError, match=r"^culprit of added by the program: unknown trait 'recompte'"):
        build(plugin)


def test_a_strangers_own_trait_may_be_refused(build: Any, plugin_with: Any) -> None:
    slow, fast = (plugin_with("gate", lambda step: None, name=name) for name in ("slow", "fast"))
    type(slow).traits = ("loom.slow",)
    type(fast).refuses = {"loom.slow": "it is fast"}
    with pytest.raises(ConfigError, match=r"fast does not go together with slow .*: it is fast"):
        build(slow, fast)


# --- extras ---------------------------------------------------------------------------------------------------------------------


def claiming(name: str, *namespaces: str) -> object:
    def gate(self: object) -> None:
        pass

    return type(name, (), {"gate": hookimpl(gate), "extras": dict.fromkeys(namespaces, int), "name": name})()


def test_claimed_namespaces_are_known_with_plugin_and_checker(build: Any) -> None:
    extras: Mapping[str, Any] = build(claiming("a", "colour"), claiming("b", "weight", "size")).manager.extras
    assert extras == {"colour": ("a", int), "weight": ("b", int), "size": ("b", int)}


def test_two_plugins_that_claim_one_namespace_are_refused(build: Any) -> None:
    with pytest.raises(ConfigError, match=r"a and b both claim the namespace 'colour' of SamplingParams.extra"):
        build(claiming("a", "colour"), claiming("b", "colour"))


# --- protocols ------------------------------------------------------------------------------------------------------------------


class Forwards:
    """A wrapper that passes everything on, as those do that record or measure."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Named(Protocol):
    name: str

    def __call__(self) -> int: ...


class Wide(Named, Protocol):
    @property
    def width(self) -> int: ...


def test_an_executor_that_forwards_is_one_on_every_python() -> None:
    assert missing_members(Executor, FakeExecutor()) == []
    assert missing_members(Executor, Forwards(FakeExecutor())) == []
    assert missing_members(Executor, Forwards(Forwards(FakeExecutor()))) == []


def test_what_is_missing_is_named_in_order() -> None:
    assert missing_members(Budget, object()) == ["may_shrink", "take"]
    assert missing_members(Budget, SimpleNamespace(may_shrink=True, take=3)) == ["take"], "a method can be called"
    assert missing_members(Wide, object()) == ["name", "__call__", "width"]
    assert missing_members(Wide, SimpleNamespace(name="", width=3)) == ["__call__"]


def test_what_a_property_raises_is_not_hidden() -> None:
    class Broken:
        @property
        def may_shrink(self) -> bool:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        missing_members(Budget, Broken())
