"""The base package in an environment of its own: no torch, and everything that needs none works."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.packaging.conftest import Environment


@pytest.fixture(scope="module", params=["wheel", "editable"])
def environment(request: pytest.FixtureRequest, environment_with: Callable[[str], Environment]) -> Environment:
    return environment_with(request.param)


def test_only_the_core_and_its_needs_are_installed(environment: Environment) -> None:
    installed = environment.distributions()
    assert {"treadle", "click", "pluggy", "pydantic-settings", "structlog"} <= installed
    assert not installed & {"torch", "numpy", "transformers", "tokenizers", "numba", "gguf"}


def test_help_is_there(environment: Environment) -> None:
    assert "generate" in environment.must("treadle", "--help")


def test_importing_the_package_imports_nothing_heavy(environment: Environment) -> None:
    code = "import treadle, treadle.testing, sys, json; print(json.dumps(sorted(sys.modules)))"
    modules = set(json.loads(environment.must("python", "-c", code)))
    assert "treadle.testing" in modules
    assert not [name for name in modules if name.startswith("treadle_plugins")]


def test_plugins_lists_what_the_package_offers(environment: Environment) -> None:
    offers = json.loads(environment.must("treadle", "plugins", "--json"))
    assert {("order", "fcfs"), ("execute", "simulated"), ("execute", "torch")} <= {(o["kind"], o["name"]) for o in offers}
    assert {o["package"].split()[0] for o in offers} == {"treadle"}
    assert not [o["problem"] for o in offers if o["problem"]]


def test_a_configuration_is_written_and_checked_without_torch(environment: Environment) -> None:
    environment.must("treadle", "config", "init", "--force")
    assert environment.must("treadle", "config", "check").startswith("ok")
    assert json.loads(environment.must("treadle", "config", "schema"))["properties"]["model"]


def test_a_wrong_configuration_is_refused_with_what_would_work(environment: Environment) -> None:
    environment.write("wrong.toml", 'admit = "continous"\n[allocate]\nblok_size = 64\n')
    done = environment.run("treadle", "config", "check", "wrong.toml")
    assert done.returncode == 2
    assert "did you mean 'continuous'?" in done.stderr
    assert "did you mean 'block_size'?" in done.stderr


def test_a_model_without_the_libraries_for_it_is_refused_with_the_install_that_helps(environment: Environment) -> None:
    done = environment.run("treadle", "generate", "Name the capital of France.")
    assert done.returncode != 0
    assert "treadle[cpu]" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_simulated_executor_serves_without_torch(environment: Environment) -> None:
    code = """
from treadle import Engine, SamplingParams
with Engine.load(execute="simulated") as engine:
    print(len(engine.submit([1, 2, 3], SamplingParams(max_tokens=5)).result().token_ids))
"""
    assert environment.must("python", "-c", code) == "5\n"
