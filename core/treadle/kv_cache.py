"""The KV cache: block pool, swap space and the requests' block tables. Each change of a block is one verb here; no policy.

    pool        7: used   2: used   9: used   5: used   4: cached   1: free        record of 4: follows 2
    swap space  0: free   1: a's
    table of a  [7, 2, (swapped: 1)]    waiting, its third block in host memory
    table of b  [7, 2, 9]               shares 7 and 2 with a; 9 is its own, not full yet
    table of c  [5]

A verb changes pool and table together and tells the plugins. What a step did that must be undone if its pass fails stands in the
undo log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from treadle.blocks import BROKEN, BlockPool, BlockRef, IntegrityError
from treadle.contracts import Match
from treadle.hookspecs import Hooks
from treadle.logs import get_logger
from treadle.plan import BlockCopy
from treadle.request import LiveRequest, Phase
from treadle.step import Step

log = get_logger(__name__)


class SwapSpace:
    """Ids of the blocks in host memory."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        assert num_blocks <= len(self._free)
        return [self._free.pop() for _ in range(num_blocks)]

    def give_back(self, block_ids: Iterable[int]) -> None:
        self._free.extend(block_ids)


class UndoLog:
    """What a step did to blocks that must be undone if its pass fails."""

    def __init__(self) -> None:
        self.indexed: list[int] = []
        self.chains: list[tuple[LiveRequest, BlockRef | None, int]] = []
        self.uncertain: dict[LiveRequest, None] = {}
        """Requests that rely on blocks or copies of this very step."""
        self.swap_out: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []


