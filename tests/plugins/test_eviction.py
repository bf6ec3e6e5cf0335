"""Who is forgotten first."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from treadle import Engine, SamplingParams, hookimpl
from treadle.testing import drain_checked, make_engine

BLOCK = 16
A, B, C, D = ([start + n for n in range(BLOCK)] for start in (100, 300, 500, 700))


class Names:
    """Whose block is which."""

    def __init__(self) -> None:
        self.of: dict[int, str] = {}

    @hookimpl
    def blocks_filled(self, request: Any, block_ids: Sequence[int]) -> None:
        self.of.update(dict.fromkeys(block_ids, request.id[0]))


def use(engine: Engine, prompt: Sequence[int], name: str, **options: Any) -> int:
    """Serve a prompt of one full block and a token; returns how many tokens were found in the cache."""
    handle = engine.submit([*prompt, 5], SamplingParams(max_tokens=1), request_id=name, **options)
    drain_checked(engine)
    return handle.completion().num_cached_tokens


def plugin_of(engine: Engine, name: str) -> Any:
    return next(item.plugin for item in engine.manager.registered if item.name == name)


def forgotten(strategy: str, *uses: str, num_blocks: int = 3) -> list[str]:
    """Fill a cache by `uses`; returns who would go for so many blocks, in turn."""
    prompts = {"a": A, "b": B, "c": C}
    names = Names()
    with make_engine(names, num_blocks=5, evict=strategy) as engine:
        for number, name in enumerate(uses):
            use(engine, prompts[name], f"{name}{number}")
        step: Any = SimpleNamespace(pool=engine.kv_cache.pool)
        chosen = plugin_of(engine, f"evict.{strategy}").evict(step, num_blocks)
        assert chosen == plugin_of(engine, f"evict.{strategy}").evict(step, num_blocks), "asking changes nothing"
        return [names.of[block_id] for block_id in chosen]


def test_lru_forgets_what_was_unused_longest() -> None:
    assert forgotten("lru", "a", "b", "c") == ["a", "b", "c"]
    assert forgotten("lru", "a", "b", "c", "a") == ["b", "c", "a"]
    assert forgotten("lru", "a", "b", "c", "a", "b", num_blocks=1) == ["c"]


def test_fifo_forgets_what_was_computed_first_however_often_it_is_used() -> None:
    assert forgotten("fifo", "a", "b", "c") == ["a", "b", "c"]
    assert forgotten("fifo", "a", "b", "c", "a", "a") == ["a", "b", "c"]


def test_lfu_forgets_what_was_used_least_and_of_equals_the_longest_unused() -> None:
    assert forgotten("lfu", "a", "b", "c") == ["a", "b", "c"]
    assert forgotten("lfu", "a", "a", "b", "c", "c", "c") == ["b", "a", "c"]
    assert forgotten("lfu", "a", "a", "a", "b", "c", "b", "c") == ["b", "c", "a"]


@pytest.mark.parametrize("strategy", ["lru", "lfu", "cost_aware"])
def test_the_end_of_a_sequence_goes_before_its_start(strategy: str) -> None:
    with make_engine(num_blocks=8, evict=strategy) as engine:
        long_one = list(range(5 * BLOCK))
        for prompt in (long_one, [900] * (4 * BLOCK)):
            engine.submit(prompt, SamplingParams(max_tokens=1))
            drain_checked(engine)
        handle = engine.submit(long_one, SamplingParams(max_tokens=1))
        drain_checked(engine)
        assert handle.completion().num_cached_tokens >= 3 * BLOCK


def test_uses_are_forgotten_with_a_block() -> None:
    """A block that comes back after it was evicted starts anew, whatever it was before."""
    with make_engine(num_blocks=3, evict="lfu") as engine:
        for number in range(4):
            use(engine, A, f"a{number}")
        engine.submit(D * 2 + [5], SamplingParams(max_tokens=1), request_id="d")
        drain_checked(engine)
        assert use(engine, A, "again") == 0
        assert use(engine, B, "b0") == 0
        assert use(engine, B, "b1") == BLOCK
        engine.submit(C + [5] * BLOCK, SamplingParams(max_tokens=1), request_id="c")
        drain_checked(engine)
        assert use(engine, B, "b2") == BLOCK, "the one with one use stays, the one with none goes"


@pytest.mark.parametrize("strategy", ["lru", "lfu", "fifo", "cost_aware"])
def test_what_is_pinned_stays(strategy: str) -> None:
    with make_engine(num_blocks=4, evict=strategy) as engine:
        use(engine, A, "a", pin_s=1000.0)
        for number in range(20):
            use(engine, [100 + number] * BLOCK, f"x{number}")
        assert use(engine, A, "again") == BLOCK


@pytest.mark.parametrize("strategy", ["lfu", "fifo", "cost_aware"])
def test_the_heap_does_not_grow_with_use(strategy: str) -> None:
    with make_engine(num_blocks=4, evict=strategy) as engine:
        for number in range(400):
            use(engine, A, f"a{number}")
        assert len(plugin_of(engine, f"evict.{strategy}")._heap) <= 80
