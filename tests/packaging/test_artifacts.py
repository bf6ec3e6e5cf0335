"""What is in the wheel and in the source distribution."""

from __future__ import annotations

import configparser
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from treadle.registry import SLOTS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"treadle": ROOT / "core" / "treadle", "treadle_plugins": ROOT / "plugins" / "treadle_plugins"}


def source_files() -> set[str]:
    """Every file of the two import packages, as the wheel names it."""
    return {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in SOURCES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(artifacts: dict[str, Path]) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(artifacts["wheel"]) as archive:
        yield archive


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = [member for member in wheel.namelist() if member.endswith(f".dist-info/{name}")]
    return wheel.read(member).decode()


def headers(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(metadata(wheel, "METADATA"))


def test_the_wheel_holds_both_packages_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    code = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert code == source_files()
    assert {"treadle/py.typed", "treadle_plugins/py.typed", "treadle/testing/__init__.py"} <= code


def test_the_wheel_holds_the_licence_and_the_readme(wheel: zipfile.ZipFile) -> None:
    assert metadata(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert headers(wheel)["License-Expression"] == "Apache-2.0"
    assert "every policy is a plugin" in str(headers(wheel).get_payload())


def test_each_entry_point_names_a_module_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # the documented way to keep names as they are
    parser.read_string(metadata(wheel, "entry_points.txt"))
    assert dict(parser["console_scripts"]) == {"treadle": "treadle.cli:main"}
    files = set(wheel.namelist())
    for name, value in parser["treadle"].items():
        module = value.partition(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & files, f"{name} = {value}"
    defaults = {f"{slot.name}.{slot.default}" for slot in SLOTS}
    assert defaults <= set(parser["treadle"])


def test_the_base_package_depends_on_four_libraries(wheel: zipfile.ZipFile) -> None:
    requirements = [Requirement(text) for text in headers(wheel).get_all("Requires-Dist", [])]
    base = {r.name: str(r.marker or "") for r in requirements if "extra ==" not in str(r.marker)}
    tomli = base.pop("tomli")
    assert tomli == 'python_version < "3.11"'
    assert base == {"click": "", "pluggy": "", "pydantic-settings": "", "structlog": ""}


def test_the_source_distribution_builds_the_same_wheel(artifacts: dict[str, Path]) -> None:
    """`artifacts` built the wheel from it; what a packager needs beside the code is there too."""
    with tarfile.open(artifacts["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "tox.ini"} <= names
    places = {"treadle": "core/treadle", "treadle_plugins": "plugins/treadle_plugins"}
    for name in source_files():
        package, _, rest = name.partition("/")
        assert f"{places[package]}/{rest}" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".tox"))]
