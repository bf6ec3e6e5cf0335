"""Finding the blocks that hold the start of a request, and never a wrong one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from treadle import Completion, Engine, SamplingParams
from treadle.testing import drain_checked, make_engine
from treadle.testing.traffic import assert_right, serve, shared_prefix_traffic
from treadle_plugins.prefix import hash_chain

BLOCK = 16
REUSING = ("hash_chain", "radix")


def ask(engine: Engine, prompt: Sequence[int], cache_salt: str | None = None) -> Completion:
    handle = engine.submit(prompt, SamplingParams(max_tokens=1), cache_salt=cache_salt)
    drain_checked(engine)
    return assert_right(engine, [handle])[0]


@pytest.mark.parametrize("strategy", REUSING)
def test_the_longest_known_prefix_is_found(strategy: str) -> None:
    with make_engine(prefix=strategy) as engine:
        ask(engine, range(5 * BLOCK))
        for length in (1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 1, 7 * BLOCK):
            expected = min((length - 1) // BLOCK, 5) * BLOCK
            assert ask(engine, range(length), cache_salt=None).num_cached_tokens >= expected
        branch = [*range(2 * BLOCK), *([900] * 20)]
        assert ask(engine, branch).num_cached_tokens == 2 * BLOCK
        assert ask(engine, branch).num_cached_tokens == 3 * BLOCK


@pytest.mark.parametrize("strategy", REUSING)
def test_output_is_found_by_the_next_turn_of_a_conversation(strategy: str) -> None:
    with make_engine(prefix=strategy) as engine:
        handle = engine.submit(range(20), SamplingParams(max_tokens=30))
        drain_checked(engine)
        turn = [*range(20), *handle.completion().token_ids, 7, 8, 9]
        # the last generated token was never computed
        assert ask(engine, turn).num_cached_tokens == 49 // BLOCK * BLOCK


@pytest.mark.parametrize("strategy", REUSING)
def test_a_chain_is_found_as_far_as_it_is_left(strategy: str) -> None:
    with make_engine(prefix=strategy, num_blocks=6) as engine:
        ask(engine, range(5 * BLOCK))
        ask(engine, [900] * (3 * BLOCK))
        left = ask(engine, range(5 * BLOCK)).num_cached_tokens
        assert 0 < left < 4 * BLOCK


def few(most: int) -> Callable[[object], int]:
    """A hash of so few values that most keys collide."""
    return lambda value: hash(value) % most


@pytest.mark.parametrize("most", [2, 3, 7])
def test_where_hashes_collide_nobody_gets_a_wrong_block(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_chain, "hash", few(most), raising=False)
    for seed in range(3):
        with make_engine(prefix="hash_chain", num_blocks=8) as engine:
            assert_right(engine, serve(engine, shared_prefix_traffic(seed=seed)))


def test_where_two_prefixes_collide_the_match_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys depend on how deep a block lies alone, so all prompts have the same keys."""

    def by_depth(value: tuple[object, tuple[int, ...]]) -> int:
        before = value[0]
        return before + 1 if isinstance(before, int) else 1

    monkeypatch.setattr(hash_chain, "hash", by_depth, raising=False)
    with make_engine(prefix="hash_chain") as engine:
        assert ask(engine, range(3 * BLOCK + 1)).num_cached_tokens == 0
        # the first block is the same, the second has the same key and other tokens
        other = [*range(BLOCK), *([900] * 2 * BLOCK), 1]
        assert ask(engine, other).num_cached_tokens == BLOCK
        assert ask(engine, other, cache_salt="other").num_cached_tokens == 0


def test_hash_chain_and_radix_find_the_same() -> None:
    rng = random.Random(1)  # noqa: S311  # has to be repeatable
    prompts: list[list[int]] = []
    for _ in range(60):
        base = rng.choice(prompts) if prompts and rng.random() < 0.7 else []
        prompts.append([*base[: rng.randrange(len(base) + 1)], *(rng.randrange(5) for _ in range(rng.randrange(1, 40)))][:110])
    found = []
    for strategy in REUSING:
        with make_engine(prefix=strategy, num_blocks=12) as engine:
            found.append([ask(engine, prompt).num_cached_tokens for prompt in prompts])
    assert found[0] == found[1]
    assert any(found[0])


def test_none_finds_nothing_and_leaves_nothing() -> None:
    with make_engine(prefix="none") as engine:
        for _ in range(2):
            assert ask(engine, range(50)).num_cached_tokens == 0
        assert engine.kv_cache.pool.num_cached == 0
