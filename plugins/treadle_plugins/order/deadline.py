"""order.deadline: the request whose first token is due soonest goes first; latency-sensitive traffic has a lane of its own."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from treadle import Admission, Request, Step, StrategySettings, hookimpl
from treadle_plugins.order.waiting_queue import KeyedOrder


class DeadlineSettings(StrategySettings):
    """When first tokens are due, and what is kept free for those in a hurry."""

    lane_label: str = "lane"
    """The label that names a request's lane."""
    target_label: str = "ttft_ms"
    """The label by which a request states its own target, in milliseconds; at most `bulk_target_ms` counts."""
    targets_ms: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default={"interactive": 500.0})
    """For each lane, when the first token is due after arrival. Its requests are latency-sensitive."""
    bulk_target_ms: float = Field(default=30_000.0, gt=0, allow_inf_nan=False)
    """The same for all other traffic. It is overtaken only by requests that arrive within this time after it: that bounds its
    wait under endless arrivals, as long as it gets a place."""
    max_bulk_running: int | None = Field(default=None, ge=1)
    """Most requests outside the lanes that run together, so that places are left for those within; unset means any number."""


class Deadline(KeyedOrder):
    """Earliest due date first."""

    Settings = DeadlineSettings

    def __init__(self, settings: DeadlineSettings) -> None:
        super().__init__()
        self._settings = settings

    def key(self, request: Request) -> float:
        """When its first token is due."""
        return request.arrival_s + self._target_ms(request) / 1000

    @hookimpl(tryfirst=True)  # a rule in front of the admit strategy, which has an answer for everybody
    def admit(self, step: Step, request: Request) -> Admission | None:
        """Leave bulk traffic waiting while enough of it runs; everything else is for others to decide."""
        most = self._settings.max_bulk_running
        if most is None or self._in_lane(request):
            return None
        running = sum(not self._in_lane(other) for other in step.running)
        return Admission.SKIP if running >= most else None

    def _in_lane(self, request: Request) -> bool:
        return request.labels.get(self._settings.lane_label) in self._settings.targets_ms

    def _target_ms(self, request: Request) -> float:
        stated = _milliseconds(request.labels.get(self._settings.target_label))
        if stated is not None:
            return min(stated, self._settings.bulk_target_ms)
        lane = request.labels.get(self._settings.lane_label, "")
        return self._settings.targets_ms.get(lane, self._settings.bulk_target_ms)


def _milliseconds(text: str | None) -> float | None:
    """What a label states. It is free text: what is no finite number of at least 0, such as "soon" or "nan", states nothing."""
    try:
        stated = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return stated if math.isfinite(stated) and stated >= 0 else None
