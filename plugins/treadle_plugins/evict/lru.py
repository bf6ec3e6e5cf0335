"""evict.lru: the block that has been unused longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from treadle import Step, hookimpl


class Lru:
    """Cached blocks in the order in which their last user left. The end of a sequence comes before its start."""

    def __init__(self) -> None:
        self._cached: OrderedDict[int, None] = OrderedDict()

    @hookimpl
    def evict(self, step: Step, num_blocks: int) -> list[int]:
        """The longest unused ones."""
        chosen = []
        for block_id in self._cached:
            if not step.pool.is_pinned(block_id):
                chosen.append(block_id)
                if len(chosen) == num_blocks:
                    break
        return chosen

    @hookimpl
    def blocks_cached(self, block_ids: Sequence[int]) -> None:
        """Unused from now on."""
        for block_id in block_ids:
            self._cached[block_id] = None

    @hookimpl
    def blocks_reused(self, block_ids: Sequence[int]) -> None:
        """In use again."""
        for block_id in block_ids:
            self._cached.pop(block_id, None)

    @hookimpl
    def blocks_evicted(self, block_ids: Sequence[int]) -> None:
        """Gone."""
        for block_id in block_ids:
            self._cached.pop(block_id, None)
