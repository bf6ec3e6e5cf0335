"""The pool's books: which block is free, used or cached, and what stands in it. No policy.

A block is *free*, *used* (its count, the number of tables that hold it, is at least 1) or *cached* (count 0, but indexed). Here
for a block size of 4, with two requests that share their first block, and a finished one's blocks kept for reuse:

    block      0          1          2          3          4        5
    tokens  [a b c d]  [e f g .]  [e x . .]  [p q r s]  [t u v w]  [. . . .]
    count      2          1          1          0          0        0
    state     used       used       used      cached     cached    free
    record   root>0        -          -       root>3       3>4       -

`PoolView` is what plugins see: queries only. `BlockPool` adds the verbs, which are the core's alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class IntegrityError(AssertionError):
    """The books contradict themselves: a defect of the core, never a user's mistake."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self._notes: list[str] = []

    def attach(self, text: str) -> None:
        """Add what a plugin knows of it."""
        self._notes.append(text)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self._notes])


class BlockRef(NamedTuple):
    """A block as it stood when it was indexed: ids are used again, generations are not."""

    block_id: int
    generation: int


class BlockRecord(NamedTuple):
    """What an indexed block holds: full, read only, shareable by those whose isolation key is equal."""

    ref: BlockRef
    parent: BlockRef | None
    """The block before it; None for the first of a sequence."""
    tokens: tuple[int, ...]
    isolation_key: Hashable


BROKEN = BlockRef(0, -1)
"""Stands where a chain of indexed blocks cannot be continued: no block ever has this generation."""


class BlockTable:
    """Which blocks hold a request's KV. The KV cache alone changes it.

    block_ids      7    2    9    5          block size 4, 9 of 10 known tokens computed
    tokens       [0-3][4-7][8 . .][. . .]
    num_computed             ^9              block 5 is reserved
    num_chained    2                         blocks 7 and 2 are indexed, `chain` is the record of block 2
    swapped      {}                          or {place: block of swap space} while it waits with KV in host memory
    """

    __slots__ = ("block_ids", "chain", "num_chained", "num_computed", "swapped")

    def __init__(self) -> None:
        self.block_ids: tuple[int, ...] = ()
        self.num_computed = 0
        """Known tokens whose KV is in the pool."""
        self.swapped: dict[int, int] = {}
        self.chain: BlockRef | None = None
        """The indexed block that stands for the first `num_chained` blocks of tokens; None at the root."""
        self.num_chained = 0
        """How many full blocks have been offered to the index."""

    def held(self) -> tuple[int, ...]:
        """Blocks of the pool: the table, less what is swapped out."""
        if not self.swapped:
            return self.block_ids
        return tuple(b for place, b in enumerate(self.block_ids) if place not in self.swapped)


class Dropped(NamedTuple):
    """What became of blocks that nobody holds any more."""

    cached: tuple[int, ...]
    freed: tuple[int, ...]


class Evicted(NamedTuple):
    """Blocks that left the index, and those of them that are free now (the others are still held)."""

    left_index: tuple[int, ...]
    freed: tuple[int, ...]


