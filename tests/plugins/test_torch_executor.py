"""The torch executor gives the tokens that transformers itself gives, however the work is cut up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Gemma2Config

from support.tiny import (
    FAMILIES,
    VOCAB_SIZE,
    WINDOW,
    Driver,
    tiny_config,
    tiny_executor,
    tiny_model,
)
from treadle.sampling_params import SamplingParams

B = 16
LENGTHS = (B - 1, B, B + 1, 2 * B)
NUM_TOKENS = 20


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    tokens: list[int] = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
    return tokens


PROMPTS = [prompt(length) for length in LENGTHS]


def reference(model: Any, tokens: list[int], num_tokens: int = NUM_TOKENS) -> tuple[list[int], float]:
    """Greedy tokens of transformers' own generate, and the smallest gap of the two best logits."""
    ids = torch.tensor([tokens])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([logits[0] for logits in out.logits]).topk(2, dim=1).values
    return out.sequences[0, len(tokens) :].tolist(), float((best[:, 0] - best[:, 1]).min())


@pytest.fixture(params=FAMILIES)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    model = tiny_model(tiny_config(request.param))
    return model, copy.deepcopy(model)


@pytest.fixture
def expected(models: tuple[Any, Any]) -> list[list[int]]:
    answers = [reference(models[1], tokens) for tokens in PROMPTS]
    gap = min(gap for _, gap in answers)
    print(f"{models[1].config.model_type}: smallest gap of the two best logits {gap:.2g}")
    assert gap > 1e-3
    return [tokens for tokens, _ in answers]


@pytest.mark.parametrize("chunk", [None, 5, B], ids=["whole", "chunks of 5", "chunks of a block"])
def test_greedy_equals_generate(models: tuple[Any, Any], expected: list[list[int]], chunk: int | None) -> None:
    driver = Driver(tiny_executor(models[0]), B)
    running = [driver.add(str(len(tokens)), tokens) for tokens in PROMPTS]
    assert driver.generate(running, NUM_TOKENS, chunk) == expected


def test_arriving_one_after_another(models: tuple[Any, Any], expected: list[list[int]]) -> None:
    driver = Driver(tiny_executor(models[0]), B)
    running = []
    for tokens in PROMPTS:
        running.append(driver.add(str(len(tokens)), tokens))
        driver.step(*((sequence, None) for sequence in running))
    outputs = driver.generate(running, NUM_TOKENS)
    assert [output[:NUM_TOKENS] for output in outputs] == expected


