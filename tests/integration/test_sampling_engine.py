"""Sampling through the whole engine: seeds, log-probabilities, and what ends a text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.reference import ModelCache, save_tiny  # noqa: E402
from support.tiny import VOCAB_SIZE  # noqa: E402
from treadle import Completion, Engine, FinishReason, SamplingParams  # noqa: E402  # after the skips
from treadle.plan import TokenLogprobs  # noqa: E402
from treadle.testing.traffic import Tally  # noqa: E402

Make = Callable[..., Engine]
NUM_TOKENS = 20
WILD = SamplingParams(max_tokens=NUM_TOKENS, temperature=4.0, top_k=60, top_p=0.95)
NARROW: dict[str, dict[str, Any]] = {
    "alone": {"admit": {"max_batch_size": 1}},
    "together": {},
    "in chunks": {"budget": {"max_tokens": 9}},
    "preempted": {"pool": {"num_blocks": 7}},
    "preempted, nothing reused": {"pool": {"num_blocks": 7}, "prefix": "none"},
    "swapped": {"pool": {"num_blocks": 7, "swap_memory": "1MiB"}, "preempt": "swap"},
}
PREEMPTED = [name for name in NARROW if "pool" in NARROW[name]]


class Tiny(NamedTuple):
    """Makes engines of a tiny model; the model itself, and prompts."""

    make: Make
    model: Any
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder: Path = tmp_path_factory.mktemp("llama")
    model = save_tiny("llama", folder)
    shelf = ModelCache()

    def make(*plugins: object, **values: Any) -> Engine:
        values = {"allocate": {"block_size": 16}, "execute": {"strategy": "torch", "dtype": "float32"}, **values}
        with shelf.in_use():
            return Engine.load(plugins=plugins, model=str(folder), **values)

    numbers = random.Random(4)  # noqa: S311  # tokens, not secrets
    prompts = [[numbers.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 15, 16, 17, 33, 40)]
    return Tiny(make, model, prompts)


def serve(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
    """All together; with seeds of their own where the parameters have one."""
    handles = []
    for number, prompt in enumerate(prompts):
        own = params if params.seed is None else replace(params, seed=params.seed + number)
        handles.append(engine.submit(prompt, own))
    return [handle.result().raise_for_error() for handle in handles]


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


# --- seeds ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeded(tiny: Tiny) -> list[tuple[int, ...]]:
    with tiny.make() as engine:
        return [engine.submit(p, replace(WILD, seed=n)).result().token_ids for n, p in enumerate(tiny.prompts)]


@pytest.mark.parametrize("variant", NARROW)
def test_a_seed_decides_whatever_is_batched_or_preempted(tiny: Tiny, seeded: list[tuple[int, ...]], variant: str) -> None:
    tally = Tally()
    with tiny.make(tally, **NARROW[variant]) as engine:
        assert tokens_of(serve(engine, tiny.prompts, replace(WILD, seed=0))) == seeded
    assert bool(tally["preempted"]) == (variant in PREEMPTED)
    assert bool(tally["swapped"]) == (variant == "swapped")


def test_other_seeds_give_other_texts(tiny: Tiny, seeded: list[tuple[int, ...]]) -> None:
    with tiny.make() as engine:
        others = tokens_of(serve(engine, tiny.prompts, replace(WILD, seed=100)))
        assert all(one != other for one, other in zip(seeded, others, strict=True))
        group = [handle.result() for handle in engine.submit_group(tiny.prompts[4], replace(WILD, seed=4), 4)]
    assert group[0].token_ids == seeded[4]
    assert len({completion.token_ids for completion in group}) == 4
    assert all(completion.num_cached_tokens == 32 for completion in group[1:])


def test_without_a_seed_the_engine_draws_one(tiny: Tiny) -> None:
    rounds = []
    for seed in (7, 7, 8, None):
        with tiny.make(seed=seed) as engine:
            rounds.append(tokens_of(serve(engine, [tiny.prompts[3]] * 3, WILD)))
    assert rounds[0] == rounds[1]
    assert len({tokens for drawn in rounds for tokens in drawn}) == 9


# --- log-probabilities ----------------------------------------------------------------------------------------------------


def exact(tiny: Tiny, tokens: Sequence[int]) -> Any:
    """[positions, vocabulary]: row `p` is about the token at position `p + 1`."""
    with torch.no_grad():
        return tiny.model(torch.tensor([list(tokens)])).logits[0].log_softmax(1)


def assert_entries(entries: Sequence[TokenLogprobs], tokens: Sequence[int], rows: Any, num_top: int) -> None:
    assert [entry.token_id for entry in entries] == list(tokens)
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(num_top).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("variant", NARROW)
def test_logprobs_of_prompt_and_output(tiny: Tiny, variant: str) -> None:
    tally = Tally()
    params = replace(WILD, seed=0, logprobs=3, prompt_logprobs=2)
    with tiny.make(tally, **NARROW[variant]) as engine:
        completions = serve(engine, tiny.prompts, params)
    assert bool(tally["preempted"]) == (variant in PREEMPTED)
    for completion in completions:
        prompt, output = completion.prompt_token_ids, completion.token_ids
        rows = exact(tiny, prompt + output)
        assert_entries(completion.prompt_logprobs, prompt[1:], rows[: len(prompt) - 1], 2)
        assert_entries(completion.logprobs, output, rows[len(prompt) - 1 : -1], 3)


def test_prompt_logprobs_are_computed_though_the_prompt_is_cached(tiny: Tiny) -> None:
    with tiny.make() as engine:
        first = engine.submit(tiny.prompts[4], SamplingParams(max_tokens=2)).result()
        asking = engine.submit(tiny.prompts[4], SamplingParams(max_tokens=2, prompt_logprobs=0)).result()
        again = engine.submit(tiny.prompts[4], SamplingParams(max_tokens=2)).result()
    assert (asking.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert first.token_ids == asking.token_ids == again.token_ids
    assert len(asking.prompt_logprobs) == len(tiny.prompts[4]) - 1


# --- ends, with a real tokenizer --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(default_engine: Make) -> Any:
    pytest.importorskip("gguf")
    with default_engine(pool={"num_blocks": 32}) as made:
        yield made


@pytest.fixture(scope="module")
def question(engine: Engine) -> list[int]:
    assert engine.tokenizer is not None
    ids = engine.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert ids is not None
    return ids


@pytest.fixture(scope="module")
def free(engine: Engine, question: list[int]) -> Completion:
    """The answer, and on for 24 tokens in all."""
    return engine.submit(question, SamplingParams(max_tokens=24, ignore_eos=True)).result()


@pytest.mark.model
def test_stop_strings_across_token_borders(engine: Engine, question: list[int], free: Completion) -> None:
    """Half of one token's text and half of the next one's: neither is shown, and the text ends before it."""
    assert engine.tokenizer is not None
    for cut in range(2, 6):
        before, both = (engine.tokenizer.decode(free.token_ids[:number]) for number in (cut, cut + 1))
        stop = both[len(before) - 1 : len(before) + 1]
        assert len(stop) == 2
        handle = engine.submit(question, SamplingParams(max_tokens=24, stop=("never", stop)))
        streamed = "".join(chunk.text for chunk in handle.stream())
        completion = handle.result()
        assert free.text is not None
        assert streamed == completion.text == free.text[: free.text.index(stop)]
        assert completion.finish_reason is FinishReason.STOP
        assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) <= cut + 1


@pytest.mark.model
def test_end_of_text(engine: Engine, question: list[int], free: Completion) -> None:
    (eos,) = engine.info.model.eos_token_ids
    ended = engine.submit(question, SamplingParams(max_tokens=24)).result()
    assert ended.finish_reason is FinishReason.STOP
    assert ended.token_ids[-1] == eos
    assert ended.token_ids == free.token_ids[: free.token_ids.index(eos) + 1]
    assert ended.text is not None
    assert "Paris" in ended.text
    assert free.finish_reason is FinishReason.LENGTH
    assert len(free.token_ids) == 24


@pytest.mark.model
def test_nothing_ends_a_text_before_min_tokens(engine: Engine, question: list[int]) -> None:
    (eos,) = engine.info.model.eos_token_ids
    longer = engine.submit(question, SamplingParams(min_tokens=16, max_tokens=40)).result()
    assert len(longer.token_ids) >= 16
    assert eos not in longer.token_ids[:16]
    stopped = engine.submit(question, SamplingParams(min_tokens=5, max_tokens=40, stop=("capital", "Paris"))).result()
    assert stopped.text is not None
    assert "capital" in stopped.text
    assert "Paris" not in stopped.text
    assert stopped.finish_reason is FinishReason.STOP


@pytest.mark.model
def test_stop_tokens_are_kept_but_not_shown(engine: Engine, question: list[int], free: Completion) -> None:
    assert engine.tokenizer is not None
    stop = free.token_ids[4]
    completion = engine.submit(question, SamplingParams(max_tokens=24, stop_token_ids=(stop,))).result()
    cut = free.token_ids.index(stop)
    assert completion.token_ids == free.token_ids[: cut + 1]
    assert completion.text == engine.tokenizer.decode(free.token_ids[:cut])
    assert completion.finish_reason is FinishReason.STOP
