"""preempt.auto: swap or recompute, whichever takes less time by what was measured so far."""

from __future__ import annotations

from pydantic import Field

from treadle import EngineInfo, Preemption, PreemptionMode, Request, Step, StepReport, Trait, hookimpl
from treadle_plugins.preempt.victims import VictimSettings, choose_victim, own_blocks


class AutoSettings(VictimSettings):
    """What is assumed before anything was measured, and how fast measurements replace it."""

    prefill_us: float = Field(default=500.0, gt=0)
    """Microseconds to compute one token again, until measured."""
    copy_us: float = Field(default=200.0, gt=0)
    """Microseconds to copy one block one way, until measured."""
    memory: float = Field(default=0.9, ge=0, lt=1)
    """Weight of what was known against a new measurement."""


class Auto:
    """Compare copying a victim's own blocks out and in with computing its tokens again."""

    Settings = AutoSettings
    traits = (Trait.RECOMPUTE,)

    def __init__(self, settings: AutoSettings) -> None:
        self._settings = settings
        self._prefill_s = settings.prefill_us / 1e6
        self._copy_s = settings.copy_us / 1e6
        self._decode_step_s: float | None = None
        self._has_swap = False

    @hookimpl
    def engine_started(self, engine: EngineInfo) -> None:
        """Without swap space everything is recomputed."""
        self._has_swap = engine.num_swap_blocks > 0

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        """Learn what a step of decode, a token of prefill and the copy of a block cost."""
        seconds = report.ended_s - report.started_s - report.copy_s
        if report.num_swapped:
            self._copy_s = self._blend(self._copy_s, report.copy_s / report.num_swapped)
        if not report.num_works:
            return
        if not report.num_prefill_tokens:
            self._decode_step_s = seconds if self._decode_step_s is None else self._blend(self._decode_step_s, seconds)
        elif report.num_prefill_tokens >= 32:
            # the step would have taken the time of a decode step anyway
            extra = seconds - (self._decode_step_s or 0.0)
            self._prefill_s = self._blend(self._prefill_s, max(extra, 0.0) / report.num_prefill_tokens)

    @hookimpl
    def preempt(self, step: Step, request: Request, num_blocks: int) -> Preemption | None:
        """The victim and the cheaper way for it."""
        victim = choose_victim(step, request, self._settings.victim)
        if victim is None:
            return None
        part = num_blocks or None if self._settings.partial else None
        copied = own_blocks(step, victim) if part is None else part
        lost = victim.num_computed if part is None else part * step.pool.block_size
        if self._has_swap and 2 * copied * self._copy_s < lost * self._prefill_s:
            return Preemption(victim, PreemptionMode.SWAP, part)
        return Preemption(victim, PreemptionMode.RECOMPUTE, part)

    def _blend(self, known: float, measured: float) -> float:
        return self._settings.memory * known + (1 - self._settings.memory) * measured
