"""Packages of contrib/ import what the documentation calls public, and nothing else of ours."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in (ROOT / "contrib").rglob("*.py") if not {"__pycache__", ".tox", ".venv"} & set(path.parts))


def public_modules() -> set[str]:
    """`treadle` itself, and the modules that the reference calls public."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    table = page.split("| public module |")[1].split("\n\n")[0]
    return set(re.findall(r"`(treadle[\w.]*)`", table))


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of each import; the name is empty where a module is imported as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def breaches(code: str) -> list[str]:
    """Imports of ours that are not public."""
    public = public_modules()
    found = []
    for module, name in imported_names(ast.parse(code)):
        package = module.partition(".")[0]
        private = module not in public and f"{module}.{name}" not in public
        if package == "treadle_plugins" or (package == "treadle" and (private or name.startswith("_"))):
            found.append(f"{module} {name}".strip())
    return found


def test_there_is_something_to_check() -> None:
    assert len(FILES) >= 5
    assert {"treadle", "treadle.testing", "treadle.errors", "treadle.logs"} <= public_modules()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_contrib_imports_public_names_only(path: Path) -> None:
    assert breaches(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from treadle import Request\nfrom treadle.testing import run_prompts\nimport treadle.errors\nimport pydantic", []),
        ("from treadle import errors", []),
        ("from treadle.planner import Planner", ["treadle.planner Planner"]),
        ("import treadle.books", ["treadle.books"]),
        ("from treadle.request import _MOVES", ["treadle.request _MOVES"]),
        ("from treadle_plugins.order.fcfs import Fcfs", ["treadle_plugins.order.fcfs Fcfs"]),
    ],
)
def test_the_check_itself(code: str, found: list[str]) -> None:
    assert breaches(code) == found
