"""Every pair of installed strategies serves a tiny model from a tiny pool, and the tokens equal `generate`'s."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.reference import ModelCache, Reference, reference_of, save_tiny  # noqa: E402
from support.tiny import VOCAB_SIZE  # noqa: E402
from treadle import Engine, SamplingParams  # noqa: E402  # after the skips
from treadle.registry import Registry  # noqa: E402
from treadle.testing.combinations import covering_rows, tables  # noqa: E402
from treadle.testing.traffic import Tally  # noqa: E402

NUM_TOKENS = 20
NUM_REQUESTS = 12
POOL = {"num_blocks": 8, "swap_memory": "80KiB"}
Row = dict[str, str]


def widened(rows: Sequence[Row], slot: str, names: Sequence[str]) -> list[Row]:
    """The rows with one slot more, some of them twice, so that each of `names` meets every strategy of the others."""
    missing = {(item, name) for row in rows for item in row.items() for name in names}
    wide: list[Row] = []
    for row in cycle(rows):
        if not missing and len(wide) >= len(rows):
            return wide
        name = max(names, key=lambda n: sum((item, n) in missing for item in row.items()))
        met = {(item, name) for item in row.items()}
        if met & missing or len(wide) < len(rows):
            wide.append({**row, slot: name})
        missing -= met
    return wide


REGISTRY = Registry.installed()
ATTENTION = [name for name in REGISTRY.names("attention") if name in ("auto", "torch", "cpu")]
"""Those that serve any processor."""
ROWS = widened(covering_rows(REGISTRY), "attention", ATTENTION)


class Tiny(NamedTuple):
    """A model on the disk, prompts and the truth about them."""

    folder: Path
    prompts: list[list[int]]
    truths: list[Reference]
    shelf: ModelCache


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("llama")
    model = save_tiny("llama", folder)
    numbers = random.Random(2)  # noqa: S311  # tokens, not secrets
    system = [numbers.randrange(VOCAB_SIZE) for _ in range(34)]
    prompts = []
    for number in range(NUM_REQUESTS):
        own = [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.choice((1, 5, 15, 16, 33, 60)))]
        prompts.append(system + own if number % 3 == 0 else own)
    truths = [reference_of(model, prompt, NUM_TOKENS) for prompt in prompts]
    gap = min(truth.gap for truth in truths)
    print(f"{len(ROWS)} rows; smallest gap of the two best logits {gap:.2g}")
    assert gap > 1e-3
    return Tiny(folder, prompts, truths, ModelCache())


def unhurried(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Real time is not to decide what happens: the adaptive budget finds every step quick enough."""
    if values["budget"]["strategy"] == "adaptive":
        values["budget"]["tpot_ms"] = 60_000
    return values


def make_engine(tiny: Tiny, row: Row, tally: Tally) -> Engine:
    values: dict[str, Any] = {
        **unhurried(tables(row)),
        "pool": POOL,
        "execute": {"strategy": "torch", "dtype": "float32"},
        "quantize": "none",
    }
    values["allocate"] = {"block_size": 16, **tables(row)["allocate"]}
    with tiny.shelf.in_use():
        return Engine.load(plugins=[tally], model=str(tiny.folder), **values)


def serve(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Two rounds of all prompts, with priorities: one at once, the other arriving while the first is served."""
    params = SamplingParams(max_tokens=NUM_TOKENS)
    handles = [engine.submit(prompt, params, priority=number % 3) for number, prompt in enumerate(prompts)]
    late = list(reversed(prompts))
    while engine.busy or late:
        if late:
            handles.append(engine.submit(late.pop(), params, priority=len(late) % 2))
        engine.step()
        engine.check_integrity()
    return [handle.result().raise_for_error().token_ids for handle in handles]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_greedy_equals_generate(tiny: Tiny, row: Row) -> None:
    tally = Tally()
    with make_engine(tiny, row, tally) as engine:
        outputs = serve(engine, tiny.prompts)
        assert engine.kv_cache.pool.num_used == 0
    assert outputs == [truth.tokens for truth in tiny.truths] * 2
    if row["prefix"] != "none":
        assert tally["matched"]
        assert tally["evicted"]
    # what reserves for the longest answer never runs short
    if row["allocate"] != "contiguous" and row["preempt"] != "none":
        assert tally["preempted"]
        assert bool(tally["swapped"]) or row["preempt"] != "swap"


def test_every_attention_meets_every_strategy() -> None:
    met = {(item, row["attention"]) for row in ROWS for item in row.items() if item[0] != "attention"}
    items = {item for item, _ in met}
    assert len(met) == len(items) * len(ATTENTION)
    print(f"{len(ROWS)} rows for {len(items)} strategies and {len(ATTENTION)} kinds of attention")
