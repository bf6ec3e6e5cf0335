"""Logits with and without prefix reuse, one block apart from the prompt's end and at it: the same, within 1e-4."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # after the skips

from support.reference import LogitsRecorder, ModelCache, save_tiny
from support.tiny import FAMILIES, VOCAB_SIZE
from treadle import Engine, Handle, Request, SamplingParams, hookimpl
from treadle.testing.traffic import Tally

B = 16
LENGTHS = (B - 1, B, B + 1, 2 * B, 2 * B + 1)
NUM_TOKENS = 4
MOST = 1e-4
Make = Callable[..., Engine]
TEXT = (
    "The weaver sat down at the loom before the sun was up. She set her foot on the treadle, and the harness rose; the "
    "shuttle flew from the left hand to the right, and the first thread of the day lay where it belonged. By noon she had "
    "made a hand's breadth of cloth, and in the evening she cut it from the beam, folded it and put it on the shelf. Nobody "
    "else in the village made it as fine, and people came from far away to buy it. In winter the yarn was stiff with cold, "
    "and she warmed it at the stove; in summer the door stood open, and children sat on the step and counted the threads."
)


class Bench(NamedTuple):
    """Makes engines of one model; a prompt of each length, and its logits when it is computed alone and in one piece."""

    make: Make
    prompts: dict[int, list[int]]
    references: dict[int, torch.Tensor]


class Pace:
    """A budget: in each step at most so many tokens for a request, by the last word of its name."""

    may_shrink = True

    def __init__(self, **most: int) -> None:
        self._most = most

    def take(self, request: Request, wanted: int) -> int:
        return min(wanted, self._most.get(request.id.split()[-1], wanted))

    @hookimpl
    def budget(self) -> Pace:
        return self


@dataclass
class Play:
    """One prompt under way in a scenario."""

    engine: Engine
    prompt: list[int]
    tally: Tally
    asked: list[Handle] = field(default_factory=list)

    def ask(self, name: str) -> Handle:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        handle = self.engine.submit(self.prompt, params, request_id=f"{len(self.prompt)} {name}")
        self.asked.append(handle)
        return handle


def without_reuse(make: Make, prompts: dict[int, list[int]]) -> dict[int, torch.Tensor]:
    recorder = LogitsRecorder()
    with make(recorder, prefix="none") as engine:
        for prompt in prompts.values():
            assert Play(engine, prompt, Tally()).ask("alone").result().num_cached_tokens == 0
    return {length: recorder.of(f"{length} alone") for length in prompts}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    shelf = ModelCache()

    def make(*plugins: object, **values: Any) -> Engine:
        values = {"allocate": {"block_size": B}, "execute": {"strategy": "torch", "dtype": "float32"}, **values}
        with shelf.in_use():
            return Engine.load(plugins=plugins, model=str(folder), **values)

    numbers = random.Random(3)  # noqa: S311  # tokens, not secrets
    prompts = {length: [numbers.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS}
    return Bench(make, prompts, without_reuse(make, prompts))


@pytest.fixture(scope="module")
def default(default_engine: Make, default_reference: Any) -> Bench:
    def make(*plugins: object, **values: Any) -> Engine:
        return default_engine(*plugins, **{"allocate": {"block_size": B}, "pool": {"num_blocks": 64}, **values})

    tokens = default_reference.tokenizer.encode(TEXT)
    prompts = {length: tokens[20 * n : 20 * n + length] for n, length in enumerate(LENGTHS)}
    assert [len(prompt) for prompt in prompts.values()] == list(LENGTHS)
    return Bench(make, prompts, without_reuse(make, prompts))


def full(length: int) -> int:
    """Tokens of a prompt's blocks that can be reused: at least the last token is computed."""
    return (length - 1) // B * B


# --- scenarios: each yields the tokens that a request must have reused, for one request after another -------------------------


def together(play: Play, length: int) -> Iterator[int]:
    """All are computed in the same pass; the others read what the first writes in it."""
    handles = [play.ask(name) for name in ("first", "second", "third")]
    play.engine.step()
    assert all(handle.request.num_output == 1 for handle in handles)
    yield from (0, full(length), full(length))


def behind_in_chunks(play: Play, length: int) -> Iterator[int]:
    """The second is in prefill itself when the first one's second block becomes full, and takes that one over."""
    play.ask("first")
    play.engine.step()
    play.ask("second")
    yield from (0, max(0, full(length) - B))


def later_in_chunks(play: Play, length: int) -> Iterator[int]:
    """The second starts when the first one's first block is full, the third when all is done."""
    play.ask("first")
    for _ in range(4):
        play.engine.step()
    play.ask("second").result()
    play.ask("third").result()
    yield from (0, min(full(length), B), full(length))


def after_eviction(play: Play, length: int) -> Iterator[int]:
    """The cached blocks are evicted; who comes next computes them anew, and the one after that reuses these."""
    play.ask("first").result()
    evicted = play.tally["evicted"]
    filler = [(7 * n + length) % VOCAB_SIZE for n in range(play.engine.info.num_blocks * B - NUM_TOKENS)]
    play.engine.submit(filler, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)).result()
    assert play.tally["evicted"] > evicted
    play.ask("again").result()
    play.ask("reusing").result()
    yield from (0, 0, full(length))


Scenario = Callable[[Play, int], Iterator[int]]
SCENARIOS: dict[Scenario, dict[str, Any]] = {
    together: {},
    behind_in_chunks: {"pace": {"first": 6, "second": 4}},
    later_in_chunks: {"pace": {"first": 5, "second": 5, "third": 5}},
    after_eviction: {"pool": {"num_blocks": 4}},
}


def check(bench: Bench, scenario: Scenario, prefix: str) -> float:
    """The largest difference over all lengths."""
    values = dict(SCENARIOS[scenario])
    recorder, tally, pace = LogitsRecorder(), Tally(), Pace(**values.pop("pace", {}))
    worst = 0.0
    with bench.make(recorder, tally, pace, prefix=prefix, **values) as engine:
        for length, prompt in bench.prompts.items():
            play = Play(engine, prompt, tally)
            expected = list(scenario(play, length))
            reused = [handle.result().num_cached_tokens for handle in play.asked]
            assert reused == expected, f"prompt of {length} tokens"
            for handle in play.asked:
                logits, reference = recorder.of(handle.id), bench.references[length]
                assert len(logits) == len(reference) == NUM_TOKENS
                worst = max(worst, float((logits - reference).abs().max()))
    return worst


@pytest.mark.parametrize("prefix", ["hash_chain", "radix"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_tiny_models(tiny: Bench, scenario: Scenario, prefix: str) -> None:
    worst = check(tiny, scenario, prefix)
    print(f"{prefix}, {scenario.__name__}: largest difference {worst:.2g}")
    assert worst < MOST


@pytest.mark.model
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_default_model(default: Bench, scenario: Scenario) -> None:
    worst = check(default, scenario, "hash_chain")
    print(f"{scenario.__name__}: largest difference {worst:.2g}")
    assert worst < MOST
