"""admit.windowed: arrivals are gathered for a few milliseconds, so that not each of them interrupts the batch."""

from __future__ import annotations

from pydantic import Field

from treadle import NotBefore, Open, Step, StrategySettings, hookimpl


class WindowedSettings(StrategySettings):
    """How long arrivals are gathered."""

    max_batch_size: int = Field(24, ge=1)
    """Most running requests."""
    window_ms: float = Field(5.0, gt=0)
    """Milliseconds between two openings; 2 to 10 is sensible. A request waits two windows at most, if there is a place."""
    min_batch: int = Field(4, ge=1)
    """Waiting requests that open the gate once the window is over."""


class Windowed:
    """Open once a window when enough requests wait, and in any case when one has waited two windows."""

    Settings = WindowedSettings

    def __init__(self, settings: WindowedSettings) -> None:
        self._settings = settings
        self._window_s = settings.window_ms / 1000
        self._opened_s: float | None = None
        self._opened_in = 0
        """Number of the step in which it was open last, but for places: asked again in it, it still is."""

    @hookimpl
    def gate(self, step: Step) -> Open | NotBefore:
        """Open, or say until when arrivals are gathered."""
        places = self._settings.max_batch_size - step.num_running
        oldest = step.oldest_waiting
        if places <= 0:
            return self._full(step)
        if oldest is None:
            return Open(places)
        if self._opened_in == step.number:
            self._opened_s = step.now
            return Open(places)
        opens_s = oldest.arrival_s + 2 * self._window_s
        if step.num_waiting >= min(self._settings.min_batch, places):
            # a full batch waits for the rest of the window only
            since = oldest.arrival_s if self._opened_s is None else self._opened_s
            opens_s = min(opens_s, since + self._window_s)
        if opens_s > step.now:
            return NotBefore(opens_s)
        self._opened_s = step.now
        self._opened_in = step.number
        return Open(places)

    def _full(self, step: Step) -> Open | NotBefore:
        """Whoever gives up a place now gives it to somebody only if the window is over."""
        closed_until_s = step.now if self._opened_s is None else self._opened_s + self._window_s
        if self._opened_in == step.number or closed_until_s <= step.now:
            self._opened_in = step.number
            return Open(0, full=True)
        return NotBefore(closed_until_s)
