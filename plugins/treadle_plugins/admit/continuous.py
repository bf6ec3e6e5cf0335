"""admit.continuous: iteration-level scheduling; a request starts as soon as there is a place.

The method is that of Orca (Yu et al., OSDI 2022): the batch is made anew for every step.
"""

from __future__ import annotations

from pydantic import Field

from treadle import Admission, Match, Open, Step, StrategySettings, hookimpl


class ContinuousSettings(StrategySettings):
    """How many run together, and how often new ones may join."""

    max_batch_size: int = Field(32, ge=1)
    """Most running requests."""
    max_inserts: int | None = Field(None, ge=1)
    """Most requests that start in one step; 2 keeps the latency of running ones even."""
    every_steps: int = Field(1, ge=1)
    """Let requests start only every so many steps, or when nothing runs."""
    near_end_tokens: int = Field(0, ge=0)
    """Let them start in between too, when a running request may have at most this many tokens to go."""
    spare_blocks: int = Field(0, ge=0)
    """Blocks to leave for running requests to grow into when one starts."""


class Continuous:
    """Start whoever is next while there is a place in the batch and room for the whole prompt."""

    Settings = ContinuousSettings

    def __init__(self, settings: ContinuousSettings) -> None:
        self._settings = settings
        self._turn = 0
        """Number of the last step in which requests might start."""

    @hookimpl
    def gate(self, step: Step) -> Open:
        """Free places, in steps in which requests may start."""
        if step.num_running and not self._is_turn(step):
            return Open(0)
        places = self._settings.max_batch_size - step.num_running
        if places <= 0:
            return Open(0, full=places == 0)
        return Open(places if self._settings.max_inserts is None else min(places, self._settings.max_inserts))

    @hookimpl
    def admit(self, step: Step, match: Match) -> Admission:
        """Stop where the whole prompt would not fit: a start that must soon be preempted is work thrown away."""
        if step.num_running == 0:
            return Admission.START
        needed = match.num_blocks_needed + self._settings.spare_blocks
        return Admission.START if needed <= step.pool.num_available else Admission.NO_ROOM

    def _is_turn(self, step: Step) -> bool:
        if step.number % self._settings.every_steps == 0 or self._somebody_ends_soon(step):
            # it stays so until the step ends, also when the one that ends soon is preempted
            self._turn = step.number
        return self._turn == step.number

    def _somebody_ends_soon(self, step: Step) -> bool:
        near = self._settings.near_end_tokens
        return near > 0 and any(r.max_total_tokens - r.num_tokens <= near for r in step.running)
