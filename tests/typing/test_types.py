"""What a type checker tells the author of a plugin."""

from __future__ import annotations

import pytest
from mypy import api

HEAD = """
from typing import cast
from treadle import Admission, Engine, Request, SamplingParams, Step, hookimpl
from treadle.hookspecs import Hooks
"""


def errors(code: str) -> str:
    """What mypy says of the code, one error a line."""
    out, problem, _ = api.run(["--strict", "--config-file=", "--no-error-summary", "-c", HEAD + code])
    assert not problem, problem
    return out


def test_a_sound_plugin_passes() -> None:
    assert not errors("""
class Rule:
    @hookimpl
    def admit(self, step: Step, request: Request) -> Admission | None:
        return Admission.SKIP if request.labels.get("tenant") == "a" and step.num_running else None
""")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("request.num_computed = 3", 'Property "num_computed" defined in "Request" is read-only'),
        ("request.advance(3)", '"Request" has no attribute "advance"'),
        ("step.pool.take([1])", '"PoolView" has no attribute "take"'),
        ("step.running[0] = request", "Unsupported target for indexed assignment"),
    ],
)
def test_requests_and_pools_are_read_only_for_plugins(line: str, message: str) -> None:
    assert message in errors(f"def rule(step: Step, request: Request) -> None:\n    {line}\n")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("hook.allocate(step=step, request=request, num_blocks='2')", "incompatible type"),
        ("hook.allocate(step=step, request=request)", 'Missing positional argument "num_blocks"'),
        ("hook.allocat(step=step)", '"Hooks" has no attribute "allocat"'),
        ("x: int = hook.gate(step=step)", "Incompatible types in assignment"),
    ],
)
def test_hook_calls_are_typed(call: str, message: str) -> None:
    assert message in errors(f"def ask(hook: Hooks, step: Step, request: Request) -> None:\n    {call}\n")


def test_the_library_is_typed_for_its_callers() -> None:
    assert "incompatible type" in errors(
        "def go(engine: Engine) -> None:\n    engine.submit('x', SamplingParams(max_tokens='8'))\n"
    )
