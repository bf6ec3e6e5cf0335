"""preempt.recompute: a victim gives up its blocks and computes them again when it resumes."""

from __future__ import annotations

from treadle import Preemption, Request, Step, Trait, hookimpl
from treadle_plugins.preempt.victims import VictimSettings, choose_victim


class Recompute:
    """Full blocks of a victim stay cached until they are evicted, so that often little is computed twice."""

    Settings = VictimSettings
    traits = (Trait.RECOMPUTE,)

    def __init__(self, settings: VictimSettings) -> None:
        self._settings = settings

    @hookimpl
    def preempt(self, step: Step, request: Request, num_blocks: int) -> Preemption | None:
        """The victim; the request itself when it is the last one."""
        victim = choose_victim(step, request, self._settings.victim)
        if victim is None:
            return None
        return Preemption(victim, num_blocks=num_blocks or None if self._settings.partial else None)
