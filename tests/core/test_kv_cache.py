"""The verbs of the KV cache on one request's table: what is held, given up, swapped out and back, and pinned."""

from __future__ import annotations

from typing import Any

import pytest

from treadle import Phase, SamplingParams
from treadle.blocks import BROKEN, BlockPool, BlockRef
from treadle.clocks import VirtualClock
from treadle.hookspecs import Hooks
from treadle.kv_cache import KVCache, SwapSpace
from treadle.request import LiveRequest, RequestOptions
from treadle.step import Step
from treadle.testing import drain_checked

SIZE = 4


class Silent:
    """Tells nobody."""

    def __getattr__(self, name: str) -> Any:
        assert hasattr(Hooks, name)
        return lambda **_: None


@pytest.fixture
def cache() -> KVCache:
    return KVCache(BlockPool(12, SIZE), SwapSpace(3), Silent(), max_pinned=0.5)  # type: ignore[arg-type]  # nobody listens


@pytest.fixture
def step(cache: KVCache) -> Step:
    return Step(1, VirtualClock(), cache.pool, {}, {})


def _request(length: int = 10, name: str = "r") -> LiveRequest:
    request = LiveRequest(name, range(length), SamplingParams(), RequestOptions(), arrival_s=0.0, sequence=1)
    request.queue(40, frozenset(), "key")
    request.start(1, 0.0)
    return request


def _computed(cache: KVCache, step: Step, block_ids: tuple[int, ...], length: int = 10, name: str = "r") -> LiveRequest:
    request = _request(length, name)
    cache.allocate(step, request, block_ids)
    cache.advance(request, length)
    cache.fill(step, request, length)
    return request


def test_shared_blocks_take_the_place_of_reserved_ones(cache: KVCache, step: Step) -> None:
    _computed(cache, step, (5, 8, 9))
    request = _request()
    cache.allocate(step, request, (6, 7))
    match = cache.match(request, (5,))
    assert (match.num_tokens, match.num_blocks_needed) == (SIZE, 1)
    cache.share(step, request, (5,))
    assert (request.block_table, request.num_computed, request.num_cached_tokens) == ((5, 7), SIZE, SIZE)
    assert cache.pool.is_free(6)
    cache.share(step, request, (8,))
    assert (request.block_table, request.num_computed) == ((5, 8), 2 * SIZE)
    assert request.table.chain == BlockRef(8, 1)
    cache.free(step, request)
    assert (request.block_table, request.num_computed, request.table.num_chained, request.table.chain) == ((), 0, 0, None)
    assert request.num_cached_tokens == 2 * SIZE


def test_a_match_counts_what_its_start_would_take(cache: KVCache, step: Step) -> None:
    first = _computed(cache, step, (5, 8, 9))
    waiting = _request(21, "w")
    assert cache.match(waiting, ()).num_blocks_needed == 6
    assert cache.match(waiting, (5, 8)).num_blocks_needed == 4, "blocks in use cost nothing"
    cache.free(step, first)
    assert cache.match(waiting, (5, 8)).num_blocks_needed == 6, "cached ones could have gone to others"


def test_the_first_blocks_may_be_kept(cache: KVCache, step: Step) -> None:
    request = _computed(cache, step, (1, 2, 3))
    cache.truncate(step, request, 2)
    assert (request.block_table, request.num_computed) == ((1,), SIZE)
    assert (request.table.chain, request.table.num_chained) == (BlockRef(1, 1), 1)
    cache.disown(step, request)
    cache.truncate(step, request, None)
    assert request.block_table == ()


def test_a_chain_whose_block_left_the_index_cannot_be_continued(cache: KVCache, step: Step) -> None:
    request = _computed(cache, step, (1, 2, 3))
    cache.disown(step, request)
    cache.truncate(step, request, 2)
    assert request.table.chain == BROKEN


