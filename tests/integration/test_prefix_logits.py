"""Logits with and without prefix reuse, one block apart from the prompt's end and at it: the same, within 1e-4."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # after the skips

from treadle import Engine, Handle, Request, SamplingParams, hookimpl
from treadle.testing.traffic import Tally
from treadle_plugins.execution.torch_executor.testing import FAMILIES
from treadle_plugins.execution.torch_executor.truth import LogitsRecorder, Shelf, save_tiny

B = 16
LENGTHS = (B - 1, B, B + 1, 2 * B, 2 * B + 1)
NUM_TOKENS = 4
MOST = 1e-4
Make = Callable[..., Engine]


class Bench(NamedTuple):
    """Makes engines of one model; for each length the logits of a prompt that was computed alone and in one piece."""

    make: Make
    references: dict[int, torch.Tensor]


class Pace:
    """A budget: in each step at most so many tokens for a request, by its name."""

    may_shrink = True

    def __init__(self, **most: int) -> None:
        self._most = most

    def take(self, request: Request, wanted: int) -> int:
        return min(wanted, self._most.get(request.id, wanted))

    @hookimpl
    def budget(self) -> Pace:
        return self


def prompts(vocab_size: int) -> dict[int, list[int]]:
    """A prompt of each length; none is the start of another."""
    numbers = random.Random(3)  # noqa: S311  # tokens, not secrets
    return {length: [numbers.randrange(vocab_size) for _ in range(length)] for length in LENGTHS}


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    shelf = Shelf()

    def make(*plugins: object, **values: Any) -> Engine:
        values = {"allocate": {"block_size": B}, "execute": {"strategy": "torch", "dtype": "float32"}, **values}
        with shelf.in_use():
            return Engine.load(plugins=plugins, model=str(folder), **values)

    return Bench(make, without_reuse(make))


@pytest.fixture(scope="module")
def default(default_engine: Make) -> Bench:
    def make(*plugins: object, **values: Any) -> Engine:
        return default_engine(*plugins, **{"allocate": {"block_size": B}, "pool": {"num_blocks": 64}, **values})

    return Bench(make, without_reuse(make))


def ask(engine: Engine, name: str, prompt: list[int]) -> Handle:
    return engine.submit(prompt, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True), request_id=name)


def without_reuse(make: Make) -> dict[int, torch.Tensor]:
    recorder = LogitsRecorder()
    with make(recorder, prefix="none") as engine:
        for length, prompt in prompts(engine.info.model.vocab_size).items():
            assert ask(engine, str(length), prompt).result().num_cached_tokens == 0
    return {length: recorder.of(str(length)) for length in LENGTHS}


def difference(recorder: LogitsRecorder, name: str, reference: torch.Tensor) -> float:
    logits = recorder.of(name)
    assert logits.shape == reference.shape
    assert reference.shape[0] == NUM_TOKENS
    return float((logits - reference).abs().max())


Scenario = Callable[[Make, str, int], Iterator[tuple[LogitsRecorder, str, int, int]]]
"""Yields for each request: where its logits are, its name, the tokens it reused, and how many it must have."""


def together(make: Make, prefix: str, length: int) -> Iterator[tuple[LogitsRecorder, str, int, int]]:
    """Both are computed in the same pass; the second reads what the first writes in it."""
    recorder = LogitsRecorder()
    with make(recorder, prefix=prefix) as engine:
        prompt = prompts(engine.info.model.vocab_size)[length]
        handles = [ask(engine, name, prompt) for name in ("first", "second", "third")]
        engine.step()
        assert all(handle.request.num_output == 1 for handle in handles)
        for handle, expected in zip(handles, (0, full(length), full(length)), strict=True):
            yield recorder, handle.id, handle.result().num_cached_tokens, expected


def behind_in_chunks(make: Make, prefix: str, length: int) -> Iterator[tuple[LogitsRecorder, str, int, int]]:
    """The second is in prefill itself when the first one's second block becomes full, and takes that one over."""
    recorder = LogitsRecorder()
    with make(recorder, Pace(first=6, second=4), prefix=prefix) as engine:
        prompt = prompts(engine.info.model.vocab_size)[length]
        first = ask(engine, "first", prompt)
        engine.step()
        second = ask(engine, "second", prompt)
        yield recorder, "first", first.result().num_cached_tokens, 0
        yield recorder, "second", second.result().num_cached_tokens, max(0, full(length) - B)


def later_in_chunks(make: Make, prefix: str, length: int) -> Iterator[tuple[LogitsRecorder, str, int, int]]:
    """The second starts when the first one's first block is full, the third when all is done; all in chunks of 5."""
    recorder = LogitsRecorder()
    with make(recorder, Pace(first=5, second=5, third=5), prefix=prefix) as engine:
        prompt = prompts(engine.info.model.vocab_size)[length]
        first = ask(engine, "first", prompt)
        for _ in range(4):
            engine.step()
        second = ask(engine, "second", prompt)
        yield recorder, "first", first.result().num_cached_tokens, 0
        yield recorder, "second", second.result().num_cached_tokens, min(full(length), B)
        yield recorder, "third", ask(engine, "third", prompt).result().num_cached_tokens, full(length)


def after_eviction(make: Make, prefix: str, length: int) -> Iterator[tuple[LogitsRecorder, str, int, int]]:
    """The cached blocks are evicted; who comes next computes them anew, and the one after that reuses these."""
    recorder, tally = LogitsRecorder(), Tally()
    with make(recorder, tally, prefix=prefix, pool={"num_blocks": 4}) as engine:
        vocab_size = engine.info.model.vocab_size
        prompt = prompts(vocab_size)[length]
        yield recorder, "first", ask(engine, "first", prompt).result().num_cached_tokens, 0
        filler = [(7 * n) % vocab_size for n in range(4 * B - NUM_TOKENS)]
        ask(engine, "filler", filler).result()
        # a block is cached for each full one of prompt and output, less the last token
        assert tally["evicted"] == (length + NUM_TOKENS - 1) // B
        yield recorder, "again", ask(engine, "again", prompt).result().num_cached_tokens, 0
        yield recorder, "reusing", ask(engine, "reusing", prompt).result().num_cached_tokens, full(length)


def full(length: int) -> int:
    """Tokens of a prompt's blocks that can be reused: at least the last token is computed."""
    return (length - 1) // B * B


SCENARIOS: tuple[Scenario, ...] = (together, behind_in_chunks, later_in_chunks, after_eviction)


def check(bench: Bench, scenario: Scenario, prefix: str) -> float:
    """The largest difference over all lengths."""
    worst = 0.0
    for length in LENGTHS:
        for recorder, name, num_reused, expected in scenario(bench.make, prefix, length):
            assert num_reused == expected, f"{name} of {length} tokens"
            worst = max(worst, difference(recorder, name, bench.references[length]))
            assert worst < MOST, f"{name} of {length} tokens"
    return worst


@pytest.mark.parametrize("prefix", ["hash_chain", "radix"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_tiny_models(tiny: Bench, scenario: Scenario, prefix: str) -> None:
    print(f"{prefix}, {scenario.__name__}: largest difference {check(tiny, scenario, prefix):.2g}")


@pytest.mark.model
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_default_model(default: Bench, scenario: Scenario) -> None:
    print(f"{scenario.__name__}: largest difference {check(default, scenario, 'hash_chain'):.2g}")
