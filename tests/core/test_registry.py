"""The registry: what packages offer, found by name, imported only when chosen."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.errors import ConfigError
from treadle.registry import SLOTS, Offer, Registry, Slot, load_object
from treadle.settings import load

MODULE = '''
"""A stranger's module; importing it leaves a trace."""
from treadle import hookimpl

class Two:
    """Two at a time."""
    @hookimpl
    def admit(self):
        return None

class Outer:
    class Inner:
        """Within another class."""
        @hookimpl
        def admit(self):
            return None
'''


class Package:
    """Writes a distribution as an installer would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, *points: str, modules: dict[str, str] | None = None) -> None:
        info = self.folder / f"{name}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n", encoding="utf-8")
        (info / "entry_points.txt").write_text("[treadle]\n" + "\n".join(points) + "\n", encoding="utf-8")
        for module, text in (modules or {}).items():
            (self.folder / f"{module}.py").write_text(text, encoding="utf-8")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.syspath_prepend(tmp_path)
    return Package(tmp_path)


def _choose(name: str, registry: Registry) -> Any:
    return load(environment=False, overrides=["execute=simulated", f"admit={name}"], registry=registry).choices["admit"]


def test_every_default_is_installed() -> None:
    registry = Registry.installed()
    slots = registry.slots()
    assert [slot.name for slot in slots] == [*(slot.name for slot in SLOTS[:-1]), "attention", "execute"]
    for slot in slots:
        assert slot.default in registry.names(slot.name), slot


def test_an_installed_package_offers_its_strategies_and_is_imported_only_when_chosen(package: Package) -> None:
    package.install("treadle-two", "admit.two = two_at_a_time:Two", modules={"two_at_a_time": MODULE})
    registry = Registry.installed()
    assert "two" in registry.names("admit")
    assert _choose("continuous", registry).offer.name == "continuous"
    assert "two_at_a_time" not in sys.modules
    choice = _choose("two", registry)
    assert sys.modules.pop("two_at_a_time").Two is choice.factory
    assert choice.offer.package == "treadle-two 1.5"
    assert choice.offer.source == "two_at_a_time:Two"


def test_an_entry_point_may_name_an_inner_class(package: Package) -> None:
    package.install("treadle-two", "admit.two = two_inner:Outer.Inner", modules={"two_inner": MODULE})
    assert _choose("two", Registry.installed()).factory.__qualname__ == "Outer.Inner"
    del sys.modules["two_inner"]


@pytest.mark.parametrize(
    ("point", "module", "parts"),
    [
        ("admit.two = nowhere_to_be_found:Two", None, ["admit.two", "'nowhere_to_be_found'", "not installed", "treadle-two"]),
        (
            "admit.two = two_needs:Two [fast]",
            "import a_missing_library",
            ["admit.two", "'a_missing_library'", "pip install 'treadle-two[fast]'"],
        ),
        ("admit.two = two_broken:Two", "1 / 0", ["admit.two", "'two_broken'", "ZeroDivisionError"]),
        ("admit.two = two_syntax:Two", "def", ["admit.two", "'two_syntax'", "SyntaxError"]),
        ("admit.two = two_else:Three", MODULE, ["admit.two", "two_else", "no 'Three'"]),
        ("admit.two = two_function:Two", "def Two(): pass", ["admit.two", "implements no hook of its slot"]),
        ("admit.two = two_number:Two", "Two = 3", ["admit.two"]),
    ],
)
def test_what_cannot_be_imported_says_which_package_and_how_to_mend_it(
    point: str, module: str | None, parts: list[str], package: Package, build: Any
) -> None:
    name = point.split("= ")[1].split(":", maxsplit=1)[0]
    package.install("treadle-two", point, modules={} if module is None else {name: module})
    registry = Registry.installed()
    with pytest.raises(ConfigError) as raised:
        build(registry=registry, admit="two")
    for part in parts:
        assert part in str(raised.value)
    sys.modules.pop(name, None)


def test_a_broken_package_that_is_not_chosen_harms_nobody(package: Package, build: Any) -> None:
    package.install("treadle-two", "admit.two = two_broken:Two", modules={"two_broken": "1 / 0"})
    build(registry=Registry.installed())


@pytest.mark.parametrize("point", ["two = two_at_a_time:Two", "admitt.two = two_at_a_time:Two", "admit. = x:Two"])
def test_a_misnamed_entry_point_is_not_offered_for_a_slot(point: str, package: Package) -> None:
    package.install("treadle-two", point)
    assert "two" not in Registry.installed().names("admit")


def test_two_packages_that_offer_one_name_are_both_named(package: Package) -> None:
    package.install("treadle-one", "admit.two = one:Two")
    package.install("treadle-two", "admit.two = two:Two")
    with pytest.raises(ConfigError) as raised:
        _choose("two", Registry.installed())
    for part in ("admit.two", "treadle-one 1.5 (one:Two)", "treadle-two 1.5 (two:Two)", "--set admit=two", "rename"):
        assert part in str(raised.value)


def test_a_strangers_name_for_a_built_in_is_a_conflict_only_when_it_is_chosen(package: Package) -> None:
    package.install("treadle-two", "admit.windowed = two:Two")
    registry = Registry.installed()
    assert _choose("continuous", registry).offer.name == "continuous"
    with pytest.raises(ConfigError, match=r"treadle \S+ .*treadle-two 1\.5"):
        _choose("windowed", registry)


def test_an_unknown_name_suggests_the_nearest_of_all_that_are_offered(package: Package) -> None:
    package.install("treadle-two", "admit.two_at_a_time = two:Two")
    with pytest.raises(ConfigError, match="did you mean 'two_at_a_time'"):
        _choose("two_at_time", Registry.installed())


def test_a_registry_may_be_made_of_offers() -> None:
    class Mine:
        pass

    registry = Registry([Offer("admit", "mine", "test 1.0", lambda: Mine)])
    assert registry.names("admit") == ["mine"]
    assert registry.find("admit", "mine", "here").load() is Mine
    more = registry.with_offers([Offer("order", "yours", "test 1.0", lambda: Mine)])
    assert [offer.label for offer in more] == ["admit.mine", "order.yours"]
    assert registry.names("order") == []
    with pytest.raises(ConfigError, match=r"unknown strategy 'yours' for slot 'order' \(from here\); none is known"):
        registry.find("order", "yours", "here")


def test_a_plugin_named_by_its_module() -> None:
    offer = load_object("treadle.errors:nearest", "a test")
    assert offer.load().__name__ == "nearest"
    for path, part in (("no_such_module:x", "'no_such_module'"), ("treadle.errors:nothing", "no 'nothing'")):
        with pytest.raises(ConfigError, match=part):
            load_object(path, "a test").load()


def test_slots_are_those_of_all_executors_that_can_be_imported() -> None:
    def broken() -> Any:
        raise ConfigError("it needs another machine")

    one = type("One", (), {"slots": (Slot("shuttle", ("throw",), "plain"),)})
    two = type("Two", (one,), {})
    loads = {"broken": broken, "one": lambda: one, "two": lambda: two}
    registry = Registry(Offer("execute", name, "test 1.0", load) for name, load in loads.items())
    assert [slot.name for slot in registry.slots()][-3:] == ["quantize", "shuttle", "execute"]
    assert registry.owners("shuttle") == ["execute.one", "execute.two"]
    assert registry.owners("admit") == []
    assert registry.owners("shutle") == []
