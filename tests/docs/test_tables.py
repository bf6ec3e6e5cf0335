"""Tables of the README and of docs/ that are written by hand name what there is, and all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from treadle.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"`([\w.]+)`")
GUIDE = "docs/howto/choose-strategies.md"


@pytest.fixture(scope="module")
def strategies() -> dict[str, list[str]]:
    """The built-in strategies of each slot, the default first, the others by name."""
    own = [offer for offer in Registry.installed() if offer.package.split()[0] == "treadle"]
    return {
        slot.name: sorted((o.name for o in own if o.kind == slot.name), key=lambda name: (name != slot.default, name))
        for slot in Registry.installed().slots()
    }


def rows(page: str, title: str) -> Iterator[list[str]]:
    """Cells of each row of the table whose first title is `title` and that names strategies."""
    lines = iter((ROOT / page).read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"| {title} |") and "strateg" in line:
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    return
                yield [cell.strip() for cell in row.strip("|").split("|")]


def test_the_readme_lists_every_strategy(strategies: dict[str, list[str]]) -> None:
    found = {CODE.findall(row[0])[0]: CODE.findall(row[2]) for row in rows("README.md", "slot")}
    assert found == strategies


def test_the_guide_says_when_to_use_each_strategy(strategies: dict[str, list[str]]) -> None:
    found: dict[str, list[str]] = {}
    slot = ""
    for row in rows(GUIDE, "slot"):
        slot = CODE.findall(row[0])[0] if row[0] else slot
        found.setdefault(slot, []).append(CODE.findall(row[1])[0])
        assert all(row[2:4]), row
    assert found == strategies


def test_settings_that_the_guide_names_exist() -> None:
    page = (ROOT / GUIDE).read_text(encoding="utf-8")
    registry = Registry.installed()
    for slot, setting in re.findall(r"`(\w+)\.(\w+)(?: = [^`]*)?`", page):
        if slot in {s.name for s in registry.slots()}:
            models = [getattr(registry.find(slot, name, "the guide").load(), "Settings", None) for name in registry.names(slot)]
            assert any(model and setting in model.model_fields for model in models), f"{slot}.{setting}"


def test_each_generated_part_is_on_one_page_and_up_to_date(generate: ModuleType) -> None:
    marks: list[str] = []
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        marks += generate.MARK.findall(text)
        assert text.count("<!-- generated:") == len(generate.MARK.findall(text)), f"{page}: a part without its end"
        assert generate.fill_in(text) == text, f"{page} is out of date; run `python docs/generate.py --write`"
    assert sorted(marks) == sorted(generate.PARTS)


def test_a_part_that_is_out_of_date_is_found_and_written(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("# Page\n\n<!-- generated: suites -->\nold\n<!-- end of suites -->\n\nWords.\n")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    assert generate.main([]) == 1
    assert "old" in page.read_text()
    assert generate.main(["--write"]) == 0
    assert generate.main([]) == 0
    written = page.read_text()
    assert "| `OrderSuite` |" in written
    assert written.endswith("<!-- end of suites -->\n\nWords.\n")
