"""preempt.swap: a victim's KV is copied to host memory and comes back when it resumes. Nothing is computed twice.

The copies are exact. Where swap space is full, the core preempts by recompute instead, and tells so.
"""

from __future__ import annotations

import treadle
from treadle import EngineInfo, Preemption, PreemptionMode, Request, Step, hookimpl
from treadle.errors import ConfigError
from treadle_plugins.preempt.victims import VictimSettings, choose_victim


class Swap:
    """Copy the victim's own blocks; shared ones keep their reference."""

    Settings = VictimSettings

    def __init__(self, settings: VictimSettings) -> None:
        self._settings = settings

    @staticmethod
    def check_configuration(own: VictimSettings, settings: treadle.Settings) -> None:  # noqa: ARG004  # any victim needs it
        """Refuse a configuration without swap space. Whether a block fits into it is known when the model is."""
        if not settings.root.pool.swap_memory:
            swap, memory = settings.choices["preempt"].origin, settings.origins.get(("pool", "swap_memory"), "default")
            raise ConfigError(
                f"preempt.strategy='swap' (from {swap}) needs swap space, and pool.swap_memory=0 (from {memory}) gives none; "
                "set it to a size such as '1GiB', or choose 'recompute'"
            )

    @hookimpl
    def engine_started(self, engine: EngineInfo) -> None:
        """Refuse to start without swap space."""
        if not engine.num_swap_blocks:
            raise ConfigError(
                "preempt.strategy='swap' needs swap space, and pool.swap_memory holds no block; raise it, or choose 'recompute'"
            )

    @hookimpl
    def preempt(self, step: Step, request: Request, num_blocks: int) -> Preemption | None:
        """The victim; the request itself when it is the last one."""
        victim = choose_victim(step, request, self._settings.victim)
        if victim is None:
            return None
        return Preemption(victim, PreemptionMode.SWAP, num_blocks or None if self._settings.partial else None)
