"""The hookspecs themselves: typed, documented, with examples that run, and each used by a real plugin."""

from __future__ import annotations

import doctest
import inspect
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treadle.blocks
import treadle.contracts
import treadle.plan
import treadle.registry
import treadle.request
import treadle.settings
import treadle.step
from treadle.errors import ConfigError
from treadle.hook_impls import MARK
from treadle.hookspecs import Hooks
from treadle.registry import SLOTS, Registry

HOOKS: dict[str, Callable[..., Any]] = {
    name: spec for name, spec in vars(Hooks).items() if inspect.isfunction(spec) and not name.startswith("_")
}
DECIDE = [name for name, spec in HOOKS.items() if spec.treadle_spec["firstresult"]]  # type: ignore[attr-defined]  # by pluggy
TELL = [name for name in HOOKS if name not in DECIDE]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("hook", DECIDE)
def test_the_example_in_the_docstring_runs(hook: str) -> None:
    examples = doctest.DocTestFinder(recurse=False).find(HOOKS[hook], hook, globs={})
    assert sum(len(example.examples) for example in examples) >= 2
    for example in examples:
        results = doctest.DocTestRunner(optionflags=doctest.FAIL_FAST).run(example)
        assert results.failed == 0


@pytest.mark.parametrize("hook", DECIDE)
def test_a_decision_says_when_it_is_asked_what_it_returns_its_rules_and_its_cost(hook: str) -> None:
    text = inspect.getdoc(HOOKS[hook]) or ""
    parts = re.findall(r"^(Called|Returns|Rules|Cost):", text, flags=re.MULTILINE)
    assert parts == ["Called", "Returns", "Rules", "Cost"]
    for part in ("Called", "Returns", "Cost"):
        assert re.search(rf"^{part}: \S", text, flags=re.MULTILINE), part
    assert re.search(r"^Rules:\n    - \S", text, flags=re.MULTILINE)
    assert text.index("Cost:") < text.index(">>>"), "the example comes last"


@pytest.mark.parametrize("hook", TELL)
def test_every_other_hook_says_what_it_tells(hook: str) -> None:
    text = inspect.getdoc(HOOKS[hook]) or ""
    assert text.endswith(".") or ">>>" in text or "`" in text
    assert len(text) > 10


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_typed(hook: str) -> None:
    homes = (treadle.blocks, treadle.contracts, treadle.plan, treadle.registry, treadle.request, treadle.settings, treadle.step)
    names = {name: value for module in homes for name, value in vars(module).items()}
    hints = typing.get_type_hints(HOOKS[hook], globalns={**vars(typing), **HOOKS[hook].__globals__, **names})
    parameters = list(inspect.signature(HOOKS[hook]).parameters.values())
    assert parameters[0].name == "self"
    for parameter in parameters[1:]:
        assert parameter.name in hints
        assert parameter.default is inspect.Parameter.empty
    assert "return" in hints
    if hook in DECIDE:
        assert type(None) in typing.get_args(hints["return"]), "None passes the question on"
    else:
        assert hints["return"] is type(None)


def test_every_hook_is_of_one_kind() -> None:
    assert sorted([*DECIDE, *TELL]) == sorted(HOOKS)
    of_slots = {hook for slot in SLOTS for hook in slot.hooks}
    # drafts come from plugins of no slot
    assert of_slots == set(DECIDE) - {"propose"}


def test_tells_are_past_participles() -> None:
    irregular = {"told", "broken"}
    for hook in TELL:
        verb = re.sub(r"_(in|out)$", "", hook).rsplit("_", 1)[1]
        assert verb.endswith("ed") or verb in irregular, hook


def _implemented_by_built_ins(registry: Registry) -> set[str]:
    found = set()
    for offer in registry:
        if not offer.source.startswith("treadle_plugins"):
            continue
        try:
            factory = offer.load()
        except ConfigError:
            continue  # it needs torch, which the core's own environment lacks
        found |= {name for name in dir(factory) if hasattr(getattr(factory, name), MARK)}
    return found


def test_every_hook_is_used_by_a_real_plugin(registry: Registry) -> None:
    built_in = _implemented_by_built_ins(registry)
    assert set(DECIDE) - built_in <= {"propose"}, "a decision without a strategy is one hook too many"
    tests = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
    in_tests = {hook for hook in HOOKS if re.search(rf"@hookimpl[^\n]*\n +def {hook}\(", tests)}
    in_tests |= {hook for hook in HOOKS if f'plugin_with("{hook}"' in tests}
    assert set(HOOKS) - built_in - in_tests == set()


def test_every_hook_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "hooks.md").read_text(encoding="utf-8")
    assert [hook for hook in HOOKS if f"\n### {hook}\n\n```text\n{hook}(" not in page] == []
