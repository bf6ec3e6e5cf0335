"""The pool's books against a model that computes everything anew from what is held and what is indexed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from treadle.blocks import BlockPool, BlockRef, IntegrityError

SIZE = 2
BLOCKS = 7


class Table:
    """Blocks in order, and how many of the first are behind an index entry of the pool: `chain` is the last of those."""

    def __init__(self, blocks: list[int], key: str, chain: BlockRef | None = None, num_indexed: int = 0) -> None:
        self.blocks = blocks
        self.key = key
        self.chain = chain
        self.num_indexed = num_indexed


class PoolAgainstModel(RuleBasedStateMachine):
    tables = Bundle("tables")

    @initialize()
    def begin(self) -> None:
        self.pool = BlockPool(BLOCKS, SIZE)
        self.held: list[Table] = []
        self.records: dict[int, tuple[int | None, tuple[int, ...], str]] = {}
        """The model's index: block -> (parent block, tokens, isolation key)."""
        self.pins: Counter[int] = Counter()

    def _count(self, block_id: int) -> int:
        return sum(table.blocks.count(block_id) for table in self.held)

    def _free(self) -> list[int]:
        return [b for b in range(BLOCKS) if not self._count(b) and b not in self.records]

    def _cached(self) -> list[int]:
        return [b for b in self.records if not self._count(b)]

    def _descendants(self, block_id: int) -> set[int]:
        children = {b for b, (parent, _, _) in self.records.items() if parent == block_id}
        return {block_id}.union(*map(self._descendants, children)) if block_id in self.records else set()

    @rule(target=tables, number=st.integers(1, 3), key=st.sampled_from("ab"))
    def take(self, number: int, key: str) -> Table:
        blocks = self._free()[:number]
        self.pool.take(blocks)
        table = Table(blocks, key)
        self.held.append(table)
        return table

    @rule(table=tables, token=st.integers(0, 1))
    def index(self, table: Table, token: int) -> None:
        """Make the table's next block shareable, as the core does when it is full."""
        if table not in self.held or table.num_indexed >= len(table.blocks):
            return
        block_id = table.blocks[table.num_indexed]
        if block_id in self.records or not self.pool.count(block_id):
            return
        parent = table.chain
        tokens, key = (token,) * SIZE, table.key
        ref = self.pool.index(block_id, parent, tokens, key)
        if parent is not None and not (parent.block_id in self.records and self.pool.record(parent.block_id) is not None):
            assert ref is None
            return
        if ref is None:
            assert parent is not None
            assert not self.pool.is_current(parent)
            return
        entry = (None if parent is None else parent.block_id, tokens, key)
        equal = [b for b, known in self.records.items() if known == entry]
        assert ref.block_id == (equal[0] if equal else block_id), "a duplicate is not indexed"
        self.records.setdefault(ref.block_id, entry)
        table.chain = ref
        table.num_indexed += 1

    @precondition(lambda self: self.records)
    @rule(target=tables, data=st.data())
    def share(self, data: Any) -> Table:
        """Hold an indexed block with all that come before it."""
        block_id = data.draw(st.sampled_from(sorted(self.records)))
        blocks = [block_id]
        while (parent := self.records[blocks[0]][0]) is not None:
            blocks.insert(0, parent)
        were_cached = tuple(b for b in blocks if not self._count(b))
        assert self.pool.share(blocks) == were_cached
        record = self.pool.record(block_id)
        assert record is not None
        table = Table(blocks, self.records[block_id][2], record.ref, len(blocks))
        self.held.append(table)
        return table

    @rule(table=tables)
    def drop(self, table: Table) -> None:
        if table not in self.held:
            return
        self.held.remove(table)
        gone = [b for b in reversed(table.blocks) if not self._count(b)]
        dropped = self.pool.drop(table.blocks)
        assert list(dropped.cached) == [b for b in gone if b in self.records], "the end of a sequence comes first"
        assert list(dropped.freed) == [b for b in gone if b not in self.records]

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def unindex(self, data: Any) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.records)), min_size=1, max_size=2, unique=True))
        leaving = set().union(*map(self._descendants, chosen))
        evicted = self.pool.unindex(chosen)
        assert len(evicted.left_index) == len(leaving)
        assert set(evicted.left_index) == leaving
        assert set(evicted.freed) == {b for b in leaving if not self._count(b)}
        for block_id in leaving:
            del self.records[block_id]
            self.pins.pop(block_id, None)

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def pin(self, data: Any) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.records)))
        self.pool.pin([block_id])
        self.pins[block_id] += 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.pins)))
        self.pool.unpin([block_id])
        self.pins[block_id] -= 1
        if not self.pins[block_id]:
            del self.pins[block_id]

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        pool.check_integrity(table.blocks for table in self.held)
        free, cached = self._free(), self._cached()
        assert pool.num_free == len(free)
        assert pool.num_cached == len(cached)
        assert pool.num_used == BLOCKS - len(free) - len(cached)
        assert pool.num_available == len(free) + sum(b not in self.pins for b in cached)
        for block_id in range(BLOCKS):
            assert pool.count(block_id) == self._count(block_id)
            assert pool.is_free(block_id) == (block_id in free)
            assert pool.is_cached(block_id) == (block_id in cached)
            assert pool.is_pinned(block_id) == (block_id in self.pins)
            assert (pool.record(block_id) is not None) == (block_id in self.records)
            children = {b for b, (parent, _, _) in self.records.items() if parent == block_id}
            assert set(pool.successors(block_id)) == children


