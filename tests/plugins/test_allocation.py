"""Free blocks as runs, and what the allocation strategies make of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle import EngineInfo, KVFormat, ModelInfo, SamplingParams, hookimpl
from treadle.testing import FakeExecutor, VirtualClock, drain_checked, make_engine
from treadle_plugins.allocate.coalescing import Coalescing, CoalescingSettings
from treadle_plugins.allocate.extents import Extents

NUM_BLOCKS = 24
INFO = EngineInfo(ModelInfo("m", 1, 1, 1, 10, 100), KVFormat(), 16, NUM_BLOCKS, 0, VirtualClock())


def runs_of(free: set[int]) -> dict[int, int]:
    """The runs of a set of blocks, the slow way: start -> length."""
    groups = groupby(enumerate(sorted(free)), key=lambda pair: pair[1] - pair[0])
    runs = [[block_id for _, block_id in group] for _, group in groups]
    return {run[0]: len(run) for run in runs}


class FakeRequest:
    """As much of a request as an allocation strategy looks at."""

    def __init__(self, *block_table: int) -> None:
        self.block_table = block_table


@given(st.lists(st.sets(st.integers(0, NUM_BLOCKS - 1), min_size=1), max_size=30))
def test_runs_are_those_of_a_set(changes: list[set[int]]) -> None:
    """Each change takes the blocks that are free and gives back those that are not."""
    extents, free = Extents(NUM_BLOCKS), set(range(NUM_BLOCKS))
    for change in changes:
        extents.remove(change & free)
        extents.add([change - free])
        free ^= change
        runs = runs_of(free)
        assert extents.num_free == len(free)
        assert extents.largest == max(runs.values(), default=0)
        assert {b: extents.run_at(b) for b in range(NUM_BLOCKS) if extents.run_at(b)} == runs
        assert extents.fragmentation == pytest.approx(1 - extents.largest / len(free) if free else 0)


@given(st.sets(st.integers(0, NUM_BLOCKS - 1)), st.integers(1, NUM_BLOCKS))
def test_the_best_fit_is_the_shortest_run_that_is_long_enough(taken: set[int], wanted: int) -> None:
    extents = Extents(NUM_BLOCKS)
    extents.remove(taken)
    runs = runs_of(set(range(NUM_BLOCKS)) - taken)
    start = extents.best_fit(wanted)
    long_enough = [length for length in runs.values() if length >= wanted]
    assert (start is None) == (not long_enough)
    if start is not None:
        assert runs[start] == min(long_enough)


@given(st.sets(st.integers(0, NUM_BLOCKS - 1)), st.integers(0, NUM_BLOCKS))
def test_what_no_run_holds_is_gathered_from_the_longest(taken: set[int], wanted: int) -> None:
    extents = Extents(NUM_BLOCKS)
    extents.remove(taken)
    free = set(range(NUM_BLOCKS)) - taken
    if wanted > len(free):
        return
    chosen = extents.longest_first(wanted)
    assert len(chosen) == len(set(chosen)) == wanted
    assert set(chosen) <= free


def test_a_block_that_is_not_free_cannot_be_taken() -> None:
    extents = Extents(4)
    extents.remove([2])
    with pytest.raises(AssertionError, match="block 2 is not free"):
        extents.remove([2])


def coalescing(taken: Sequence[int], run_blocks: int = 1) -> Coalescing:
    strategy = Coalescing(CoalescingSettings(run_blocks=run_blocks))
    strategy.engine_started(INFO)
    strategy.blocks_allocated(taken)
    return strategy


def allocate(strategy: Coalescing, request: Any, num_blocks: int) -> list[int] | None:
    return strategy.allocate(request, num_blocks)


def test_a_request_goes_on_where_it_stopped() -> None:
    strategy = coalescing(taken=range(4))
    assert allocate(strategy, FakeRequest(2, 3), 2) == [4, 5]


def test_a_new_request_gets_the_shortest_run_that_fits() -> None:
    # free: 2-3, 6-8, 10 and on
    strategy = coalescing(taken=[0, 1, 4, 5, 9])
    assert allocate(strategy, FakeRequest(), 2) == [2, 3]
    assert allocate(strategy, FakeRequest(), 3) == [6, 7, 8]
    assert allocate(strategy, FakeRequest(), 4) == [10, 11, 12, 13]


def test_a_run_is_reserved_where_there_is_one() -> None:
    assert allocate(coalescing(taken=[0], run_blocks=4), FakeRequest(), 1) == [1, 2, 3, 4]
    # only single blocks are free
    assert allocate(coalescing(taken=range(0, NUM_BLOCKS, 2), run_blocks=4), FakeRequest(), 1) == [1]


def test_fragments_are_used_when_no_run_is_long_enough() -> None:
    strategy = coalescing(taken=range(0, NUM_BLOCKS, 2))
    chosen = allocate(strategy, FakeRequest(), 5)
    assert chosen is not None
    assert len(set(chosen)) == 5
    assert all(block_id % 2 for block_id in chosen)
    assert allocate(strategy, FakeRequest(), NUM_BLOCKS // 2 + 1) is None


def test_fragmentation_is_told() -> None:
    strategy = coalescing(taken=range(NUM_BLOCKS))
    assert strategy.fragmentation == 0
    strategy.blocks_freed([1])
    assert strategy.fragmentation == 0
    strategy.blocks_freed([3, 5])
    assert strategy.fragmentation == pytest.approx(2 / 3)
    strategy.blocks_freed([2, 4])
    assert strategy.fragmentation == 0


class Tables:
    """Whose blocks came when."""

    def __init__(self) -> None:
        self.given: dict[str, list[list[int]]] = {}

    @hookimpl
    def blocks_allocated(self, request: Any, block_ids: Sequence[int]) -> None:
        self.given.setdefault(request.id, []).append(list(block_ids))


@pytest.mark.parametrize(("reserve", "expected"), [("max_tokens", 3), ("model_length", 8)])
def test_contiguous_reserves_once_and_for_all(reserve: str, expected: int) -> None:
    tables = Tables()
    allocate = {"strategy": "contiguous", "reserve": reserve}
    executor = FakeExecutor(max_length=8 * 16)
    with make_engine(tables, executor=executor, num_blocks=20, allocate=allocate, prefix="none") as engine:
        for name in ("a", "b"):
            # the last of 49 tokens is never computed: 48 fill three blocks
            engine.submit([1] * 9, SamplingParams(max_tokens=40), request_id=name)
        drain_checked(engine)
    for pieces in tables.given.values():
        assert len(pieces) == 1, "more was asked for while the request ran"
        (blocks,) = pieces
        assert blocks == list(range(blocks[0], blocks[0] + expected))


def test_paged_uses_the_block_that_was_freed_last() -> None:
    tables = Tables()
    with make_engine(tables, num_blocks=8, allocate="paged", prefix="none") as engine:
        for name in ("a", "b"):
            engine.submit([1] * 20, SamplingParams(max_tokens=2), request_id=name)
            drain_checked(engine)
    assert set(tables.given["b"][0]) == set(tables.given["a"][0])
