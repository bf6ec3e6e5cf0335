"""What pages say of the code, of pyproject and of figures is so: a test for each claim that was wrong once, and its like."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import treadle
from treadle import Engine, SamplingParams
from treadle.blocks import IntegrityError
from treadle.engine import FULL_CHECK_S
from treadle.handles import Completion
from treadle.hook_changes import CHANGES
from treadle.hookspecs import HOOK_VERSION, Hooks
from treadle.testing import FakeExecutor, make_engine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "treadle"
PLUGINS = ROOT / "plugins" / "treadle_plugins"
CODE = re.compile(r"`([^`]+)`")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str, *titles: str) -> list[list[str]]:
    """Cells of each row of the tables with these titles."""
    found: list[list[str]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line == f"| {' | '.join(titles)} |":
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    break
                found.append([cell.strip() for cell in row.strip("|").split("|")])
    assert found, f"no table with the titles {titles}"
    return found


# --- architecture ---------------------------------------------------------------------------------------------------------------


def test_import_exceptions_are_those_of_pyproject() -> None:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    real = {
        tuple(name.removeprefix("treadle_plugins.").removesuffix(".**") for name in line.split(" -> "))
        for contract in contracts
        for line in contract.get("ignore_imports", ())
    }
    told = {
        (CODE.findall(who)[0], name)
        for who, what in rows(page("docs/explanation/architecture.md"), "who", "may import")
        for name in CODE.findall(what)
    }
    assert told == real


def test_every_file_of_the_core_is_listed() -> None:
    told = {CODE.findall(name)[0] for name, _ in rows(page("docs/explanation/architecture.md"), "file", "what it is")}
    assert told == {path.name for path in CORE.glob("*.py") if not path.name.startswith("_")}


def test_files_that_pages_name_exist() -> None:
    for name in ("docs/explanation/step.md", "docs/explanation/blocks.md", "docs/reference/glossary.md"):
        text = page(name).split("## Names of before")[0]
        for file in set(re.findall(r"[\w/]+\.py\b", text)):
            assert (CORE / file).is_file() or (PLUGINS / file).is_file(), f"{name}: {file}"


# --- the step, and blocks -------------------------------------------------------------------------------------------------------


def test_the_isolation_key_holds_what_the_page_says() -> None:
    assert len(rows(page("docs/explanation/blocks.md"), "part", "is")) == 4
    executor = FakeExecutor()
    with make_engine(executor=executor) as engine:
        handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=1), cache_salt="pepper")
        engine.step()
        assert handle.request.isolation_key == ("pepper", executor.model.fingerprint, None, engine.info.kv_format.name)


def test_the_pool_is_looked_at_whenever_idle_and_proved_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("docs/explanation/step.md", "docs/explanation/blocks.md"):
        assert f"at most every {FULL_CHECK_S:g} s" in page(name)
    done: list[str] = []
    with make_engine() as engine:
        for check in ("check_balance", "check_integrity"):
            monkeypatch.setattr(engine.kv_cache, check, lambda *_, check=check: done.append(check))
        for _ in range(3):
            engine.submit([1], SamplingParams(max_tokens=1))
            engine.drain()
        assert done == ["check_balance", "check_integrity", "check_balance", "check_balance"]
        engine.clock.wait(engine.clock.now() + FULL_CHECK_S)
        engine.submit([1], SamplingParams(max_tokens=1))
        engine.drain()
        assert done[4:] == ["check_balance", "check_integrity"]


def test_a_lost_block_is_found_when_idle() -> None:
    engine = make_engine()
    engine.submit([1], SamplingParams(max_tokens=1))
    engine.drain()
    engine.kv_cache.pool.take([next(b for b in range(64) if engine.kv_cache.pool.is_free(b))])
    engine.submit([1], SamplingParams(max_tokens=1))
    with pytest.raises(IntegrityError, match="1 blocks of the pool"):
        engine.drain()
    engine.close()


def test_each_decision_of_the_step_is_a_hook_and_each_hook_is_in_it() -> None:
    drawn = page("docs/explanation/step.md").split("```")[1]
    asked = set(re.findall(r"(\w+)\?", drawn))
    decides = {name for name, hook in vars(Hooks).items() if getattr(hook, "treadle_spec", {}).get("firstresult")}
    assert asked == decides - {"quantize", "execute"}  # asked at start-up


# --- reference ------------------------------------------------------------------------------------------------------------------


def classes() -> dict[str, type]:
    """The core's classes, by name."""
    modules = (importlib.import_module(f"treadle.{path.stem}") for path in CORE.glob("*.py") if path.stem != "__main__")
    return {name: value for module in modules for name, value in vars(module).items() if inspect.isclass(value)}


