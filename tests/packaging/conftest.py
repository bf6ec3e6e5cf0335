"""Clean environments, made once for all tests of this folder: nothing is in them but what a test installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 240


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  # our own commands
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )


def succeed(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, f"{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done


class Environment:
    """A virtual environment, and a folder in which its commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cwd"
        self.folder.mkdir(parents=True)
        self._bin = folder / "venv" / "bin"
        succeed(run(sys.executable, "-m", "venv", folder / "venv", cwd=folder))
        # neither our own path nor a setting of the caller's may reach what is tested
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        self._env = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("TREADLE_")}
        self._env["PATH"] = f"{self._bin}{os.pathsep}{os.environ['PATH']}"

    def run(self, program: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one of the environment's programs, whatever comes of it."""
        return run(self._bin / program, *arguments, cwd=self.folder, env={**self._env, **variables})

    def must(self, program: str, *arguments: str | Path, **variables: str) -> str:
        """Run one that has to succeed. Returns what it printed."""
        return succeed(self.run(program, *arguments, **variables)).stdout

    def pip(self, *arguments: str | Path) -> None:
        self.must("python", "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def distributions(self) -> set[str]:
        """Names of what is installed."""
        listed: list[dict[str, Any]] = json.loads(self.must("python", "-m", "pip", "list", "--format=json"))
        return {item["name"].lower().replace("_", "-") for item in listed}


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    succeed(run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder))
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="session")
def environment_with(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """An environment with Treadle's base package: the built `wheel`, or an `editable` checkout. Tests leave it as it was."""
    made: dict[str, Environment] = {}

    def make(kind: str) -> Environment:
        if kind not in made:
            environment = Environment(tmp_path_factory.mktemp(kind))
            environment.pip("install", *(["--editable", ROOT] if kind == "editable" else [artifacts["wheel"]]))
            made[kind] = environment
        return made[kind]

    return make
