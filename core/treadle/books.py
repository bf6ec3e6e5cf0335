"""The books: pool, waiting and running requests. Each verb changes them together and tells the plugins; it decides nothing."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence

from treadle.blocks import BlockPool, BlockRef, IntegrityError
from treadle.contracts import Load, PreemptionMode
from treadle.hookspecs import Hooks
from treadle.logs import get_logger
from treadle.plan import BlockCopy
from treadle.request import FinishReason, LiveRequest, Phase
from treadle.step import Step

log = get_logger(__name__)
BROKEN = BlockRef(0, -1)
"""Stands where a chain of indexed blocks cannot be continued: no block ever has this generation."""


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

    def give_back(self, block_ids: Sequence[int]) -> None:
        self._free.extend(block_ids)


class Journal:
    """What a step did to the books that must be undone if its pass fails."""

    def __init__(self) -> None:
        self.indexed: list[int] = []
        self.chains: list[tuple[LiveRequest, BlockRef | None, int]] = []
        self.uncertain: dict[str, LiveRequest] = {}
        """Requests that rely on blocks or copies of this very step."""
        self.swap_out: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []


class Books:
    """Pool, waiting, running and held requests."""

    def __init__(
        self, pool: BlockPool, swap_space: SwapSpace, hook: Hooks, *, index_blocks: bool = True, max_pinned: float = 0.5
    ) -> None:
        self.pool = pool
        self._index_blocks = index_blocks
        self.swap_space = swap_space
        self.running: dict[str, LiveRequest] = {}
        """In the order of admission."""
        self.waiting: OrderedDict[str, LiveRequest] = OrderedDict()
        """Longest waiting first."""
        self.held: dict[str, LiveRequest] = {}
        """Finished requests whose blocks are not given back yet."""
        self._batches_changed = False
        self.ended: list[LiveRequest] = []
        """Requests that ended since the last step was closed."""
        self.journal = Journal()
        self.waiting_priorities: Counter[int] = Counter()
        self._waiting_prompt_tokens = 0
        self._pins: list[tuple[float, int, list[BlockRef]]] = []
        self._most_pinned = int(max_pinned * pool.num_blocks)
        self._hook = hook

    @property
    def load(self) -> Load:
        used = self.pool.num_used / self.pool.num_blocks
        return Load(len(self.waiting), self._waiting_prompt_tokens, len(self.running), used)

    # --- requests -------------------------------------------------------------------------------------------------------------

    def queue(self, step: Step, request: LiveRequest) -> None:
        """An accepted request waits."""
        self._add_waiting(request)
        self._hook.request_queued(step=step, request=request)

    def start(self, step: Step, request: LiveRequest) -> None:
        """A waiting request runs; its blocks are there."""
        resumed = request.phase is Phase.PREEMPTED
        self._remove_waiting(request)
        request.start(step.number, step.now)
        self.running[request.id] = request
        (self._hook.request_resumed if resumed else self._hook.request_admitted)(step=step, request=request)

    def preempt(self, step: Step, request: LiveRequest, num_blocks: int | None = None) -> None:
        """A running request waits again and gives up its blocks, or the last `num_blocks` of them."""
        del self.running[request.id]
        keep, chain = self._kept(request, num_blocks)
        self.drop(step, request, request.preempt(keep, chain, self.pool.block_size))
        self._return_to_waiting(step, request, PreemptionMode.RECOMPUTE)

    def swap_out(self, step: Step, request: LiveRequest, most: int | None = None) -> bool:
        """A running request waits with its own KV, or the last `most` blocks of it, in swap space. False, and nothing changed,
        when there is no space for it."""
        num_blocks = self.pool.blocks_for(request.num_computed)
        places = [p for p, b in enumerate(request.block_table[:num_blocks]) if self.pool.count(b) == 1]
        if most is not None:
            places = places[-most:]
        if len(places) > self.swap_space.num_free:
            return False
        del self.running[request.id]
        table = request.block_table
        swapped = dict(zip(places, self.swap_space.take(len(places)), strict=True))
        copies = [BlockCopy(table[place], target) for place, target in swapped.items()]
        self.journal.swap_out += copies
        self.journal.uncertain[request.id] = request
        request.swap_out(swapped, num_blocks)
        if copies:
            self._hook.blocks_swapped_out(step=step, request=request, copies=copies)
        self.drop(step, request, [table[place] for place in places] + list(table[num_blocks:]))
        self._return_to_waiting(step, request, PreemptionMode.SWAP)
        return True

    def swap_in(self, step: Step, request: LiveRequest, block_ids: Sequence[int]) -> None:
        """New blocks take the places of those that are swapped out."""
        self.pool.take(block_ids)
        blocks = dict(zip(request.swapped, block_ids, strict=True))
        # the swap blocks are given back when the pass is over: swap-outs of this step run before its swap-ins
        copies = [BlockCopy(request.swapped[place], target) for place, target in blocks.items()]
        self.journal.swap_in += copies
        self.journal.uncertain[request.id] = request
        request.swap_in(blocks)
        self._hook.blocks_allocated(step=step, request=request, block_ids=block_ids)
        self._hook.blocks_swapped_in(step=step, request=request, copies=copies)

    def finish(
        self, step: Step, request: LiveRequest, reason: FinishReason, error: Exception | None = None, *, hold: bool = False
    ) -> None:
        """A request ends, wherever it is. With `hold` its blocks stay until `release`."""
        queued = request.phase is not Phase.SUBMITTED
        if request.is_waiting:
            self._remove_waiting(request)
        self.running.pop(request.id, None)
        self._batches_changed = True
        request.finish(reason, step.clock.now(), error)
        self.ended.append(request)
        if hold:
            self.held[request.id] = request
        else:
            self.give_up_blocks(step, request)
        if queued:
            self._hook.request_finished(step=step, request=request)

    def take_change_of_batches(self) -> bool:
        """Whether a request ended or was preempted since this was asked last."""
        changed, self._batches_changed = self._batches_changed, False
        return changed

    def release(self, step: Step, request: LiveRequest) -> None:
        """A held request's blocks go."""
        del self.held[request.id]
        self.give_up_blocks(step, request)

    def give_up_blocks(self, step: Step, request: LiveRequest) -> None:
        """The request holds nothing any more, in the pool or in swap space."""
        swap_ids = list(request.swapped.values())
        held = request.surrender()
        if swap_ids:
            self.swap_space.give_back(swap_ids)
            self._hook.swap_released(step=step, request=request, swap_ids=swap_ids)
        self.drop(step, request, held)

    def reclaim_from_waiting(self, step: Step, but: LiveRequest, num_blocks: int, *, swapped: bool) -> bool:
        """A request that waits with blocks of the pool gives up the last `num_blocks`. False when none holds any.

        The last in the queue comes first. Those with KV in swap space start over, and are spared unless `swapped`.
        """
        for request in reversed(self.waiting.values()):
            if request is but or not request.held_blocks():
                continue
            if not request.swapped:
                keep, chain = self._kept(request, num_blocks)
                self.drop(step, request, request.shorten(keep, chain, self.pool.block_size))
                return True
            if swapped:
                self.give_up_blocks(step, request)
                return True
        return False

    def _kept(self, request: LiveRequest, num_blocks: int | None) -> tuple[int, BlockRef | None]:
        """How many blocks are left when `num_blocks` go, and what the last of them is in the index."""
        keep = 0 if num_blocks is None else max(0, len(request.block_table) - num_blocks)
        record = self.pool.record(request.block_table[keep - 1]) if keep else None
        return keep, BROKEN if record is None else record.ref

    def _return_to_waiting(self, step: Step, request: LiveRequest, mode: PreemptionMode) -> None:
        self._batches_changed = True
        self._add_waiting(request)
        self.waiting.move_to_end(request.id, last=False)
        self._hook.request_preempted(step=step, request=request, mode=mode)

    def _add_waiting(self, request: LiveRequest) -> None:
        self.waiting[request.id] = request
        self.waiting_priorities[request.priority] += 1
        self._waiting_prompt_tokens += request.prompt_length

    def _remove_waiting(self, request: LiveRequest) -> None:
        del self.waiting[request.id]
        self.waiting_priorities[request.priority] -= 1
        if not self.waiting_priorities[request.priority]:
            del self.waiting_priorities[request.priority]
        self._waiting_prompt_tokens -= request.prompt_length

    # --- blocks ---------------------------------------------------------------------------------------------------------------

    def give(self, step: Step, request: LiveRequest, block_ids: tuple[int, ...]) -> None:
        """Free blocks become the request's."""
        self.pool.take(block_ids)
        request.hold(block_ids)
        self._hook.blocks_allocated(step=step, request=request, block_ids=block_ids)

    def reuse(self, step: Step, request: LiveRequest, block_ids: tuple[int, ...]) -> None:
        """The request uses indexed blocks for its next tokens, in place of blocks that it had reserved for them."""
        held = request.num_computed // self.pool.block_size
        replaced = request.block_table[held : held + len(block_ids)]
        reused = self.pool.share(block_ids)
        self._hook.blocks_shared(step=step, request=request, block_ids=block_ids)
        if reused:
            self._hook.blocks_reused(step=step, block_ids=reused)
        self._chain(request, self._record_of(block_ids[-1]), held + len(block_ids))
        request.reuse(block_ids, self.pool.block_size)
        self.journal.uncertain[request.id] = request
        self.drop(step, request, replaced)

    def fill(self, step: Step, request: LiveRequest, num_tokens: int) -> None:
        """Index the blocks that are full once the first `num_tokens` tokens are computed."""
        if not (self._index_blocks and request.shares):
            return
        size = self.pool.block_size
        filled = []
        for place in range(request.num_chained, num_tokens // size):
            block_id = request.block_table[place]
            tokens = request.token_ids(place * size, (place + 1) * size)
            ref = self.pool.index(block_id, request.chain, tokens, request.isolation_key)
            if ref is None:
                # a block before was evicted: nobody could find this one, nor any behind it
                ref = request.chain
            elif ref.block_id == block_id:
                filled.append(block_id)
            self._chain(request, ref, place + 1)
        if filled:
            self.journal.indexed += filled
            self._hook.blocks_filled(step=step, request=request, block_ids=filled)

    def evict(self, step: Step, block_ids: Sequence[int]) -> None:
        """Cached blocks are forgotten, with those that follow them."""
        evicted = self.pool.unindex(block_ids)
        self._hook.blocks_evicted(step=step, block_ids=evicted.left_index)
        if evicted.freed:
            self._hook.blocks_freed(step=step, block_ids=evicted.freed)

    def disown(self, step: Step, request: LiveRequest) -> None:
        """The request could not be computed: its blocks leave the index, shared ones too, as any of them may hold the reason."""
        indexed = [block_id for block_id in request.held_blocks() if self.pool.record(block_id) is not None]
        if indexed:
            self.evict(step, indexed)

    def drop(self, step: Step, request: LiveRequest, block_ids: Sequence[int]) -> None:
        """One table fewer holds these blocks."""
        if not block_ids:
            return
        cached, freed = self.pool.drop(block_ids)
        self._hook.blocks_released(step=step, request=request, block_ids=block_ids)
        if cached:
            self._hook.blocks_cached(step=step, block_ids=cached)
        if freed:
            self._hook.blocks_freed(step=step, block_ids=freed)

    def _chain(self, request: LiveRequest, ref: BlockRef | None, num_chained: int) -> None:
        self.journal.chains.append((request, request.chain, request.num_chained))
        request.chain_to(ref, num_chained)

    def _record_of(self, block_id: int) -> BlockRef:
        record = self.pool.record(block_id)
        assert record is not None
        return record.ref

    # --- pins -----------------------------------------------------------------------------------------------------------------

    def pin_prompt(self, request: LiveRequest, until_s: float) -> None:
        """Keep the full blocks of a request's prompt from eviction until `until_s`, unless too much is pinned already."""
        refs = []
        ref = request.chain
        while ref is not None and self.pool.is_current(ref):
            refs.append(ref)
            record = self.pool.record(ref.block_id)
            ref = None if record is None else record.parent
        # the walk began at the last chained block, which may be one of output
        refs = refs[::-1][: request.prompt_length // self.pool.block_size]
        if self.pool.num_pinned + len(refs) > self._most_pinned:
            log.warning("prompt_not_pinned", request_id=request.id, blocks=len(refs), pinned=self.pool.num_pinned)
            return
        self.pool.pin(ref.block_id for ref in refs)
        heapq.heappush(self._pins, (until_s, request.sequence, refs))

    def unpin_expired(self, now: float) -> None:
        """Let go of what was pinned until now."""
        while self._pins and self._pins[0][0] <= now:
            self._unpin(heapq.heappop(self._pins)[2])

    def unpin_all(self) -> bool:
        """Pins yield where otherwise nobody could go on. False when there are none."""
        if not self._pins:
            return False
        log.warning("pins_given_up", pinned=self.pool.num_pinned)
        for _, _, refs in self._pins:
            self._unpin(refs)
        self._pins.clear()
        return True

    def _unpin(self, refs: Sequence[BlockRef]) -> None:
        self.pool.unpin(ref.block_id for ref in refs if self.pool.is_current(ref) and self.pool.is_pinned(ref.block_id))

    # --- the pass ---------------------------------------------------------------------------------------------------------------

    def open_journal(self) -> None:
        self.journal = Journal()

    def close_journal(self) -> None:
        """The pass succeeded: swap blocks that were read are free again."""
        self.swap_space.give_back([copy.source for copy in self.journal.swap_in])

    def undo(self, step: Step) -> None:
        """The pass failed: what it was to write is forgotten, and requests that relied on it start over."""
        journal = self.journal
        for request, chain, num_chained in reversed(journal.chains):
            if request.num_chained:
                request.chain_to(chain, num_chained)
        self.swap_space.give_back([copy.source for copy in journal.swap_in])
        for request in journal.uncertain.values():
            if request.phase is Phase.RUNNING:
                self.preempt(step, request)
            elif request.phase is Phase.PREEMPTED:
                self.give_up_blocks(step, request)
        if journal.indexed:
            self.evict(step, [b for b in journal.indexed if self.pool.record(b) is not None])

    # --- proof --------------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Compare the pool with every request's table. Raises IntegrityError."""
        requests = [*self.running.values(), *self.waiting.values(), *self.held.values()]
        self.pool.check_integrity(request.held_blocks() for request in requests)
        size = self.pool.block_size
        writable = ((r, block_id) for r in self.running.values() for block_id in r.block_table[r.num_computed // size :])
        wrong = [
            f"{request!r} may write block {block_id}, which is shared or indexed"
            for request, block_id in writable
            if self.pool.count(block_id) != 1 or self.pool.record(block_id) is not None
        ]
        swapped = sum(len(request.swapped) for request in requests)
        if swapped + self.swap_space.num_free != self.swap_space.num_blocks:
            wrong.append(f"{swapped} swapped and {self.swap_space.num_free} free of {self.swap_space.num_blocks} swap blocks")
        if wrong:
            raise IntegrityError("; ".join(wrong))