TestPoolAgainstModel = PoolAgainstModel.TestCase


# --- verbs that would corrupt the books are refused -----------------------------------------------------------------------------


@pytest.fixture
def pool() -> BlockPool:
    """Block 0 is indexed and used, 1 is used, 2 and 3 are free."""
    pool = BlockPool(4, SIZE)
    pool.take([0, 1])
    pool.index(0, None, (1, 2), "key")
    return pool


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("take", ([1],)),
        ("take", ([0],)),
        ("take", ([2, 2],)),
        ("share", ([1],)),
        ("share", ([2],)),
        ("drop", ([2],)),
        ("drop", ([1, 1],)),
        ("index", (2, None, (3, 4), "key")),
        ("index", (0, None, (3, 4), "key")),
        ("pin", ([1],)),
    ],
)
def test_a_forbidden_verb_is_an_assertion(verb: str, arguments: tuple[Any, ...], pool: BlockPool) -> None:
    with pytest.raises(AssertionError, match="block"):
        getattr(pool, verb)(*arguments)


def test_a_stale_reference_is_no_parent(pool: BlockPool) -> None:
    record = pool.record(0)
    assert record is not None
    pool.unindex([0])
    again = pool.index(0, None, (1, 2), "key")
    assert again is not None
    assert again.block_id == 0
    assert again.generation > record.ref.generation
    assert not pool.is_current(record.ref)
    assert pool.index(1, record.ref, (3, 4), "key") is None
    assert pool.index(1, again, (3, 4), "key") is not None


def test_equal_tokens_of_another_key_are_another_block(pool: BlockPool) -> None:
    ref = pool.index(1, None, (1, 2), "other key")
    assert ref is not None
    assert ref.block_id == 1
    assert pool.successors(0) == ()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (SIZE, 1), (SIZE + 1, 2), (10, 5)])
def test_blocks_for(num_tokens: int, num_blocks: int, pool: BlockPool) -> None:
    assert pool.blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda pool: pool._counts.__setitem__(2, 1), "block 2: count 1, held by 0"),
        (lambda pool: setattr(pool, "_num_free", 3), "2 free and 0 cached blocks, booked as 3 and 0"),
        (lambda pool: pool._pins.update([1]), "block 1 is pinned but not indexed"),
        (lambda pool: pool._generations.__setitem__(0, 9), "block 0 has the record of"),
        (lambda pool: pool._children.clear(), "not among its parent's successors"),
    ],
)
def test_the_proof_finds_what_is_wrong(spoil: Any, told: str, pool: BlockPool) -> None:
    pool.check_integrity([[0, 1]])
    spoil(pool)
    with pytest.raises(IntegrityError, match=told):
        pool.check_integrity([[0, 1]])


def test_the_proof_compares_with_the_tables(pool: BlockPool) -> None:
    for tables in ([[0]], [[0, 1], [1]], [[0, 1, 2]]):
        with pytest.raises(IntegrityError, match="held by"):
            pool.check_integrity(tables)
