"""Profiles of hypothesis. `ci`, the default, is repeatable; `--hypothesis-profile=soak` searches long, and anew each time."""

from __future__ import annotations

from datetime import timedelta

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
