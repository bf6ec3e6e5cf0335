"""Every pair of installed strategies serves a tiny model from a tiny pool, and the tokens equal `generate`'s."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from treadle import Engine, SamplingParams  # noqa: E402  # after the skips
from treadle.registry import SLOTS, Registry  # noqa: E402
from treadle_plugins.execution.torch_executor.testing import VOCAB_SIZE  # noqa: E402
from treadle_plugins.execution.torch_executor.truth import Shelf, Truth, Watch, save_tiny, truth_of  # noqa: E402

NUM_TOKENS = 24
NUM_REQUESTS = 14
Stack = dict[str, str]

SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("admit", "continuous"): {"max_batch_size": 6},
    ("admit", "windowed"): {"max_batch_size": 6, "window_ms": 1.0, "min_batch": 2},
    ("admit", "static"): {"batch_size": 5, "max_wait_ms": 2.0},
    ("budget", "decode_first"): {"max_tokens": 48},
    ("order", "priority"): {"level_s": 1.0},
    **{("allocate", name): {"block_size": 16} for name in Registry.installed().names("allocate")},
}


def fits(stack: Mapping[str, str]) -> bool:
    """Contiguous allocation refuses prefix reuse; all else goes together."""
    return stack.get("allocate") != "contiguous" or stack.get("prefix", "none") == "none"


def covering(choices: Mapping[str, Sequence[str]]) -> Iterator[Stack]:
    """Stacks in which every possible pair of strategies occurs: each takes up as many open pairs as a greedy choice can."""
    slots = list(choices)
    pairs = ({(a, x), (b, y)} for a, b in combinations(slots, 2) for x, y in product(choices[a], choices[b]))
    missing = {frozenset(pair) for pair in pairs if fits(dict(pair))}
    while missing:
        stack: Stack = dict(min(missing, key=sorted))
        for slot in slots:
            if slot not in stack:
                possible = [name for name in choices[slot] if fits(stack | {slot: name})]
                stack[slot] = max(possible, key=lambda name: len(pairs_of(stack | {slot: name}) & missing))  # noqa: B023
        missing -= pairs_of(stack)
        yield {slot: stack[slot] for slot in slots}


def pairs_of(stack: Stack) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in combinations(stack.items(), 2)}


REGISTRY = Registry.installed()
CHOICES = {slot.name: REGISTRY.names(slot.name) for slot in SLOTS if slot.name != "execute"}
STACKS = list(covering(CHOICES))


class Tiny(NamedTuple):
    """A model on the disk, prompts and the truth about them."""

    folder: Path
    prompts: list[list[int]]
    truths: list[Truth]
    shelf: Shelf


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
    truths = [truth_of(model, prompt, NUM_TOKENS) for prompt in prompts]
    gap = min(truth.gap for truth in truths)
    print(f"{len(STACKS)} stacks; smallest gap of the two best logits {gap:.2g}")
    assert gap > 1e-3
    return Tiny(folder, prompts, truths, Shelf())


def make_engine(tiny: Tiny, stack: Stack, watch: Watch) -> Engine:
    tables = {slot: {"strategy": name} | SETTINGS.get((slot, name), {}) for slot, name in stack.items()}
    execute = {"strategy": "torch", "dtype": "float32"}
    with tiny.shelf.in_use():
        return Engine.load(plugins=[watch], model=str(tiny.folder), pool={"num_blocks": 9}, execute=execute, **tables)


def serve(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Two rounds of all prompts: one at once, with priorities, the other arriving while the first is served."""
    params = SamplingParams(max_tokens=NUM_TOKENS)
    handles = [engine.submit(prompt, params, priority=number % 3) for number, prompt in enumerate(prompts)]
    late = list(reversed(prompts))
    while engine.busy or late:
        if late:
            handles.append(engine.submit(late.pop(), params, priority=len(late) % 2))
        engine.step()
        engine.check_integrity()
    return [handle.result().raise_for_error().token_ids for handle in handles]


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: "-".join(stack.values()))
def test_greedy_equals_generate(tiny: Tiny, stack: Stack) -> None:
    watch = Watch()
    with make_engine(tiny, stack, watch) as engine:
        outputs = serve(engine, tiny.prompts)
        assert engine.books.pool.num_used == 0
    assert outputs == [truth.tokens for truth in tiny.truths] * 2
    if stack["prefix"] != "none":
        assert watch.num_reused
        assert watch.num_evicted
    # what reserves for the longest answer never runs short; an urgent request may take its place all the same
    if stack["allocate"] != "contiguous" and stack["preempt"] != "none":
        assert watch.num_preempted


def test_all_pairs_are_there() -> None:
    found = set().union(*map(pairs_of, STACKS))
    for a, b in combinations(CHOICES, 2):
        for x, y in product(CHOICES[a], CHOICES[b]):
            assert frozenset({(a, x), (b, y)}) in found or not fits({a: x, b: y})
    print(f"{len(STACKS)} stacks hold {len(found)} pairs")
