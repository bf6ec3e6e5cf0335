"""What hooks see of a step: the time, the pool, who runs and who waits. Queries only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from treadle.blocks import PoolView
from treadle.contracts import Clock
from treadle.request import LiveRequest, Request


class Step:
    """One step, while it is planned and committed."""

    def __init__(
        self,
        number: int,
        clock: Clock,
        pool: PoolView,
        running: dict[str, LiveRequest],
        waiting: OrderedDict[str, LiveRequest],
    ) -> None:
        self.number = number
        """Counts from 1."""
        self.clock = clock
        """Where all time comes from; `now` is what it read when the step began."""
        self.now = clock.now()
        self.pool = pool
        self._running = running
        self._waiting = waiting

    @property
    def running(self) -> tuple[Request, ...]:
        """Running requests, in the order of their admission."""
        return tuple(self._running.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to start, or to resume after preemption."""
        return len(self._waiting)

    @property
    def oldest_waiting(self) -> Request | None:
        """The request that has waited longest; preempted ones come before those that never started."""
        return next(iter(self._waiting.values()), None)

    @property
    def num_decoding(self) -> int:
        """Running requests that need just one token computed."""
        return sum(request.num_pending == 1 for request in self._running.values())

    def is_waiting(self, request: Request) -> bool:
        return self._waiting.get(request.id) is request

    def is_running(self, request: Request) -> bool:
        return self._running.get(request.id) is request

    def victims(self) -> Iterator[Request]:
        """Running requests that may be preempted now, last admitted first: those with no work planned in this step."""
        for request in reversed(self._running.values()):
            if not request.planned_in(self.number):
                yield request
