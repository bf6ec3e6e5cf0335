"""order.priority: urgent requests first, with aging."""

from __future__ import annotations

from pydantic import Field

from treadle import Request, StrategySettings
from treadle_plugins.admission.waiting_queue import KeyedOrder


class PrioritySettings(StrategySettings):
    """What a level of priority is worth."""

    level_s: float = Field(10.0, gt=0)
    """Seconds of waiting that one level of priority is worth. A request is overtaken only by those that arrive within this time,
    for each level that they are above it: that bounds its wait under endless arrivals."""
    preempt: bool = True
    """Whether a waiting request may preempt running ones of lower priority, where the preempt strategy can."""


class Priority(KeyedOrder):
    """Higher priority first; each level counts as `level_s` seconds of waiting."""

    Settings = PrioritySettings

    def __init__(self, settings: PrioritySettings) -> None:
        super().__init__()
        self._level_s = settings.level_s
        self.traits = ("urgent_requests_preempt",) if settings.preempt else ()

    def key(self, request: Request) -> float:
        """Its arrival, moved ahead by its priority."""
        return request.arrival_s - request.priority * self._level_s
