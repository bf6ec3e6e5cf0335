"""preempt.recompute: a victim gives up its blocks and computes them again when it resumes."""

from __future__ import annotations

from typing import Literal

from treadle import Preemption, Request, Step, StrategySettings, hookimpl


class RecomputeSettings(StrategySettings):
    """Who gives way."""

    victim: Literal["last_admitted", "lowest_priority"] = "last_admitted"
    """The last admitted request has the least to lose; with `lowest_priority`, it is the last admitted of the least urgent."""


class Recompute:
    """Full blocks of a victim stay cached until they are evicted, so that often little is computed twice."""

    Settings = RecomputeSettings
    traits = ("recompute",)

    def __init__(self, settings: RecomputeSettings) -> None:
        self._by_priority = settings.victim == "lowest_priority"

    @hookimpl
    def preempt(self, step: Step, request: Request) -> Preemption | None:
        """The victim; the request itself when it is the last one."""
        victims = list(step.victims())
        if request.is_waiting:
            # a waiting request takes from those below it only, from the lowest first
            victims = [victim for victim in victims if victim.priority < request.priority]
        if not victims:
            return None
        if self._by_priority or request.is_waiting:
            return Preemption(min(victims, key=lambda victim: victim.priority))
        return Preemption(victims[0])
