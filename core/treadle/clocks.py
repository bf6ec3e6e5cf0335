"""Clocks: the real one, and one that stands still until somebody waits."""

from __future__ import annotations

import time


class MonotonicClock:
    """Real time."""

    def now(self) -> float:
        """Seconds of the system's monotonic clock."""
        return time.monotonic()

    def wait(self, until_s: float) -> bool:  # noqa: ARG002  # the signature of Clock
        """False: the caller waits, so that an arrival can wake it."""
        return False


class VirtualClock:
    """Time for tests and simulations: waiting is instant."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        """Virtual seconds."""
        return self._now

    def wait(self, until_s: float) -> bool:
        """Jump to `until_s`, never back."""
        self._now = max(self._now, until_s)
        return True