class KVCache:
    """Blocks, and who holds them."""

    def __init__(
        self, pool: BlockPool, swap_space: SwapSpace, hook: Hooks, *, index_blocks: bool = True, max_pinned: float = 0.5
    ) -> None:
        self.pool = pool
        self.swap_space = swap_space
        self.undo_log = UndoLog()
        self._hook = hook
        self._index_blocks = index_blocks
        self._most_pinned = int(max_pinned * pool.num_blocks)
        self._pinned_until: dict[BlockRef, float] = {}
        self._next_unpin_s = float("inf")

    # --- a pass -----------------------------------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> None:
        """A new undo log; what was pinned until now may go."""
        self.undo_log = UndoLog()
        if now >= self._next_unpin_s:
            self._unpin([ref for ref, until_s in self._pinned_until.items() if until_s <= now])

    def confirm(self) -> None:
        """The pass succeeded: swap blocks that were read are free again."""
        self.swap_space.give_back(copy.source for copy in self.undo_log.swap_in)

    def undo_index(self) -> None:
        """The pass failed: chains go back to where they were, and swap blocks that were to be read are free again."""
        for request, chain, num_chained in reversed(self.undo_log.chains):
            if request.table.num_chained:
                request.table.chain, request.table.num_chained = chain, num_chained
        self.confirm()

    # --- a request takes blocks -------------------------------------------------------------------------------------------------

    def match(self, request: LiveRequest, block_ids: tuple[int, ...]) -> Match:
        """What reusing these blocks saves a waiting request, and what its start would take all the same."""
        table, pool = request.table, self.pool
        needed = pool.blocks_for(request.num_tokens) - max(
            len(table.block_ids), table.num_computed // pool.block_size + len(block_ids)
        )
        cached = sum(pool.is_cached(block_id) and not pool.is_pinned(block_id) for block_id in block_ids)
        return Match(block_ids, len(block_ids) * pool.block_size, max(0, needed) + cached + len(table.swapped))

    def allocate(self, step: Step, request: LiveRequest, block_ids: tuple[int, ...]) -> None:
        """Free blocks become the request's, behind those that it holds."""
        self.pool.take(block_ids)
        request.table.block_ids += block_ids
        self._hook.blocks_allocated(step=step, request=request, block_ids=block_ids)

    def share(self, step: Step, request: LiveRequest, block_ids: tuple[int, ...]) -> None:
        """The request uses indexed blocks for its next tokens, in place of blocks that it had reserved for them."""
        table, size = request.table, self.pool.block_size
        held = table.num_computed // size
        replaced = table.block_ids[held : held + len(block_ids)]
        reused = self.pool.share(block_ids)
        self._chain(request, BlockRef(block_ids[-1], self.pool.generation(block_ids[-1])), held + len(block_ids))
        table.block_ids = table.block_ids[:held] + block_ids + table.block_ids[held + len(block_ids) :]
        table.num_computed += len(block_ids) * size
        request.count(num_cached_tokens=request.num_cached_tokens + len(block_ids) * size)
        self.undo_log.uncertain[request] = None
        self._hook.prefix_matched(step=step, request=request, block_ids=block_ids, num_tokens=len(block_ids) * size)
        if reused:
            self._hook.blocks_reused(step=step, block_ids=reused)
        self._drop(step, request, replaced)

    def fill(self, step: Step, request: LiveRequest, num_tokens: int) -> None:
        """Index the blocks that are full once the first `num_tokens` tokens are computed."""
        size = self.pool.block_size
        if num_tokens // size <= request.table.num_chained or not (self._index_blocks and request.shares):
            return
        filled = []
        for place in range(request.table.num_chained, num_tokens // size):
            block_id = request.table.block_ids[place]
            tokens = request.token_ids(place * size, (place + 1) * size)
            ref = self.pool.index(block_id, request.table.chain, tokens, request.isolation_key)
            if ref is None:
                # a block before was evicted: nobody could find this one, nor any behind it
                ref = request.table.chain
            elif ref.block_id == block_id:
                filled.append(block_id)
            self._chain(request, ref, place + 1)
        if filled:
            self.undo_log.indexed += filled
            self._hook.blocks_filled(step=step, request=request, block_ids=filled)

    def advance(self, request: LiveRequest, num_tokens: int) -> None:
        """The KV of this many more known tokens is in the pool."""
        request.table.num_computed += num_tokens

    # --- a request gives up blocks ----------------------------------------------------------------------------------------------

    def truncate(self, step: Step, request: LiveRequest, num_blocks: int | None) -> None:
        """The request gives up its last `num_blocks` blocks, or all."""
        table = request.table
        keep = 0 if num_blocks is None else max(0, len(table.block_ids) - num_blocks)
        if keep == 0:
            self.free(step, request)
            return
        record = self.pool.record(table.block_ids[keep - 1])
        given_up, table.block_ids = table.block_ids[keep:], table.block_ids[:keep]
        table.num_computed = min(table.num_computed, keep * self.pool.block_size)
        if table.num_chained > keep:
            table.chain, table.num_chained = BROKEN if record is None else record.ref, keep
        self._drop(step, request, given_up)

    def free(self, step: Step, request: LiveRequest) -> None:
        """The request holds nothing any more, in the pool or in swap space."""
        table = request.table
        held, swap_ids = table.held(), list(table.swapped.values())
        table.block_ids, table.num_computed, table.swapped = (), 0, {}
        table.chain, table.num_chained = None, 0
        if swap_ids:
            self.swap_space.give_back(swap_ids)
            self._hook.swap_released(step=step, request=request, swap_ids=swap_ids)
        self._drop(step, request, held)

    def swap_out(self, step: Step, request: LiveRequest, most: int | None = None) -> bool:
        """The request's own KV, or the last `most` blocks of it, goes to swap space. False, and nothing changed, when it is full.

        Shared blocks stay in the table; what was reserved behind is given up.
        """
        table = request.table
        places, num_filled = self._own_places(request, most)
        if len(places) > self.swap_space.num_free:
            return False
        swapped = dict(zip(places, self.swap_space.take(len(places)), strict=True))
        copies = [BlockCopy(table.block_ids[place], target) for place, target in swapped.items()]
        given_up = [copy.source for copy in copies] + list(table.block_ids[num_filled:])
        table.block_ids, table.swapped = table.block_ids[:num_filled], swapped
        self.undo_log.swap_out += copies
        self.undo_log.uncertain[request] = None
        if copies:
            self._hook.blocks_swapped_out(step=step, request=request, copies=copies)
        self._drop(step, request, given_up)
        return True

    def swap_in(self, step: Step, request: LiveRequest, block_ids: Sequence[int]) -> None:
        """New blocks take the places of those that are swapped out."""
        table = request.table
        self.pool.take(block_ids)
        blocks = dict(zip(table.swapped, block_ids, strict=True))
        # the swap blocks are given back when the pass is over: swap-outs of this step run before its swap-ins
        copies = [BlockCopy(table.swapped[place], target) for place, target in blocks.items()]
        table.block_ids = tuple(blocks.get(place, block_id) for place, block_id in enumerate(table.block_ids))
        table.swapped = {}
        self.undo_log.swap_in += copies
        self.undo_log.uncertain[request] = None
        self._hook.blocks_allocated(step=step, request=request, block_ids=tuple(block_ids))
        self._hook.blocks_swapped_in(step=step, request=request, copies=copies)

    def num_freed(self, gone: Iterable[tuple[LiveRequest, int | None, bool]], but: Collection[int]) -> int:
        """Blocks that nobody would hold any more if these requests gave up their last so many (None: all), by swap or not.

        By swap as far as swap space goes, as `swap_out` has it.
        """
        lost: Counter[int] = Counter()
        room = self.swap_space.num_free
        for request, num_blocks, swaps in gone:
            block_ids = request.table.held()
            places, num_filled = self._own_places(request, num_blocks) if swaps else ([], 0)
            if swaps and len(places) <= room:
                room -= len(places)
                lost.update([*(block_ids[place] for place in places), *block_ids[num_filled:]])
            else:
                lost.update(block_ids if num_blocks is None else block_ids[-num_blocks:])
        return sum(self.pool.count(b) == n and b not in but and not self.pool.is_pinned(b) for b, n in lost.items())

    def _own_places(self, request: LiveRequest, most: int | None) -> tuple[list[int], int]:
        """Places in the table of blocks that the request alone holds, the last `most` of them; and how many blocks are filled."""
        num_filled = self.pool.blocks_for(request.table.num_computed)
        filled = request.table.block_ids[:num_filled]
        places = [place for place, block_id in enumerate(filled) if self.pool.count(block_id) == 1]
        return (places if most is None else places[-most:]), num_filled

    def _drop(self, step: Step, request: LiveRequest, block_ids: Sequence[int]) -> None:
        """One table fewer holds these blocks."""
        if not block_ids:
            return
        cached, freed = self.pool.drop(block_ids)
        self._hook.blocks_released(step=step, request=request, block_ids=block_ids)
        if cached:
            self._hook.blocks_cached(step=step, block_ids=cached)
        if freed:
            self._hook.blocks_freed(step=step, block_ids=freed)

    # --- the index --------------------------------------------------------------------------------------------------------------

    def evict(self, step: Step, block_ids: Sequence[int]) -> None:
        """Cached blocks are forgotten, with those that follow them."""
        evicted = self.pool.unindex(block_ids)
        # the pool has unpinned them
        for block_id in evicted.left_index if self._pinned_until else ():
            self._pinned_until.pop(BlockRef(block_id, self.pool.generation(block_id)), None)
        self._hook.blocks_evicted(step=step, block_ids=evicted.left_index)
        if evicted.freed:
            self._hook.blocks_freed(step=step, block_ids=evicted.freed)

    def disown(self, step: Step, request: LiveRequest) -> None:
        """The request could not be computed: its blocks leave the index, shared ones too, as any of them may hold the reason."""
        indexed = [block_id for block_id in request.table.held() if self.pool.record(block_id) is not None]
        if indexed:
            self.evict(step, indexed)

    def _chain(self, request: LiveRequest, ref: BlockRef | None, num_chained: int) -> None:
        table = request.table
        self.undo_log.chains.append((request, table.chain, table.num_chained))
        table.chain, table.num_chained = ref, num_chained

    # --- pins -----------------------------------------------------------------------------------------------------------------

    def pin_prompt(self, request: LiveRequest, until_s: float) -> None:
        """Keep the full blocks of a request's prompt from eviction until `until_s`, unless too much is pinned already."""
        refs = []
        ref = request.table.chain
        while ref is not None and self.pool.is_current(ref):
            refs.append(ref)
            record = self.pool.record(ref.block_id)
            ref = None if record is None else record.parent
        # the walk began at the last chained block, which may be one of output
        refs = refs[::-1][: request.prompt_length // self.pool.block_size]
        new = [ref for ref in refs if ref not in self._pinned_until]
        if self.pool.num_pinned + len(new) > self._most_pinned:
            log.warning("prompt_not_pinned", request_id=request.id, blocks=len(new), pinned=self.pool.num_pinned)
            return
        self.pool.pin(ref.block_id for ref in new)
        for ref in refs:
            self._pinned_until[ref] = max(until_s, self._pinned_until.get(ref, 0.0))
        self._next_unpin_s = min(self._next_unpin_s, until_s)

    def unpin_all(self) -> bool:
        """Pins yield where otherwise nobody could go on. False when there are none."""
        if not self._pinned_until:
            return False
        log.warning("pins_given_up", pinned=self.pool.num_pinned)
        self._unpin(list(self._pinned_until))
        return True

    def _unpin(self, refs: Iterable[BlockRef]) -> None:
        for ref in refs:
            del self._pinned_until[ref]
            self.pool.unpin([ref.block_id])
        self._next_unpin_s = min(self._pinned_until.values(), default=float("inf"))

    # --- proof --------------------------------------------------------------------------------------------------------------

    def check_balance(self) -> None:
        """With no request left, nothing is used and swap space is empty. Costs nothing that shows. Raises IntegrityError."""
        pool, swap = self.pool, self.swap_space
        if pool.num_used or swap.num_free != swap.num_blocks:
            raise IntegrityError(
                f"no request is left, and {pool.num_used} blocks of the pool and {swap.num_blocks - swap.num_free} of swap space "
                "are held"
            )

    def check_integrity(self, requests: Sequence[LiveRequest]) -> None:
        """Compare the pool with every request's table. Raises IntegrityError."""
        self.pool.check_integrity(request.table.held() for request in requests)
        size = self.pool.block_size
        running = [request for request in requests if request.phase is Phase.RUNNING]
        writable = ((r, block_id) for r in running for block_id in r.block_table[r.num_computed // size :])
        wrong = [
            f"{request!r} may write block {block_id}, which is shared or indexed"
            for request, block_id in writable
            if self.pool.count(block_id) != 1 or self.pool.record(block_id) is not None
        ]
        swapped = sum(len(request.table.swapped) for request in requests)
        if swapped + self.swap_space.num_free != self.swap_space.num_blocks:
            wrong.append(f"{swapped} swapped and {self.swap_space.num_free} free of {self.swap_space.num_blocks} swap blocks")
        stale = [ref for ref in self._pinned_until if not self.pool.is_current(ref)]
        if stale:
            wrong.append(f"{stale} are pinned and not indexed any more")
        if wrong:
            raise IntegrityError("; ".join(wrong))