class PoolView:
    """Queries on the pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._counts = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._records: list[BlockRecord | None] = [None] * num_blocks
        self._pins: Counter[int] = Counter()
        self._children: dict[tuple[BlockRef | None, Hashable], dict[tuple[int, ...], int]] = {}
        self._num_free = num_blocks
        self._num_cached = 0
        self._num_pinned_cached = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def block_size(self) -> int:
        """Tokens that a block holds."""
        return self._block_size

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_used(self) -> int:
        return self._num_blocks - self._num_free - self._num_cached

    @property
    def num_available(self) -> int:
        """Free blocks, and cached ones that may be evicted."""
        return self._num_free + self._num_cached - self._num_pinned_cached

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    def count(self, block_id: int) -> int:
        """Tables that hold the block."""
        return self._counts[block_id]

    def record(self, block_id: int) -> BlockRecord | None:
        """What stands in the block, when it is indexed."""
        return self._records[block_id]

    def generation(self, block_id: int) -> int:
        """How many times the block has been indexed: with its id, the name of what stands or stood in it last."""
        return self._generations[block_id]

    def is_free(self, block_id: int) -> bool:
        return self._counts[block_id] == 0 and self._records[block_id] is None

    def is_cached(self, block_id: int) -> bool:
        return self._counts[block_id] == 0 and self._records[block_id] is not None

    def is_pinned(self, block_id: int) -> bool:
        """Pinned blocks are not evicted."""
        return block_id in self._pins

    def is_current(self, ref: BlockRef) -> bool:
        """Whether the block is still indexed as it was then."""
        record = self._records[ref.block_id]
        return record is not None and record.ref == ref

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self._block_size)

    def successors(self, block_id: int) -> tuple[int, ...]:
        """Indexed blocks whose parent is this one."""
        record = self._records[block_id]
        return () if record is None else tuple(self._children.get((record.ref, record.isolation_key), {}).values())


class BlockPool(PoolView):
    """The core's side of the pool."""

    def take(self, block_ids: Sequence[int]) -> None:
        """Free blocks become used, with one owner."""
        for block_id in block_ids:
            assert self.is_free(block_id), f"block {block_id} is not free"
            self._counts[block_id] = 1
        self._num_free -= len(block_ids)

    def share(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """One more table holds each of these indexed blocks. Returns those that were cached."""
        reused = []
        for block_id in block_ids:
            assert self._records[block_id] is not None, f"block {block_id} is not indexed"
            if self._counts[block_id] == 0:
                reused.append(block_id)
                self._num_pinned_cached -= block_id in self._pins
            self._counts[block_id] += 1
        self._num_cached -= len(reused)
        return tuple(reused)

    def drop(self, block_ids: Sequence[int]) -> Dropped:
        """One table fewer holds each block. Tail first, so that the start of a sequence is the last to be forgotten."""
        cached: list[int] = []
        freed: list[int] = []
        for block_id in reversed(block_ids):
            assert self._counts[block_id] > 0, f"block {block_id} is not used"
            self._counts[block_id] -= 1
            if self._counts[block_id] == 0:
                (freed if self._records[block_id] is None else cached).append(block_id)
                self._num_pinned_cached += block_id in self._pins
        self._num_free += len(freed)
        self._num_cached += len(cached)
        return Dropped(tuple(cached), tuple(freed))

    def index(self, block_id: int, parent: BlockRef | None, tokens: tuple[int, ...], isolation_key: Hashable) -> BlockRef | None:
        """Make a full block shareable. Returns the block that stands for these tokens: this one, or an equal one indexed before.

        None when the parent has left the index: then nobody could find this block.
        """
        assert self._counts[block_id] > 0, f"block {block_id} is not used"
        assert self._records[block_id] is None, f"block {block_id} is indexed already"
        if parent is not None and not self.is_current(parent):
            return None
        siblings = self._children.setdefault((parent, isolation_key), {})
        equal = siblings.get(tokens)
        if equal is not None:
            return BlockRef(equal, self._generations[equal])
        self._generations[block_id] += 1
        ref = BlockRef(block_id, self._generations[block_id])
        siblings[tokens] = block_id
        self._records[block_id] = BlockRecord(ref, parent, tokens, isolation_key)
        return ref

    def unindex(self, block_ids: Iterable[int]) -> Evicted:
        """Take blocks out of the index, with all that follow them, since nobody could find those any more."""
        left: list[int] = []
        freed: list[int] = []
        todo = list(block_ids)
        while todo:
            block_id = todo.pop()
            record = self._records[block_id]
            if record is None:
                continue
            todo.extend(self.successors(block_id))
            self._forget(record)
            left.append(block_id)
            if self._counts[block_id] == 0:
                freed.append(block_id)
        self._num_cached -= len(freed)
        self._num_free += len(freed)
        return Evicted(tuple(left), tuple(freed))

    def pin(self, block_ids: Iterable[int]) -> None:
        """Keep indexed blocks from eviction until they are unpinned as often."""
        for block_id in block_ids:
            assert self._records[block_id] is not None, f"block {block_id} is not indexed"
            self._num_pinned_cached += self._counts[block_id] == 0 and block_id not in self._pins
            self._pins[block_id] += 1

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Pinned once less. A block that left the index meanwhile is pinned no more."""
        for block_id in block_ids:
            if self._pins[block_id] > 1:
                self._pins[block_id] -= 1
            else:
                self._unpin_wholly(block_id)

    @contextmanager
    def protected(self, block_ids: Sequence[int]) -> Iterator[None]:
        """These indexed blocks are pinned while the context is open: nobody may evict them."""
        self.pin(block_ids)
        try:
            yield
        finally:
            self.unpin(block_ids)

    def _unpin_wholly(self, block_id: int) -> None:
        if block_id in self._pins:
            del self._pins[block_id]
            self._num_pinned_cached -= self._counts[block_id] == 0

    def _forget(self, record: BlockRecord) -> None:
        block_id = record.ref.block_id
        siblings = self._children[record.parent, record.isolation_key]
        del siblings[record.tokens]
        if not siblings:
            del self._children[record.parent, record.isolation_key]
        self._unpin_wholly(block_id)
        self._records[block_id] = None

    # --- proof --------------------------------------------------------------------------------------------------------------

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the books with the tables that hold blocks. Raises IntegrityError with every contradiction found."""
        held = Counter(block_id for table in tables for block_id in table)
        wrong = [f"block {b}: count {c}, held by {held[b]}" for b, c in enumerate(self._counts) if c != held[b]]
        free = sum(self.is_free(b) for b in range(self._num_blocks))
        cached = sum(self.is_cached(b) for b in range(self._num_blocks))
        if (free, cached) != (self._num_free, self._num_cached):
            wrong.append(f"{free} free and {cached} cached blocks, booked as {self._num_free} and {self._num_cached}")
        wrong += [f"block {b} is pinned but not indexed" for b in self._pins if self._records[b] is None]
        pinned = sum(self.is_cached(b) for b in self._pins)
        if pinned != self._num_pinned_cached:
            wrong.append(f"{pinned} cached blocks are pinned, booked as {self._num_pinned_cached}")
        wrong += self._wrong_records()
        if wrong:
            raise IntegrityError("; ".join(wrong))

    def _wrong_records(self) -> list[str]:
        wrong = []
        for block_id, record in enumerate(self._records):
            if record is None:
                continue
            if record.ref != (block_id, self._generations[block_id]):
                wrong.append(f"block {block_id} has the record of {record.ref}")
            if len(record.tokens) != self._block_size:
                wrong.append(f"block {block_id} is indexed with {len(record.tokens)} tokens")
            if record.parent is not None and not self.is_current(record.parent):
                wrong.append(f"block {block_id} follows {record.parent}, which is not indexed")
            if self._children.get((record.parent, record.isolation_key), {}).get(record.tokens) != block_id:
                wrong.append(f"block {block_id} is not among its parent's successors")
        listed = sum(len(c) for c in self._children.values())
        if listed != sum(r is not None for r in self._records):
            wrong.append(f"{listed} successors are listed for {sum(r is not None for r in self._records)} records")
        return wrong
