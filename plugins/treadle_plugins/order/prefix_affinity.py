"""order.prefix_affinity: requests that begin like running or cached ones go first, while their blocks are still there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pydantic import Field

from treadle import Request, StashKey, Step, StrategySettings, hookimpl
from treadle_plugins.order.waiting_queue import WaitingQueue

GROUP: StashKey[int | None] = StashKey()


class PrefixAffinitySettings(StrategySettings):
    """What counts as the same beginning, and how long others may be kept waiting for it."""

    prefix_tokens: int = Field(default=64, ge=1)
    """Requests whose first tokens are equal, this many, belong together."""
    max_delay_s: float = Field(default=5.0, gt=0)
    """A request that has waited this long goes before all that have not: that bounds its wait under endless hot arrivals."""


class PrefixAffinity:
    """Overdue requests first, then those of hot groups, then the others; within a group in the order of arrival.

    A group is hot while a member runs, or while the first block of one is indexed.
    """

    Settings = PrefixAffinitySettings

    def __init__(self, settings: PrefixAffinitySettings) -> None:
        self._settings = settings
        self._all = WaitingQueue()
        self._waiting: dict[int, WaitingQueue] = {}
        self._running: Counter[int] = Counter()
        self._cached: Counter[int] = Counter()
        self._group_of_block: dict[int, int] = {}
        self._hot_and_waiting: dict[int, None] = {}
        """In the order in which they became so."""

    @hookimpl
    def order(self, step: Step) -> Iterator[Request]:
        """Read as far as the core needs."""
        seen: set[int] = set()
        for request in self._all:
            if step.now - request.arrival_s < self._settings.max_delay_s:
                break
            seen.add(request.sequence)
            yield request
        for group in list(self._hot_and_waiting):
            for request in self._waiting.get(group, ()):
                if request.sequence not in seen:
                    seen.add(request.sequence)
                    yield request
        for request in self._all:
            if request.sequence not in seen:
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
        self._count(self._running, request.stash[GROUP], -1)
        self._wait(request)

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        """Its like are hot now."""
        self._unwait(request)
        self._count(self._running, request.stash[GROUP], 1)

    @hookimpl
    def request_resumed(self, request: Request) -> None:
        """Its like are hot again."""
        self._unwait(request)
        self._count(self._running, request.stash[GROUP], 1)

    @hookimpl
    def request_finished(self, request: Request) -> None:
        """It neither waits nor runs."""
        if request.batch is None:
            self._unwait(request)
        else:
            self._count(self._running, request.stash[GROUP], -1)

    @hookimpl
    def blocks_filled(self, request: Request, block_ids: Sequence[int]) -> None:
        """Its like are hot as long as its first block is there."""
        group = request.stash[GROUP]
        if group is not None and block_ids[0] == request.block_table[0]:
            self._group_of_block[block_ids[0]] = group
            self._count(self._cached, group, 1)

    @hookimpl
    def blocks_evicted(self, block_ids: Sequence[int]) -> None:
        """Their like have cooled down."""
        for block_id in block_ids:
            self._count(self._cached, self._group_of_block.pop(block_id, None), -1)

    def _wait(self, request: Request) -> None:
        group = request.stash[GROUP]
        self._all.add(request, request.arrival_s)
        if group is not None:
            self._waiting.setdefault(group, WaitingQueue()).add(request, request.arrival_s)
            self._note(group)

    def _unwait(self, request: Request) -> None:
        group = request.stash[GROUP]
        self._all.discard(request)
        if group is not None and group in self._waiting:
            self._waiting[group].discard(request)
            if not len(self._waiting[group]):
                del self._waiting[group]
            self._note(group)

    def _count(self, counter: Counter[int], group: int | None, change: int) -> None:
        if group is None:
            return
        counter[group] += change
        if not counter[group]:
            del counter[group]
        self._note(group)

    def _note(self, group: int) -> None:
        if group in self._waiting and (group in self._running or group in self._cached):
            self._hot_and_waiting.setdefault(group)
        else:
            self._hot_and_waiting.pop(group, None)
