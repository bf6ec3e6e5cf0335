"""Profiles of hypothesis: `ci`, the default, is repeatable; `--hypothesis-profile=soak` searches long, and anew each time.

Tests marked `slow` run with `--slow` alone.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings

QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=QUIET)
settings.register_profile(
    "soak",
    max_examples=10_000,
    stateful_step_count=120,
    deadline=timedelta(minutes=5),
    print_blob=True,
    suppress_health_check=QUIET,
)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run what is marked `slow` as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
