"""What all order strategies share: waiting requests, sorted by a key that is fixed when they arrive.

A key that does not change while a request waits is what makes aging cheap. If a request's claim grows by one for every second
that it waits, then claims grow alike for all, and only `arrival - head start` ever decides between two of them. So the queue is a
heap that is never re-sorted, and the bound on waiting is plain: nobody is overtaken by a request that arrived later than the
largest difference of head starts after it.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator

from treadle import Request, hookimpl

Entry = tuple[float, int, Request]


class WaitingQueue:
    """Requests in the order of their keys. Adding and removing cost O(log n), reading the first k costs O(k log n)."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._entries: dict[int, Entry] = {}
        """By the request's number: an id may be given again while a plugin still knows its first holder."""
        self._num_readers = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, key: float) -> None:
        """Queue `request`; among equal keys the earlier submission comes first."""
        entry = (key, request.sequence, request)
        self._entries[request.sequence] = entry
        heapq.heappush(self._heap, entry)

    def discard(self, request: Request) -> None:
        """Forget `request`. Its entry stays in the heap until it comes up, or until too many such entries are there."""
        self._entries.pop(request.sequence, None)
        # not while somebody reads: what was read already would come up again
        if not self._num_readers and len(self._heap) > 64 and len(self._heap) > 4 * len(self._entries):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def first(self) -> Request | None:
        """The first request, or None."""
        while self._heap and self._entries.get(self._heap[0][1]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def __iter__(self) -> Iterator[Request]:
        """First to last; requests may leave while it is read."""
        passed: list[Entry] = []
        self._num_readers += 1
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self._entries.get(entry[1]) is entry:
                    passed.append(entry)
                    yield entry[2]
        finally:
            self._num_readers -= 1
            for entry in passed:
                if self._entries.get(entry[1]) is entry:
                    heapq.heappush(self._heap, entry)


class KeyedOrder(ABC):
    """An order strategy that needs to say only what a request's key is."""

    def __init__(self) -> None:
        self._queue = WaitingQueue()

    @abstractmethod
    def key(self, request: Request) -> float:
        """Smaller comes first. Must not change while the request lives."""

    @hookimpl
    def request_queued(self, request: Request) -> None:
        """It waits."""
        self._queue.add(request, self.key(request))

    @hookimpl
    def request_preempted(self, request: Request) -> None:
        """It waits again, at its old place."""
        self._queue.add(request, self.key(request))

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        """It waits no more."""
        self._queue.discard(request)

    @hookimpl
    def request_resumed(self, request: Request) -> None:
        """It waits no more."""
        self._queue.discard(request)

    @hookimpl
    def request_finished(self, request: Request) -> None:
        """It waits no more, if it did."""
        self._queue.discard(request)

    @hookimpl
    def order(self) -> Iterator[Request]:
        """By key."""
        return iter(self._queue)
