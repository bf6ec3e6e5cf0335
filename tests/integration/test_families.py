"""Tiny models of every family, read from a directory: the engine's greedy tokens equal `generate`'s."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.reference import Reference, reference_of, save_tiny  # noqa: E402
from support.tiny import FAMILIES, VOCAB_SIZE  # noqa: E402
from treadle import Engine, SamplingParams  # noqa: E402  # after the skips
from treadle.testing.traffic import Tally  # noqa: E402

NUM_TOKENS = 24
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 50, 64)
PREFIX_LENGTH = 40


class Family(NamedTuple):
    """A tiny model on the disk, prompts, and what transformers makes of them."""

    folder: Path
    prompts: list[list[int]]
    truths: list[Reference]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny(request.param, folder)
    numbers = random.Random(1)  # noqa: S311  # tokens, not secrets
    tokens = [numbers.randrange(VOCAB_SIZE) for _ in range(1000)]
    prompts = [tokens[length : 2 * length] for length in LENGTHS]
    prompts += [tokens[:PREFIX_LENGTH] + tokens[at : at + 7] for at in (500, 600, 700, 800)]
    truths = [reference_of(model, prompt, NUM_TOKENS) for prompt in prompts]
    gap = min(truth.gap for truth in truths)
    print(f"{request.param}: smallest gap of the two best logits {gap:.2g}")
    assert gap > 1e-3
    return Family(folder, prompts, truths)


def check(family: Family, tally: Tally, **values: Any) -> None:
    """Serve all prompts, half of them after a few steps; the tokens must be the true ones."""
    values.setdefault("allocate", {"block_size": 16})
    execute = {"strategy": "torch", "dtype": "float32"}
    with Engine.load(plugins=[tally], model=str(family.folder), execute=execute, **values) as engine:
        handles = []
        for number, prompt in enumerate(family.prompts):
            handles.append(engine.submit(prompt, SamplingParams(max_tokens=NUM_TOKENS)))
            if number % 2 and number > 4:
                engine.step()
        while engine.busy:
            engine.step()
            engine.check_integrity()
        assert engine.kv_cache.pool.num_used == 0
        assert engine.kv_cache.swap_space.num_free == engine.info.num_swap_blocks
        for handle, truth, prompt in zip(handles, family.truths, family.prompts, strict=True):
            assert handle.result().token_ids == truth.tokens, f"prompt of {len(prompt)} tokens"


@pytest.mark.parametrize("prefix", ["hash_chain", "radix", "none"])
def test_greedy_equals_generate(family: Family, prefix: str) -> None:
    tally = Tally()
    check(family, tally, prefix=prefix)
    assert bool(tally["matched"]) == (prefix != "none")


@pytest.mark.parametrize("prefix", ["hash_chain", "radix", "none"])
def test_a_tiny_pool_and_small_chunks(family: Family, prefix: str) -> None:
    tally = Tally()
    check(family, tally, prefix=prefix, pool={"num_blocks": 10}, budget={"max_tokens": 11})
    assert tally["preempted"]
    assert bool(tally["evicted"]) == (prefix != "none")


@pytest.mark.parametrize(("prefix", "swap_memory"), [("hash_chain", "1MiB"), ("radix", "24KiB"), ("none", "1MiB")])
def test_swapped_requests_resume_where_they_were(family: Family, prefix: str, swap_memory: str) -> None:
    """Where swap space is short, some start over instead."""
    tally = Tally()
    pool = {"num_blocks": 10, "swap_memory": swap_memory}
    check(family, tally, prefix=prefix, preempt="swap", pool=pool)
    assert tally["swapped"] or swap_memory == "24KiB"
    assert (tally["swapped"] < tally["preempted"]) == (swap_memory == "24KiB")


def test_blocks_of_64(family: Family) -> None:
    check(family, Tally(), allocate={"block_size": 64}, pool={"num_blocks": 3})
