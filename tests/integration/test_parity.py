"""The engine gives the default model's own greedy tokens, whatever is batched, cut up, reused or preempted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from support.reference import Reference, reference_of  # noqa: E402
from treadle import Completion, Engine, SamplingParams  # noqa: E402  # after the skips
from treadle.testing.traffic import Tally  # noqa: E402
from treadle_plugins.models.load import LoadedModel  # noqa: E402

pytestmark = pytest.mark.model

NUM_TOKENS = 24
CODE = '''
class Queue:
    """A first-in, first-out queue over a list that is read from the front and written at the back."""

    def __init__(self, items=()):
        self._items = list(items)
        self._start = 0

    def push(self, item):
        self._items.append(item)

    def pop(self):
        if self._start == len(self._items):
            raise IndexError("pop from an empty queue")
        item = self._items[self._start]
        self._start += 1
        return item

    def __len__(self):
        return len(self._items) - self._start

'''
STORY = (
    "The weaver sat down at the loom before the sun was up. She set her foot on the treadle, and the harness rose; the "
    "shuttle flew from the left hand to the right, and the first thread of the day lay where it belonged. "
)
RAW = [
    "The",
    "Once upon a time",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "The square of 1234 is",
    "- apples\n- pears\n- plums\n-",
    "Paris ist die Hauptstadt von",
    "La recette de la tarte aux pommes commence par",
    "日本の首都は",
    "Москва — столица",
    "SELECT name, price FROM products WHERE",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics",',
    CODE + "    def peek(self):",
    CODE + "    def clear(self):",
    STORY * 4 + "By noon",
    " ".join(f"{n}: {n * n}." for n in range(1, 77)),
]
CHATS = [
    "What is the capital of France?",
    "Name the three primary colours.",
    "Write a haiku about rain.",
    "Warum ist der Himmel blau?",
    "Fix this:\n```python\nfor i in range(10) print(i)\n```",
]

Make = Callable[..., Engine]
VARIANTS: dict[str, dict[str, Any]] = {
    "blocks of 16": {"allocate": {"block_size": 16}},
    "blocks of 64": {"allocate": {"block_size": 64}},
    "radix and coalescing": {"prefix": "radix", "allocate": {"strategy": "coalescing", "block_size": 16}},
    "plain forward": {"forward": "plain", "allocate": {"block_size": 16}},
    "small chunks": {"allocate": {"block_size": 16}, "budget": {"max_tokens": 37}},
    "small pool": {"allocate": {"block_size": 16}, "pool": {"num_blocks": 48}},
}


@pytest.fixture(scope="module")
def prompts(default_reference: LoadedModel) -> list[list[int]]:
    """Token ids of 20 prompts, from 1 to about 700 tokens."""
    tokenizer = default_reference.tokenizer
    assert tokenizer is not None
    chats = [tokenizer.chat([{"role": "user", "content": text}]) for text in CHATS]
    ids = [tokenizer.encode(text) for text in RAW] + [chat for chat in chats if chat]
    lengths = sorted(map(len, ids))
    print(f"{len(ids)} prompts of {lengths[0]} to {lengths[-1]} tokens: {lengths}")
    assert (len(ids), lengths[0]) == (20, 1)
    assert 600 < lengths[-1] < 800
    return ids


@pytest.fixture(scope="module")
def truths(default_reference: LoadedModel, prompts: list[list[int]]) -> list[Reference]:
    started = time.perf_counter()
    eos = sorted(default_reference.info.eos_token_ids)
    found = [reference_of(default_reference.model, prompt, NUM_TOKENS, eos) for prompt in prompts]
    gap = min(truth.gap for truth in found)
    narrow = [truth.gap for truth in found].index(gap)
    took = time.perf_counter() - started
    print(f"generate took {took:.1f} s; smallest gap of the two best logits {gap:.2g}, for prompt {narrow}")
    assert gap > 1e-3
    return found


def serve(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    """All together; the books are proved after every step."""
    handles = [engine.submit(prompt, SamplingParams(max_tokens=NUM_TOKENS)) for prompt in prompts]
    while engine.busy:
        engine.step()
        engine.check_integrity()
    return [handle.result() for handle in handles]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_equals_generate(default_engine: Make, prompts: list[list[int]], truths: list[Reference], variant: str) -> None:
    tally = Tally()
    with default_engine(tally, **VARIANTS[variant]) as engine:
        started = time.perf_counter()
        completions = serve(engine, prompts)
        print(
            f"{variant}: {time.perf_counter() - started:.1f} s, {tally['preempted']} preemptions, "
            f"{tally['evicted']} blocks evicted, {tally['matched']} found in the cache"
        )
    for completion, truth, prompt in zip(completions, truths, prompts, strict=True):
        assert completion.token_ids == truth.tokens, f"prompt of {len(prompt)} tokens"
    assert tally["matched"]
    if variant == "small pool":
        assert tally["preempted"]
        assert tally["evicted"]


def test_it_reuses_what_it_answered_before(default_engine: Make, prompts: list[list[int]], truths: list[Reference]) -> None:
    """The second round finds the first one's prompts in the cache; a third follows what was generated."""
    with default_engine(allocate={"block_size": 16}) as engine:
        first, again = serve(engine, prompts[-8:]), serve(engine, prompts[-8:])
        for completion, truth in zip([*first, *again], truths[-8:] * 2, strict=True):
            assert completion.token_ids == truth.tokens
        for completion in again:
            assert completion.num_cached_tokens == (len(completion.prompt_token_ids) - 1) // 16 * 16
        followed = [[*c.prompt_token_ids, *c.token_ids[:-1]] for c in again]
        for completion, earlier in zip(serve(engine, followed), again, strict=True):
            assert completion.token_ids[0] == earlier.token_ids[-1]
            assert completion.num_cached_tokens == (len(completion.prompt_token_ids) - 1) // 16 * 16
