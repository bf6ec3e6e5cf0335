"""evict.cost_aware: what is cheap to compute again, seldom used and long unused goes first.

The method is GreedyDual-Size-Frequency (Cherkasova, 1998): rank = age of the cache + uses * cost, where the age is the rank of
what was evicted last, so that old favourites lose to new ones in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from treadle import Step, StrategySettings, hookimpl
from treadle_plugins.evict.ranked import RankedEviction


class CostAwareSettings(StrategySettings):
    """What computing a block again costs."""

    context_cost: float = Field(default=0.02, ge=0)
    """Cost of a block of context that a block attends to, as a share of the cost of the block's own linear layers."""


class CostAware(RankedEviction):
    """A block deep in a sequence costs more to compute again, since it attends to all before it."""

    Settings = CostAwareSettings

    def __init__(self, settings: CostAwareSettings) -> None:
        super().__init__()
        self._context_cost = settings.context_cost
        self._age = 0.0
        self._uses: Counter[int] = Counter()
        self._depth: dict[int, int] = {}

    def rank(self, step: Step, block_id: int) -> float:
        """At least that of the blocks that follow: they are lost with it."""
        cost = 1.0 + self._context_cost * self._depth[block_id]
        own = self._age + (1 + self._uses[block_id]) * cost
        return max([own] + [self.rank_of(follower) for follower in step.pool.successors(block_id)])

    @hookimpl
    def blocks_filled(self, step: Step, block_ids: Sequence[int]) -> None:
        """Remember how deep each lies."""
        for block_id in block_ids:
            record = step.pool.record(block_id)
            if record is not None:
                self._depth[block_id] = 0 if record.parent is None else self._depth[record.parent.block_id] + 1

    @hookimpl
    def prefix_matched(self, block_ids: Sequence[int]) -> None:
        """One more use of each."""
        self._uses.update(block_ids)

    @hookimpl
    def blocks_evicted(self, block_ids: Sequence[int]) -> None:
        """The cache is as old as what left it."""
        self._age = max([self._age] + [self.rank_of(block_id) for block_id in block_ids])
        super().blocks_evicted(block_ids)
        for block_id in block_ids:
            del self._uses[block_id]
            self._depth.pop(block_id, None)
