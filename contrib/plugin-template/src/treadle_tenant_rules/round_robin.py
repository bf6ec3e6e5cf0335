"""order.round_robin: tenants take turns, so that one with many requests does not keep the others waiting.

Each request gets a turn, a clock time, when it is queued, and the earliest turn comes first:

    turn = the latest of  its arrival,
                          the latest turn that has started,
                          the turn of the request before it + turn_s, if its tenant has any that wait
           but no later than its arrival + max_delay_s

Tenant a posts four requests and tenant b two, a moment later; turn_s is 1:

    turn    0      1      2      3
    a      a1     a2     a3     a4          order: a1 b1 a2 b2 a3 a4
    b        b1     b2

A turn does not change while a request waits. That bounds the wait, also under endless arrivals: nobody is overtaken by a
request that arrives more than max_delay_s after it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from pydantic import Field
from treadle import Request, StashKey, StrategySettings, hookimpl

TURN: StashKey[float] = StashKey()
Entry = tuple[float, int, Request]


class RoundRobinSettings(StrategySettings):
    """Whose turn is when."""

    label: str = "tenant"
    """The label that says whose a request is; those without it count as one tenant."""
    turn_s: float = Field(1.0, gt=0)
    """Seconds between two turns of a tenant. Others who arrive within this time of a request go before its tenant's next one."""
    max_delay_s: float = Field(30.0, gt=0)
    """Most seconds by which earlier requests of its own tenant put a request back."""


class RoundRobin:
    """The earliest turn first."""

    Settings = RoundRobinSettings
    treadle_hooks = 2

    def __init__(self, settings: RoundRobinSettings) -> None:
        self._settings = settings
        self._heap: list[Entry] = []
        self._waiting: dict[int, Entry] = {}
        """By the request's number: an id may be given again."""
        self._num_waiting: Counter[str] = Counter()
        self._last_turn: dict[str, float] = {}
        self._started_turn = 0.0

    @hookimpl
    def request_queued(self, request: Request) -> None:
        """It gets its turn."""
        tenant = self._tenant(request)
        turn = max(request.arrival_s, self._started_turn)
        if tenant in self._last_turn:
            turn = max(turn, self._last_turn[tenant] + self._settings.turn_s)
        turn = min(turn, request.arrival_s + self._settings.max_delay_s)
        self._last_turn[tenant] = turn
        request.stash[TURN] = turn
        self._add(request)

    @hookimpl
    def request_preempted(self, request: Request) -> None:
        """It waits again, and keeps its turn."""
        self._add(request)

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        """Whoever is queued from now on gets no turn before this one."""
        self._started_turn = max(self._started_turn, request.stash[TURN])
        self._remove(request)

    @hookimpl
    def request_resumed(self, request: Request) -> None:
        """It waits no more."""
        self._remove(request)

    @hookimpl
    def request_finished(self, request: Request) -> None:
        """It waits no more, if it did."""
        if request.sequence in self._waiting:
            self._remove(request)

    @hookimpl
    def order(self) -> Iterator[Request]:
        """By turn. Reading the first k costs O(k log n), however many wait."""
        passed: list[Entry] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._waiting.get(entry[1]) is entry:
                    passed.append(entry)
                    yield entry[2]
        finally:
            for entry in passed:
                if self._waiting.get(entry[1]) is entry:
                    heapq.heappush(self._heap, entry)
            if len(self._heap) > 64 + 4 * len(self._waiting):
                # mostly entries of requests that were cancelled
                self._heap = list(self._waiting.values())
                heapq.heapify(self._heap)

    def _tenant(self, request: Request) -> str:
        return request.labels.get(self._settings.label, "")

    def _add(self, request: Request) -> None:
        entry = (request.stash[TURN], request.sequence, request)
        self._waiting[request.sequence] = entry
        self._num_waiting[self._tenant(request)] += 1
        heapq.heappush(self._heap, entry)

    def _remove(self, request: Request) -> None:
        """Its entry stays in the heap until it comes up, or until most entries are such."""
        del self._waiting[request.sequence]
        tenant = self._tenant(request)
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            # nobody of this tenant waits: it starts anew, and costs no memory
            del self._num_waiting[tenant]
            self._last_turn.pop(tenant, None)