def last_logits(model: Any, logits: list[torch.Tensor]) -> Driver:
    """A driver that keeps a copy of the sampled rows of every pass in `logits`."""
    executor = tiny_executor(model, process_logits=lambda rows, works: logits.append(rows.clone()))
    return Driver(executor, B)


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_do_not_depend_on_chunks_or_reuse(models: tuple[Any, Any], length: int) -> None:
    logits: list[torch.Tensor] = []
    driver = last_logits(models[0], logits)
    tokens = prompt(length, seed=1)
    one_shot = driver.add("one shot", tokens)
    driver.step((one_shot, None))
    chunked = driver.add("chunked", tokens)
    for size in (3, 7, None):
        driver.step((chunked, size))
    reusing = driver.add("reusing", tokens)
    driver.share(one_shot, reusing, (length - 1) // B)
    driver.step((reusing, None))
    direct = models[1](torch.tensor([tokens])).logits[0, -1]
    for row in (logits[0][0], logits[1][0], logits[2][0]):
        assert (row - direct).abs().max() < 1e-4


@pytest.mark.parametrize("length", [B + 1, 2 * B])
def test_a_work_reads_blocks_written_in_the_same_pass(models: tuple[Any, Any], length: int) -> None:
    logits: list[torch.Tensor] = []
    driver = last_logits(models[0], logits)
    tokens = prompt(length, seed=2)
    owner, reader = driver.add("owner", tokens), driver.add("reader", tokens)
    driver.share(owner, reader, (length - 1) // B)
    driver.step((reader, None), (owner, None))
    assert (logits[0][0] - logits[0][1]).abs().max() < 1e-4
    assert driver.generate([owner, reader], NUM_TOKENS) == [reference(models[1], tokens)[0]] * 2


@pytest.mark.parametrize("guess", ["right", "half right", "wrong"])
def test_drafted_tokens_change_nothing(models: tuple[Any, Any], expected: list[list[int]], guess: str) -> None:
    driver = Driver(tiny_executor(models[0]), B)
    others = [driver.add(str(len(tokens)), tokens) for tokens in PROMPTS[1:]]
    sequence = driver.add("drafting", PROMPTS[0])
    while len(sequence.output) < NUM_TOKENS - 4:
        answer = expected[0][len(sequence.output) :]
        drafted = [*answer[:3]]
        right = {"right": 3, "half right": 1, "wrong": 0}[guess]
        drafted[right:] = [(token + 1) % VOCAB_SIZE for token in drafted[right:]]
        works = [driver.work(sequence, drafted=drafted), *(driver.work(other) for other in others)]
        outcome = driver.run(*works)
        assert outcome.tokens[0] == tuple(answer[: right + 1])
        for running, accepted in zip((sequence, *others), outcome.tokens, strict=True):
            running.count = len(running.tokens) + len(accepted) - 1
            running.tokens += accepted
    for other, tokens in zip(others, expected[1:], strict=True):
        assert other.output == tokens[: len(other.output)]


def test_the_window_of_mistral_matters() -> None:
    tokens = prompt(3 * WINDOW)
    windowed = tiny_model(tiny_config("mistral"))
    whole = tiny_model(tiny_config("mistral", sliding_window=None))
    assert reference(windowed, tokens)[0] != reference(whole, tokens)[0]


@pytest.mark.parametrize("num_heads", [3, 6])
def test_alibi_of_head_counts_that_are_no_power_of_two(num_heads: int) -> None:
    model = tiny_model(tiny_config("bloom", hidden_size=16 * num_heads, n_head=num_heads), seed=1)
    expected, gap = reference(copy.deepcopy(model), PROMPTS[2])
    assert gap > 1e-3
    driver = Driver(tiny_executor(model), B)
    assert driver.generate([driver.add("it", PROMPTS[2])], NUM_TOKENS, chunk=7) == [expected]


def test_soft_cap_and_alternating_windows() -> None:
    layers = {"num_hidden_layers": 4, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    ids = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = Gemma2Config(**layers, **sizes, **ids, query_pre_attn_scalar=16, tie_word_embeddings=False)
    model = tiny_model(config)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    expected, gap = reference(twin, PROMPTS[3])
    assert gap > 1e-3
    driver = Driver(tiny_executor(model), B)
    assert driver.executor.attention.spec.soft_cap == 5.0  # type: ignore[attr-defined]  # the torch backend has it
    assert driver.generate([driver.add("it", PROMPTS[3])], NUM_TOKENS, chunk=9) == [expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_close_to_float32(models: tuple[Any, Any], dtype: torch.dtype) -> None:
    exact: list[torch.Tensor] = []
    half: list[torch.Tensor] = []
    for model, kept in ((models[1], exact), (models[0].to(dtype), half)):
        driver = last_logits(model, kept)
        driver.step(*((driver.add(str(len(tokens)), tokens), None) for tokens in PROMPTS))
    difference = (exact[0] - half[0]).norm() / exact[0].norm()
    print(f"{models[1].config.model_type} in {dtype}: relative difference of logits {difference:.2g}")
    assert half[0].dtype == torch.float32
    assert difference < 0.1


def test_sampling_does_not_depend_on_neighbours_or_chunks() -> None:
    model = tiny_model(tiny_config("llama"))
    driver = Driver(tiny_executor(model), B)
    params = [SamplingParams(temperature=5.0, top_k=50, top_p=0.95, seed=seed) for seed in range(4)]
    together = [driver.add(str(n), tokens, params[n]) for n, tokens in enumerate(PROMPTS)]
    outputs = driver.generate(together, NUM_TOKENS)
    alone = [driver.generate([driver.add(str(n), t, params[n])], NUM_TOKENS, chunk=4)[0] for n, t in enumerate(PROMPTS)]
    assert outputs == alone
    reseeded = driver.add("other seed", PROMPTS[0], SamplingParams(temperature=5.0, top_k=50, top_p=0.95, seed=9))
    assert driver.generate([reseeded], NUM_TOKENS) != outputs[:1]
