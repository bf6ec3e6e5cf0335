"""order.priority: urgent requests first, with aging."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from pydantic import Field

from treadle import Preemption, Request, Step, StrategySettings, Trait, hookimpl
from treadle_plugins.order.waiting_queue import KeyedOrder

MOST_LEVELS = 10**9
"""Priorities beyond this count as this: a float could not tell arrivals of such requests apart."""


class PrioritySettings(StrategySettings):
    """What a level of priority is worth."""

    level_s: float = Field(10.0, gt=0, allow_inf_nan=False)
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
        self.traits = (Trait.URGENT_REQUESTS_PREEMPT,) if settings.preempt else ()

    @hookimpl(wrapper=True)
    def preempt(self, step: Step, request: Request) -> Generator[None, Preemption | None, Preemption | None]:
        """For a waiting request only those give way that stand behind it, aging counted: the last of them."""
        answer = yield
        if answer is None or not request.is_waiting or answer.victim.priority >= request.priority:
            return answer  # nothing to change, or a broken rule, which the core names
        behind = [v for v in step.victims() if v.priority < request.priority and self.key(v) > self.key(request)]
        return replace(answer, victim=max(behind, key=self.key)) if behind else None

    def key(self, request: Request) -> float:
        """Its arrival, moved ahead by its priority."""
        # a caller may give any whole number, also one that no float can hold
        priority = max(-MOST_LEVELS, min(request.priority, MOST_LEVELS))
        return request.arrival_s - priority * self._level_s
