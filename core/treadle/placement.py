"""Where a request's next tokens go: finding blocks, if need be at the cost of what is cached, of who waits, and of who runs.

allocate -> evict cached blocks -> a smaller chunk -> blocks of finished and waiting requests -> a victim is preempted
"""

from __future__ import annotations

from treadle.contracts import Match
from treadle.kv_cache import KVCache
from treadle.queues import Queues
from treadle.request import LiveRequest, Phase
from treadle.rules import Rules
from treadle.step import Step


class Placement:
    """Finds blocks for one request after another."""

    def __init__(self, kv_cache: KVCache, queues: Queues, rules: Rules) -> None:
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._block_size = kv_cache.pool.block_size
        self._queues = queues
        self._rules = rules
        self._may_shrink = True
        self.lacked_room = False
        """Whether a running request lacked room in this step."""

    def begin(self, may_shrink: bool) -> None:
        """A step begins. `may_shrink`: whether a chunk of a prefill may be smaller than what was granted."""
        self._may_shrink = may_shrink
        self.lacked_room = False

    def extend(self, step: Step, request: LiveRequest, granted: int, *, shrinkable: bool = False) -> int:
        """Blocks for up to `granted` more tokens of a running request. Returns how many fit: 0 when it must wait."""
        table = request.table
        spare = len(table.block_ids) * self._block_size - table.num_computed
        if granted <= spare:
            return granted
        needed = self._pool.blocks_for(table.num_computed + granted) - len(table.block_ids)
        block_ids = self._find(step, request, needed, shrinkable or self._may_shrink, spare)
        if block_ids is None:
            return 0
        if block_ids:
            self._kv_cache.allocate(step, request, block_ids)
        return min(granted, len(table.block_ids) * self._block_size - table.num_computed)

    def enter(self, step: Step, request: LiveRequest, match: Match, granted: int) -> int:
        """Blocks for a waiting request that is to start: those of the match, those swapped out, new ones.

        Returns how many tokens fit. 0 when it must wait: then it has taken nothing.
        """
        if request.table.swapped:
            return granted if self._swap_in(step, request, granted) else 0
        size = self._pool.block_size
        computed = request.num_computed + match.num_tokens
        held = max(len(request.block_table), computed // size if match.block_ids else 0)
        # protected, so that what is matched is not evicted to make room for the rest
        with self._pool.protected(match.block_ids):
            needed = self._pool.blocks_for(computed + granted) - held
            block_ids = self._find_for_waiting(step, request, needed, self._may_shrink, held * size - computed)
        if block_ids is None:
            if not self._queues.running:
                self._rules.no_room_found(self._pool.blocks_for(request.num_tokens))
            return 0
        if match.block_ids and self._pool.record(match.block_ids[0]) is None:
            # they went with a block that they follow, which was evicted: the request holds a copy of its own of that one
            return self.enter(step, request, Match(), granted)
        if match.block_ids:
            self._kv_cache.share(step, request, match.block_ids)
        if block_ids:
            self._kv_cache.allocate(step, request, block_ids)
        return min(granted, len(request.block_table) * size - request.num_computed)

    def _swap_in(self, step: Step, request: LiveRequest, granted: int) -> bool:
        """Room for what is swapped out and for the next tokens together."""
        num_swapped = len(request.table.swapped)
        growth = self._pool.blocks_for(request.num_computed + granted) - len(request.block_table)
        needed = num_swapped + max(growth, 0)
        block_ids = self._find_for_waiting(step, request, needed, False, 0)
        if block_ids is None:
            if not self._queues.running:
                self._rules.no_room_found(needed)
            return False
        self._kv_cache.swap_in(step, request, block_ids[:num_swapped])
        if block_ids[num_swapped:]:
            self._kv_cache.allocate(step, request, block_ids[num_swapped:])
        return True

    def _find_for_waiting(
        self, step: Step, request: LiveRequest, needed: int, shrinkable: bool, spare: int
    ) -> tuple[int, ...] | None:
        """The same as `_find`, but nothing cached is forgotten for a request that could not start even so."""
        if needed > self._pool.num_available and not shrinkable and self._queues.running:
            return None
        return self._find(step, request, needed, shrinkable, spare)

    def _find(self, step: Step, request: LiveRequest, needed: int, shrinkable: bool, spare: int) -> tuple[int, ...] | None:
        """`needed` free blocks. Fewer where that is allowed and a token fits them, or the `spare` places in blocks that are held.

        None when the request must wait.
        """
        if needed <= 0:
            return ()
        block_ids = self._allocate(step, request, needed)
        if block_ids is None and shrinkable:
            fewer = self._fewer(step, request, needed)
            if fewer or spare > 0:
                return fewer
        while block_ids is None:
            if not self._make_way(step, request, needed):
                return None
            block_ids = self._allocate(step, request, needed)
        return block_ids

    def _allocate(self, step: Step, request: LiveRequest, num_blocks: int) -> tuple[int, ...] | None:
        """Free blocks, if need be by forgetting cached ones."""
        block_ids = self._rules.allocate(step, request, num_blocks, self._pool)
        while block_ids is None and self._pool.num_cached:
            short = num_blocks - self._pool.num_free
            chosen = self._rules.evict(step, short if short > 0 else num_blocks, self._pool)
            if not chosen:
                break
            self._kv_cache.evict(step, chosen)
            block_ids = self._rules.allocate(step, request, num_blocks, self._pool)
        return block_ids

    def _fewer(self, step: Step, request: LiveRequest, needed: int) -> tuple[int, ...]:
        """What is free, up to one block less than needed."""
        fewer = min(needed - 1, self._pool.num_free)
        return (self._rules.allocate(step, request, fewer, self._pool) or ()) if fewer > 0 else ()

    # --- at somebody's cost -----------------------------------------------------------------------------------------------------

    def _make_way(self, step: Step, request: LiveRequest, needed: int) -> bool:
        """Free blocks at somebody's cost. False when nobody gives way, or the request itself did."""
        queues = self._queues
        runs = request.phase is Phase.RUNNING
        self.lacked_room = self.lacked_room or runs
        if queues.held and (runs or not queues.running):
            for finished in list(queues.held):
                queues.release(step, finished)
            return True
        short = max(1, needed - self._pool.num_free)
        if len(queues.running) == int(runs):
            # alone: nobody would gain if it gave way itself, so those that wait and those that pinned do
            return queues.reclaim_from_waiting(step, request, short, swapped=True) or self._kv_cache.unpin_all()
        if runs and queues.reclaim_from_waiting(step, request, short, swapped=False):
            return True
        return runs and self._preempt_for(step, request, short) and request.phase is Phase.RUNNING

    def _preempt_for(self, step: Step, request: LiveRequest, num_blocks: int) -> bool:
        may_swap = self._kv_cache.swap_space.num_blocks > 0
        answer = self._rules.preempt(step, request, num_blocks, may_swap=may_swap)
        if answer is None:
            return False
        assert isinstance(answer.victim, LiveRequest)
        self._queues.preempt(step, answer.victim, answer.num_blocks, answer.mode)
        return True
