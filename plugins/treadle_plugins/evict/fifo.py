"""evict.fifo: the block that was indexed first goes first, however often it is used."""

from __future__ import annotations

from collections.abc import Sequence

from treadle import Step, hookimpl
from treadle_plugins.evict.ranked import RankedEviction


class Fifo(RankedEviction):
    """Rank is the order of indexing."""

    def __init__(self) -> None:
        super().__init__()
        self._filled_at: dict[int, int] = {}
        self._num_filled = 0

    def rank(self, step: Step, block_id: int) -> float:  # noqa: ARG002  # the signature of the base
        """When it was indexed."""
        return self._filled_at[block_id]

    @hookimpl
    def blocks_filled(self, block_ids: Sequence[int]) -> None:
        """Number them in turn."""
        for block_id in block_ids:
            self._num_filled += 1
            self._filled_at[block_id] = self._num_filled

    @hookimpl
    def blocks_evicted(self, block_ids: Sequence[int]) -> None:
        """Gone, with their numbers."""
        super().blocks_evicted(block_ids)
        for block_id in block_ids:
            self._filled_at.pop(block_id, None)
