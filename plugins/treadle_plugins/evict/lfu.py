"""evict.lfu: the block that was reused least often goes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from treadle import Step, hookimpl
from treadle_plugins.evict.ranked import RankedEviction


class Lfu(RankedEviction):
    """Rank is the number of requests that matched the block since it was indexed."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[int] = Counter()

    def rank(self, step: Step, block_id: int) -> float:  # noqa: ARG002  # the signature of the base
        """Times that it was matched."""
        return self._uses[block_id]

    @hookimpl
    def prefix_matched(self, block_ids: Sequence[int]) -> None:
        """One more use of each."""
        self._uses.update(block_ids)

    @hookimpl
    def blocks_evicted(self, block_ids: Sequence[int]) -> None:
        """Gone, with their history."""
        super().blocks_evicted(block_ids)
        for block_id in block_ids:
            del self._uses[block_id]
