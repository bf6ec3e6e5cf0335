"""order.prefix_affinity: requests that begin like running ones go first, so that they find their blocks still cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pydantic import Field

from treadle import Request, StashKey, Step, StrategySettings, hookimpl
from treadle_plugins.admission.waiting_queue import WaitingQueue

GROUP: StashKey[int | None] = StashKey()


class PrefixAffinitySettings(StrategySettings):
    """What counts as the same beginning, and how long others may be kept waiting for it."""

    prefix_tokens: int = Field(default=64, ge=1)
    """Requests whose first tokens are equal, this many, belong together."""
    max_delay_s: float = Field(default=5.0, gt=0)
    """A request that has waited this long goes before all that have not: that bounds its wait under endless hot arrivals."""


class PrefixAffinity:
    """Overdue requests first, then those of running groups, then the others, each in the order of arrival."""

    Settings = PrefixAffinitySettings

    def __init__(self, settings: PrefixAffinitySettings) -> None:
        self._settings = settings
        self._all = WaitingQueue()
        self._groups: dict[int, WaitingQueue] = {}
        self._running: Counter[int] = Counter()

    @hookimpl
    def order(self, step: Step) -> Iterator[Request]:
        """Read as far as the core needs."""
        seen: set[str] = set()
        for request in self._all:
            if step.now - request.arrival_s < self._settings.max_delay_s:
                break
            seen.add(request.id)
            yield request
        for group in list(self._running):
            for request in self._groups.get(group, ()):
                if request.id not in seen:
                    seen.add(request.id)
                    yield request
        for request in self._all:
            if request.id not in seen:
                yield request

    @hookimpl
    def request_queued(self, request: Request) -> None:
        """It waits, with its like."""
        size = self._settings.prefix_tokens
        long_enough = request.prompt_length > size
        request.stash[GROUP] = hash((request.isolation_key, request.token_ids(0, size))) if long_enough else None
        self._wait(request)

    @hookimpl
    def request_preempted(self, request: Request) -> None:
        """It waits again."""
        self._stop(request)
        self._wait(request)

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        """Its like are hot now."""
        self._run(request)

    @hookimpl
    def request_resumed(self, request: Request) -> None:
        """Its like are hot again."""
        self._run(request)

    @hookimpl
    def request_finished(self, request: Request) -> None:
        """It neither waits nor runs."""
        if request.batch is None:
            self._unwait(request)
        else:
            self._stop(request)

    def _wait(self, request: Request) -> None:
        group = request.stash[GROUP]
        self._all.add(request, request.arrival_s)
        if group is not None:
            self._groups.setdefault(group, WaitingQueue()).add(request, request.arrival_s)

    def _unwait(self, request: Request) -> None:
        group = request.stash[GROUP]
        self._all.discard(request)
        if group is not None and group in self._groups:
            self._groups[group].discard(request)
            if not len(self._groups[group]):
                del self._groups[group]

    def _run(self, request: Request) -> None:
        self._unwait(request)
        group = request.stash[GROUP]
        if group is not None:
            self._running[group] += 1

    def _stop(self, request: Request) -> None:
        group = request.stash[GROUP]
        if group is not None:
            self._running[group] -= 1
            if not self._running[group]:
                del self._running[group]
