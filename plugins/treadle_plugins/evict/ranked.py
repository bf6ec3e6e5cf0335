"""What lfu and fifo share: cached blocks in a heap, by a rank that does not change while they are cached."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence

from treadle import Step, hookimpl


class RankedEviction(ABC):
    """An evict strategy that needs to say only what a block's rank is."""

    def __init__(self) -> None:
        self._entry_of: dict[int, tuple[float, int, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._num_cached = 0

    @abstractmethod
    def rank(self, step: Step, block_id: int) -> float:
        """Lower goes first; of equal ones, the one that became unused first."""

    @hookimpl
    def evict(self, step: Step, num_blocks: int) -> list[int]:
        """The lowest ranks."""
        chosen: list[int] = []
        kept = []
        while self._heap and len(chosen) < num_blocks:
            entry = heapq.heappop(self._heap)
            if self._entry_of.get(entry[2]) is entry:
                kept.append(entry)
                if not step.pool.is_pinned(entry[2]):
                    chosen.append(entry[2])
        # they are forgotten when the core says so
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return chosen

    @hookimpl
    def blocks_cached(self, step: Step, block_ids: Sequence[int]) -> None:
        """Unused from now on."""
        for block_id in block_ids:
            self._num_cached += 1
            entry = (self.rank(step, block_id), self._num_cached, block_id)
            self._entry_of[block_id] = entry
            heapq.heappush(self._heap, entry)

    @hookimpl
    def blocks_reused(self, block_ids: Sequence[int]) -> None:
        """In use again."""
        self._discard(block_ids)

    @hookimpl
    def blocks_evicted(self, block_ids: Sequence[int]) -> None:
        """Gone."""
        self._discard(block_ids)

    def rank_of(self, block_id: int) -> float:
        """The rank that a block was cached with; 0 when it is not cached."""
        entry = self._entry_of.get(block_id)
        return entry[0] if entry is not None else 0.0

    def _discard(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._entry_of.pop(block_id, None)
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._entry_of):
            self._heap = list(self._entry_of.values())
            heapq.heapify(self._heap)
