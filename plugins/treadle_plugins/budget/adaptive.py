"""budget.adaptive: keep the time per output token at a target, by moving the prefill share and the batch limit.

Additive increase, multiplicative decrease, as in TCP's congestion control (Jacobson, 1988): it gives way fast and recovers
steadily.
"""

from __future__ import annotations

from collections.abc import Generator

from pydantic import Field

from treadle import NotBefore, Open, Step, StepReport, StrategySettings, Trait, hookimpl
from treadle_plugins.budget.decode_first import StepBudget


class AdaptiveSettings(StrategySettings):
    """The target, and the range within which it is pursued."""

    tpot_ms: float = Field(default=50.0, gt=0)
    """Target time per output token: steps with decode in them are to take no longer."""
    max_prefill_tokens: int = Field(default=2048, ge=1)
    """Largest prefill share of a step."""
    min_prefill_tokens: int = Field(default=16, ge=1)
    """Smallest prefill share of a step: prefill never stops."""
    min_batch_size: int = Field(default=1, ge=1)
    """The batch limit does not go below this."""
    max_batch_size: int = Field(default=256, ge=1)
    """Nor above this; the admit strategy has a limit of its own."""
    memory: float = Field(default=0.7, ge=0, lt=1)
    """Weight of earlier steps in the measured time."""


class Adaptive:
    """First the prefill share gives way, then the batch limit; they recover in the reverse order."""

    Settings = AdaptiveSettings
    traits = (Trait.CHUNKED_PREFILL,)

    def __init__(self, settings: AdaptiveSettings) -> None:
        self._settings = settings
        self._step_s: float | None = None
        self._batch = float(settings.max_batch_size)
        self._prefill = float(settings.max_prefill_tokens)

    @property
    def prefill_tokens(self) -> int:
        """The prefill share of a step, at present."""
        return int(self._prefill)

    @property
    def batch_size(self) -> int:
        """The batch limit, at present."""
        return int(self._batch)

    @hookimpl
    def budget(self) -> StepBudget:
        """Every decode, and the prefill share."""
        return StepBudget(decode=1 << 30, prefill=self.prefill_tokens)

    @hookimpl(wrapper=True)
    def gate(self, step: Step) -> Generator[None, Open | NotBefore | None, Open | NotBefore | None]:
        """No more places than the batch limit has."""
        answer = yield
        if isinstance(answer, NotBefore):
            return answer
        places = self.batch_size - step.num_running
        if places < 0:
            return Open(0)  # the limit has sunk below those that run: a place that one of them gave up would go to nobody
        if answer is not None and answer.most is not None and answer.most <= places:
            return answer
        return Open(places, full=places == 0)

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        """Move towards the target."""
        if not report.num_works:
            return
        seconds = report.ended_s - report.started_s
        memory = self._settings.memory
        self._step_s = seconds if self._step_s is None else memory * self._step_s + (1 - memory) * seconds
        if self._step_s > self._settings.tpot_ms / 1000:
            self._give_way(report.num_running)
        else:
            self._recover()

    def _give_way(self, num_running: int) -> None:
        limits = self._settings
        if self._prefill > limits.min_prefill_tokens:
            self._prefill = max(limits.min_prefill_tokens, self._prefill * 0.7)
        else:
            self._batch = max(limits.min_batch_size, min(self._batch, num_running) * 0.9)

    def _recover(self) -> None:
        limits = self._settings
        if self._batch < limits.max_batch_size:
            self._batch = min(limits.max_batch_size, self._batch + 0.25)
        else:
            self._prefill = min(limits.max_prefill_tokens, self._prefill + limits.max_prefill_tokens / 64)
