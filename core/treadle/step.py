"""What hooks see of a step: the time, the pool, who runs and who waits. Queries only."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from treadle.blocks import PoolView
from treadle.contracts import Clock
from treadle.request import LiveRequest, Request


class Step:
    """One step, while it is scheduled and committed."""

    def __init__(
        self,
        number: int,
        clock: Clock,
        pool: PoolView,
        running: Mapping[LiveRequest, None],
        waiting: Mapping[LiveRequest, None],
        giving_way: Container[object] = (),
    ) -> None:
        self.number = number
        """Counts from 1."""
        self.clock = clock
        """Where all time comes from; `now` is what it read when the step began."""
        self.now = clock.now()
        self.pool = pool
        self._running = running
        self._waiting = waiting
        self._giving_way = giving_way

    @property
    def running(self) -> tuple[Request, ...]:
        """Running requests, in the order of their admission."""
        return tuple(self._running)

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
        return next(iter(self._waiting), None)

    @property
    def num_decoding(self) -> int:
        """Running requests that need just one token computed."""
        return sum(request.num_pending == 1 for request in self._running)

    def is_waiting(self, request: Request) -> bool:
        return request in self._waiting

    def is_running(self, request: Request) -> bool:
        return request in self._running

    def may_give_way(self, request: Request) -> bool:
        """Whether it runs, no work of it is planned in this step, and it was not chosen to give way already."""
        return request in self._running and not request.planned_in(self.number) and request not in self._giving_way

    def victims(self) -> Iterator[Request]:
        """Running requests that may be preempted now, last admitted first."""
        for request in reversed(tuple(self._running)):
            if self.may_give_way(request):
                yield request
