"""A plugin that was written for an earlier hook version is told what to change."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from treadle import hookimpl
from treadle.errors import ConfigError
from treadle.hook_changes import CHANGES, Change, about_argument, about_gone, since
from treadle.hookspecs import HOOK_VERSION, Hooks

SYNTHETIC = (
    Change(1, "gate", "gate(now) is gate(step)", lost=("now",)),
    Change(2, "gate", "gate may answer NotBefore"),
    Change(2, "weigh", "weigh is gone: implement admit", gone=True),
)


class Old:
    treadle_hooks = 1

    @hookimpl
    def step_finished(self, step: Any, report: Any) -> None:
        pass

    @hookimpl
    def admit(self, step: Any, request: Any) -> None:
        pass


class OldButUnchanged:
    treadle_hooks = 1

    @hookimpl
    def gate(self) -> None:
        pass


class New(OldButUnchanged):
    treadle_hooks = HOOK_VERSION


class Newer(OldButUnchanged):
    treadle_hooks = HOOK_VERSION + 1


def told(plugin: object, build: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        build(plugin)
    return str(raised.value)


def test_the_table_is_of_versions_that_were() -> None:
    assert {change.version for change in CHANGES} == set(range(2, HOOK_VERSION + 1))
    assert all(change.what.split(".")[-1] in change.do for change in CHANGES)


def test_lookups() -> None:
    assert since(0, ["gate"], SYNTHETIC) == [*SYNTHETIC[:2]]
    assert since(1, ["gate", "weigh"], SYNTHETIC) == [*SYNTHETIC[1:]]
    assert since(2, ["gate", "weigh"], SYNTHETIC) == []
    assert about_argument("gate", "now", SYNTHETIC) is SYNTHETIC[0]
    assert about_argument("gate", "step", SYNTHETIC) is None
    assert about_gone("weigh", SYNTHETIC) is SYNTHETIC[2]
    assert about_gone("gate", SYNTHETIC) is None


def test_who_states_the_version_before_is_told_what_changed_of_its_hooks(build: Any) -> None:
    text = told(Old(), build)
    assert text.startswith(f"Old of added by the program was written for hook version 1, this is {HOOK_VERSION}; ")
    assert text.count("\n- ") == 2
    assert "\n- step_finished(step, report) is step_finished(report)" in text
    assert "step_committed(step)" in text
    assert "\n- admit(step, request) got a third argument, `match`" in text
    assert "Admission.NO_ROOM" in text


def test_who_states_it_and_need_change_nothing_is_told_so(build: Any) -> None:
    assert told(OldButUnchanged(), build).endswith(f"or state treadle_hooks = {HOOK_VERSION}")
    assert "install a newer treadle" in told(Newer(), build)
    build(New())


def test_an_argument_that_is_gone_is_explained(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gating:
        @hookimpl
        def gate(self, now: float) -> None:
            pass

    monkeypatch.setattr("treadle.hook_impls.about_argument", lambda hook, name: about_argument(hook, name, SYNTHETIC))
    text = told(Gating(), build)
    assert text.endswith("asks the hook 'gate' for an argument 'now' that it does not have; gate(now) is gate(step)")


@pytest.mark.parametrize("marked", [True, False])
def test_a_hook_that_is_gone_is_explained(marked: bool, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def weigh(self: object) -> None:
        pass

    def gate(self: object) -> None:
        pass

    plugin = type("Weighing", (), {"weigh": hookimpl(weigh) if marked else weigh, "gate": hookimpl(gate)})()
    monkeypatch.setattr("treadle.hook_impls.about_gone", lambda what: about_gone(what, SYNTHETIC))
    assert told(plugin, build).endswith("weigh is gone: implement admit")


@pytest.mark.parametrize("change", [change for change in CHANGES if change.lost], ids=lambda change: change.what)
def test_an_argument_of_the_table_is_explained_once_the_hook_has_lost_it(change: Change, build: Any) -> None:
    arguments = getattr(Hooks, change.what).__code__.co_varnames
    for name in set(change.lost) - set(arguments):
        scope: dict[str, Any] = {}
        exec(f"def {change.what}(self, {name}): pass", scope)  # noqa: S102  # pluggy reads the names of arguments from the code
        plugin = type("Old", (), {change.what: hookimpl(scope[change.what])})()
        assert told(plugin, build).endswith(change.do)


def test_folders_that_moved_are_not_there_and_their_new_ones_are() -> None:
    moved = [change for change in CHANGES if change.what.startswith("treadle_plugins.")]
    assert about_gone("treadle_plugins.eviction.ranked") in moved
    for change in moved:
        spec = find_spec(change.what)
        assert spec is None or spec.origin is None, "a folder may be left, with nothing in it"
        named = change.do.partition("see ")[2].replace("treadle_plugins", "").replace(" and", "").replace(",", "").split()
        for name in named:
            assert find_spec(f"treadle_plugins{name}") is not None, name
