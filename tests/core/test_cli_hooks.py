"""`treadle hooks`: the list, one of them, and a misspelt one."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from treadle.cli import cli
from treadle.hookspecs import Hooks

LIGHT = ["--set", "execute=simulated"]
HOOKS = [name for name, spec in vars(Hooks).items() if inspect.isfunction(spec)]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TREADLE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def shown(*args: str) -> str:
    result = run(*args)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_hook_of_the_core_is_listed_in_its_order_with_kind_and_summary() -> None:
    rows = json.loads(shown("hooks", "--json", *LIGHT))
    assert [row["name"] for row in rows] == HOOKS
    assert {row["owner"] for row in rows} == {"core"}
    kinds = {row["name"]: row["kind"] for row in rows}
    assert (kinds["admit"], kinds["blocks_freed"]) == ("decide", "tell")
    assert all(row["summary"].endswith((".", "`")) for row in rows), rows


def test_the_list_for_people_has_a_line_for_each() -> None:
    text = shown("hooks", *LIGHT)
    lines = text.splitlines()
    assert lines[0] == "core"
    (line,) = [line for line in lines if line.startswith("  admit ")]
    assert line.split() == ["admit", "decide", "Whether", "a", "waiting", "request", "starts", "now."]


def test_hooks_of_the_executor_are_its_own() -> None:
    rows = json.loads(shown("hooks", "--json", "--set", "execute=torch"))
    assert {row["name"] for row in rows if row["owner"] == "execute.torch"} >= {"attention", "prepare_model", "process_logits"}
    assert [row["owner"] for row in rows][: len(HOOKS)] == ["core"] * len(HOOKS)


def test_one_hook_comes_with_signature_docstring_and_who_implements_it() -> None:
    text = shown("hooks", "preempt", *LIGHT, "--set", "preempt=auto")
    assert text.startswith("preempt(self, step: Step, request: Request, num_blocks: int) -> Preemption | None\n")
    assert "[decide, core]" in text
    assert "    Rules:\n        - answers a Preemption or None" in text
    assert ">>> class ShortestOutputFirst:" in text
    assert text.endswith("in call order\n    preempt.auto\n")
    facts = json.loads(shown("hooks", "blocks_freed", "--json", *LIGHT))
    assert facts["implementations"][0] == "allocate.paged"
    assert facts["kind"] == "tell"


def test_a_hook_that_nobody_implements_says_so() -> None:
    assert shown("hooks", "propose", *LIGHT).endswith("    nobody\n")


def test_an_unknown_hook_names_the_nearest_and_where_was_looked() -> None:
    result = run("hooks", "admitt", *LIGHT)
    assert result.exit_code == 2
    assert "no hook 'admitt' in the configured stack (core); did you mean 'admit'?" in result.stderr
