"""admit.static: the classic base line. Wait for a full batch or a time-out, run it to the end, then take the next."""

from __future__ import annotations

from pydantic import Field

from treadle import NotBefore, Open, Step, StrategySettings, hookimpl


class StaticSettings(StrategySettings):
    """How large a batch is, and how long to wait for it."""

    batch_size: int = Field(16, ge=1)
    """Requests of a full batch."""
    max_wait_ms: float = Field(100.0, ge=0)
    """Longest wait for a batch to fill, from its oldest request's arrival."""


class Static:
    """Nobody joins a batch that runs."""

    Settings = StaticSettings

    def __init__(self, settings: StaticSettings) -> None:
        self._settings = settings

    @hookimpl
    def gate(self, step: Step) -> Open | NotBefore:
        """Open for a batch when none runs and it is full, or has waited long enough."""
        if step.num_running:
            return Open(0)
        oldest = step.oldest_waiting
        if oldest is None or step.num_waiting >= self._settings.batch_size:
            return Open(self._settings.batch_size)
        opens_s = oldest.arrival_s + self._settings.max_wait_ms / 1000
        return NotBefore(opens_s) if opens_s > step.now else Open(self._settings.batch_size)
