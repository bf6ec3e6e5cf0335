"""The template's matrix of tests runs from a clone, and from a copy that is told where Treadle is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "contrib" / "plugin-template"
LONGEST_S = 600
OWN_TESTS = f"py3{sys.version_info.minor}"


def tox(folder: Path, work_folder: Path, *environments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # what a tox around this one has set is not the template's
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TOX_", "TREADLE_", "REQUIRE_", "PYTHON"))}
    command = [sys.executable, "-m", "tox", "run", "--workdir", str(work_folder), "-e", ",".join(environments)]
    return subprocess.run(  # noqa: S603  # our own template
        command, cwd=folder, env={**env, **variables}, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )


@pytest.mark.timeout(900)
def test_it_runs_from_a_clone(tmp_path: Path) -> None:
    done = tox(TEMPLATE, tmp_path, OWN_TESTS, "round_robin-limited")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed in " in done.stdout
    assert "order = round_robin" in done.stdout
    assert "congratulations" in done.stdout


@pytest.mark.timeout(900)
def test_a_copy_elsewhere_says_where_treadle_is(tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "deeper" / "copy"
    shutil.copytree(TEMPLATE, copy, ignore=shutil.ignore_patterns(".tox", "__pycache__"))
    done = tox(copy, tmp_path / "tox", OWN_TESTS, REQUIRE_TREADLE=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