def names_of_the_glossary() -> Iterator[str]:
    for line in page("docs/reference/glossary.md").split("## Names of before")[0].splitlines():
        if line.startswith("|"):
            yield from (name for name in CODE.findall(line.rsplit("|", 2)[1]) if re.fullmatch(r"[A-Z]\w+(\.\w+)?", name))


def test_classes_and_members_of_the_glossary_exist() -> None:
    known = classes() | {"HOOK_VERSION": int}
    for name in names_of_the_glossary():
        owner, _, member = name.partition(".")
        assert owner in known, name
        fields = {field for base in known[owner].__mro__ for field in getattr(base, "__annotations__", {})}
        source = inspect.getsource(known[owner]) if member else ""
        assert not member or hasattr(known[owner], member) or member in fields or f"self.{member}:" in source, name


def test_old_names_of_the_glossary_are_gone() -> None:
    known = classes()
    for was, now, *_ in rows(page("docs/reference/glossary.md"), "was", "is", "was in", "is in"):
        for name in CODE.findall(was):
            assert name not in known, name
        for name in CODE.findall(now):
            if re.fullmatch(r"[A-Z]\w+", name):
                assert name in known, name


def test_each_hook_is_described_and_each_change_told() -> None:
    hooks = page("docs/reference/hooks.md")
    for name, hook in vars(Hooks).items():
        if hasattr(hook, "treadle_spec"):
            assert f"\n### {name}\n" in hooks
    upgrade = page("docs/howto/upgrade-a-plugin.md")
    assert all(f"`{change.what}`" in upgrade for change in CHANGES)
    assert f"version {HOOK_VERSION}" in upgrade


def test_each_public_module_is_described(generate: ModuleType) -> None:
    told = {
        name for row, _ in rows(page("docs/reference/api.md"), "public module", "what it holds") for name in CODE.findall(row)
    }
    places = (
        place.split(" as ")[-1].split(":")[0]
        for part, named in generate.API.items()
        if part.startswith("api_")
        for place in named
    )
    elsewhere = {"treadle", "treadle.hookspecs", "treadle.testing.suites"}
    assert told - elsewhere == set(places)


def test_each_public_name_is_on_the_page_of_the_api() -> None:
    told = {CODE.findall(row[0])[0] for row in rows(page("docs/reference/api.md"), "name", "defined in", "what it is")}
    assert set(treadle.__all__) <= told


# --- README ---------------------------------------------------------------------------------------------------------------------


def test_extras_are_those_of_pyproject() -> None:
    extras: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    told = {name: brings for row, brings, _ in rows(page("README.md"), "extra", "brings", "for") for name in CODE.findall(row)}
    assert set(told) == set(extras)
    assert extras["gpu"] == ["treadle[cpu]"]
    assert told["gpu"].startswith("the same as `cpu` today")
    assert extras["all"] == ["treadle[bench,cpu]"]


def test_figures_of_the_readme_are_in_the_log() -> None:
    text = page("README.md").split("## Measured")[1].split("## Why not")[0]
    log = page("docs/log.md")
    ratios = re.findall(r"\d\.\d\d \(\d\.\d\d-\d\.\d\d\)", text)
    assert len(ratios) == 8
    for figure in (*ratios, "6.3 times", "80 % less KV", "1.7 times the", "a sixth of the time to the first token"):
        assert figure in text
        assert figure in log.replace("\n", " "), figure


def test_every_decision_is_listed() -> None:
    told = {re.findall(r"\((.+?)\)", row[1])[0] for row in rows(page("docs/decisions/index.md"), "", "decision")}
    assert told == {path.name for path in (ROOT / "docs" / "decisions").glob("0*.md")}


@pytest.mark.model
def test_the_readme_shows_what_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = re.findall(r"Text in, text out:.*?```python\n(.*?)```\n\n```text\n(.*?)```", page("README.md"), re.DOTALL)[0]
    kept: list[Completion] = []

    def with_margins(engine: Engine, prompts: Any, generate: Any = Engine.generate) -> Iterator[Completion]:
        for done in generate(engine, prompts, SamplingParams(logprobs=2)):
            kept.append(done)
            yield done

    monkeypatch.setattr(Engine, "generate", with_margins)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(code, {})  # noqa: S102  # our own documentation
    assert printed.getvalue() == shown == "The capital of France is Paris.\n"
    gaps = [entry.top[0][1] - entry.top[1][1] for done in kept for entry in done.logprobs]
    print(f"smallest gap of the two best tokens: {min(gaps):.3f}")
    assert min(gaps) > 0.05
