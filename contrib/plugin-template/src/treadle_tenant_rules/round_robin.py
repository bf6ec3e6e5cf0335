"""order.round_robin: tenants take turns, so that one with many requests does not keep the others waiting.

Each request gets a turn, a clock time, when it is queued, and the earliest turn comes first:

    turn = the latest of  its arrival,
                          the turn of whoever started last,
                          its tenant's previous turn + turn_s
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

    def __init__(self, settings: RoundRobinSettings) -> None:
        self._settings = settings
        self._heap: list[Entry] = []
        self._waiting: dict[str, Entry] = {}
        self._latest_turn: dict[str, float] = {}
        self._started_turn = 0.0

    @hookimpl
    def request_queued(self, request: Request) -> None:
        """It gets its turn."""
        turn = max(request.arrival_s, self._started_turn)
        tenant = request.labels.get(self._settings.label, "")
        if tenant in self._latest_turn:
            turn = max(turn, self._latest_turn[tenant] + self._settings.turn_s)
        turn = min(turn, request.arrival_s + self._settings.max_delay_s)
        self._latest_turn[tenant] = turn
        request.stash[TURN] = turn
        self._add(request)

    @hookimpl
    def request_preempted(self, request: Request) -> None:
        """It waits again, and keeps its turn."""
        self._add(request)

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        """Turns before this one are over."""
        del self._waiting[request.id]
        self._started_turn = max(self._started_turn, request.stash[TURN])
        past_s = self._started_turn - self._settings.turn_s
        # a tenant whose next turn has come anyway needs no memory; there may be any number of tenants
        self._latest_turn = {tenant: turn for tenant, turn in self._latest_turn.items() if turn > past_s}

    @hookimpl
    def request_resumed(self, request: Request) -> None:
        """It waits no more."""
        del self._waiting[request.id]

    @hookimpl
    def request_finished(self, request: Request) -> None:
        """It waits no more, if it did."""
        self._waiting.pop(request.id, None)

    @hookimpl
    def order(self) -> Iterator[Request]:
        """By turn. Reading the first k costs O(k log n), however many wait."""
        passed: list[Entry] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._waiting.get(entry[2].id) is entry:
                    passed.append(entry)
                    yield entry[2]
        finally:
            for entry in passed:
                heapq.heappush(self._heap, entry)

    def _add(self, request: Request) -> None:
        entry = (request.stash[TURN], request.sequence, request)
        self._waiting[request.id] = entry
        heapq.heappush(self._heap, entry)