def test_swapped_places_are_not_held_until_they_are_back(cache: KVCache, step: Step) -> None:
    request = _computed(cache, step, (1, 2, 3, 4), 9)
    other = _request(9, "other")
    cache.share(step, other, (1,))
    assert cache.num_freed([(request, None, True)], ()) == 3
    assert cache.swap_out(step, request)
    assert (request.block_table, request.table.held(), request.num_computed) == ((1, 2, 3), (1,), 9)
    cache.swap_in(step, request, (8, 9))
    cache.confirm()
    assert request.block_table == request.table.held() == (1, 8, 9)
    assert (request.table.swapped, cache.swap_space.num_free) == ({}, 3)


def test_a_full_swap_space_changes_nothing(cache: KVCache, step: Step) -> None:
    request = _computed(cache, step, (1, 2, 3, 4), 16)
    assert not cache.swap_out(step, request)
    assert (request.block_table, cache.swap_space.num_free) == ((1, 2, 3, 4), 3)
    assert cache.swap_out(step, request, 2)


def test_what_would_be_freed_is_what_swap_space_has_room_for(cache: KVCache, step: Step) -> None:
    """The third finds swap space full, and gives up its last two blocks; by swap it would be two and the reserved one."""
    requests = [_computed(cache, step, (0, 1, 2), name="first")]
    for block_ids in ((3, 4), (5, 6, 7)):
        requests.append(_request(14))
        cache.share(step, requests[-1], (0, 1))
        cache.allocate(step, requests[-1], block_ids)
        cache.advance(requests[-1], 6)
    before = cache.pool.num_available
    told = cache.num_freed([(request, 2, True) for request in requests], ())
    for request in requests:
        if not cache.swap_out(step, request, 2):
            cache.truncate(step, request, 2)
    assert told == cache.pool.num_available - before == 1 + 2 + 2


def test_pins_are_kept_per_block_however_many_requests_ask(cache: KVCache, step: Step) -> None:
    first = _computed(cache, step, (1, 2, 3))
    for until_s in (5.0, 90.0, 30.0):
        cache.pin_prompt(first, until_s)
    assert cache.pool.num_pinned == 2
    assert len(cache._pinned_until) == 2
    cache.begin_step(60.0)
    assert cache.pool.num_pinned == 2, "the longest of them holds"
    cache.begin_step(90.0)
    assert (cache.pool.num_pinned, len(cache._pinned_until)) == (0, 0)
    cache.free(step, first)
    cache.check_integrity([])


def test_a_pinned_block_that_leaves_the_index_is_forgotten(cache: KVCache, step: Step) -> None:
    first = _computed(cache, step, (1, 2, 3))
    cache.pin_prompt(first, 90.0)
    cache.disown(step, first)
    assert (cache.pool.num_pinned, len(cache._pinned_until)) == (0, 0)
    cache.begin_step(100.0)


def test_four_thousand_pinned_requests_leave_no_trace(build: Any) -> None:
    engine = build(num_blocks=64)
    for number in range(300):
        engine.submit([number % 7] * 33, SamplingParams(max_tokens=1), pin_s=1e6, timeout_s=1e6)
        if number % 50 == 49:
            drain_checked(engine)
    drain_checked(engine)
    assert len(engine.kv_cache._pinned_until) <= 14
    assert len(engine._inbox._expiries) <= 66


def test_only_the_phase_running_may_write(build: Any) -> None:
    engine = build()
    handle = engine.submit([1] * 40, SamplingParams(max_tokens=3))
    engine.step()
    assert handle.request.phase is Phase.RUNNING
    block_id = handle.request.block_table[-1]
    engine.kv_cache.pool.share(handle.request.block_table[:1])
    with pytest.raises(AssertionError, match="count 2, held by 1"):
        engine.check_integrity()
    engine.kv_cache.pool.drop(handle.request.block_table[:1])
    assert engine.kv_cache.pool.count(block_id) == 1
