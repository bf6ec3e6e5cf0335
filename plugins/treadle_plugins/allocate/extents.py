"""Free blocks as runs of neighbours, merged as they come back."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class Extents:
    """Runs of free blocks: `start -> length`, with an index by end to merge and one by length to choose.

    blocks   0 1 2 3 4 5 6 7 8 9
    free     . x x . . x x x x .          runs  {1: 2, 5: 4}
    freeing 3 and 4 joins them:           runs  {1: 8}
    """

    def __init__(self, num_blocks: int) -> None:
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self.num_free = 0
        self.add([range(num_blocks)])

    @property
    def largest(self) -> int:
        """Blocks of the longest run."""
        return self._by_length[-1][0] if self._by_length else 0

    @property
    def fragmentation(self) -> float:
        """Share of the free blocks that lie outside the longest run: 0 when all are in one."""
        return 1 - self.largest / self.num_free if self.num_free else 0.0

    def best_fit(self, num_blocks: int) -> int | None:
        """Start of the shortest run of at least this length."""
        place = bisect_left(self._by_length, (num_blocks, -1))
        return self._by_length[place][1] if place < len(self._by_length) else None

    def longest_first(self, num_blocks: int) -> list[int]:
        """Blocks from the longest runs on, to fill a need that no single run can."""
        chosen: list[int] = []
        for length, start in reversed(self._by_length):
            chosen += range(start, start + min(length, num_blocks - len(chosen)))
            if len(chosen) == num_blocks:
                break
        return chosen

    def run_at(self, block_id: int) -> int:
        """Length of the run that starts at this block; 0 when none does."""
        return self._length_at.get(block_id, 0)

    def add(self, runs: Iterable[Iterable[int]]) -> None:
        """Blocks come back, each joined with its free neighbours."""
        for run in runs:
            for block_id in run:
                self._add_one(block_id)

    def remove(self, block_ids: Iterable[int]) -> None:
        """Free blocks are taken, from wherever in their runs."""
        for block_id in sorted(block_ids):
            start, length = self._run_of(block_id)
            self._forget(start, length)
            self._remember(start, block_id - start)
            self._remember(block_id + 1, start + length - block_id - 1)
            self.num_free -= 1

    def _add_one(self, block_id: int) -> None:
        start, length = block_id, 1
        before = self._start_before.get(block_id)
        if before is not None:
            self._forget(before, block_id - before)
            start, length = before, length + block_id - before
        behind = self._length_at.get(block_id + 1)
        if behind is not None:
            self._forget(block_id + 1, behind)
            length += behind
        self._remember(start, length)
        self.num_free += 1

    def _run_of(self, block_id: int) -> tuple[int, int]:
        if block_id in self._length_at:
            return block_id, self._length_at[block_id]
        for start, length in self._length_at.items():
            if start <= block_id < start + length:
                return start, length
        raise AssertionError(f"block {block_id} is not free")

    def _remember(self, start: int, length: int) -> None:
        if length:
            self._length_at[start] = length
            self._start_before[start + length] = start
            insort(self._by_length, (length, start))

    def _forget(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_before[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
