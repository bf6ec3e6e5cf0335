"""Errors of single works, log-probabilities, swapped blocks and logits hooks of the torch executor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.tiny import VOCAB_SIZE, Driver, tiny_config, tiny_executor, tiny_model
from treadle.errors import ExecutionError
from treadle.plan import BlockCopy, Outcome, TokenLogprobs, Work
from treadle.sampling_params import SamplingParams

GREEDY = SamplingParams()
PROMPTS = [[(13 * n + 7 * m) % VOCAB_SIZE for n in range(20 + m)] for m in range(3)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(tiny_config("llama")).requires_grad_(False)


def driver_of(model: Any, **options: Any) -> Driver:
    swap_bytes = options.pop("swap_bytes", 0)
    return Driver(tiny_executor(copy.deepcopy(model), **options), swap_bytes=swap_bytes)


def run_three(driver: Driver, *, sampling: SamplingParams = GREEDY, spoil: int | None = None) -> Outcome:
    sequences = [driver.add(str(n), tokens, sampling) for n, tokens in enumerate(PROMPTS)]
    if spoil is not None:
        sequences[1].tokens[3] = spoil
    return driver.run(*(driver.work(sequence) for sequence in sequences))


def test_nan_in_one_row_fails_its_work_only(model: Any) -> None:
    expected = run_three(driver_of(model)).tokens

    def spoil(logits: torch.Tensor, works: Sequence[Work]) -> None:
        logits[[work.request_id for work in works].index("1"), 5] = float("nan")

    outcome = run_three(driver_of(model, process_logits=spoil))
    assert list(outcome.errors) == [1]
    assert "NaN" in outcome.errors[1]
    assert outcome.tokens == (expected[0], (), expected[2])


def test_weights_with_nan_fail_what_they_touch(model: Any) -> None:
    expected = run_three(driver_of(model)).tokens
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[299] = float("nan")
    outcome = run_three(driver_of(broken), spoil=299)
    assert list(outcome.errors) == [1]
    assert outcome.tokens == (expected[0], (), expected[2])


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
def test_a_token_that_the_model_does_not_know(model: Any, token: int) -> None:
    expected = run_three(driver_of(model)).tokens
    outcome = run_three(driver_of(model), spoil=token)
    assert outcome.errors == {1: f"token id {token} is not among the model's {VOCAB_SIZE} tokens"}
    assert outcome.tokens == (expected[0], (), expected[2])


def test_a_position_beyond_the_model(model: Any) -> None:
    outcome = run_three(driver_of(model, max_length=20))
    assert sorted(outcome.errors) == [1, 2]
    assert "position 20 lies beyond the model's length of 20" in outcome.errors[1]
    assert outcome.tokens == (run_three(driver_of(model)).tokens[0], (), ())


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        (Work("r", 0, (1,) * 17, (0,), GREEDY), "17 tokens need 2 blocks of 16, but its table has 1"),
        (Work("r", 0, (1,), (64,), GREEDY), "outside 0..63"),
        (Work("r", 0, (1,), (0,), GREEDY, 1), "1 drafted"),
        (Work("r", 0, (), (0,), None), "0 tokens"),
        (Work("r", -1, (1,), (0,), GREEDY), "from position -1"),
    ],
)
def test_a_broken_plan_raises(model: Any, work: Work, problem: str) -> None:
    with pytest.raises(ExecutionError, match=problem):
        driver_of(model).run(work)


def test_work_without_sampling_brings_nothing(model: Any) -> None:
    driver = driver_of(model)
    outcome = driver.run(driver.work(driver.add("r", PROMPTS[0]), 5))
    assert outcome == Outcome(((),))


def test_logprobs_of_new_tokens(model: Any) -> None:
    """They are the model's own: neither temperature nor a logits hook changes them."""

    def turn_over(logits: torch.Tensor, works: Sequence[Work]) -> None:
        logits.neg_()

    driver = driver_of(model, process_logits=turn_over)
    sampling = SamplingParams(temperature=3.0, seed=1, logprobs=4)
    sequence = driver.add("r", PROMPTS[0], sampling)
    outcome = driver.run(driver.work(driver.add("other", PROMPTS[1])), driver.work(sequence))
    assert list(outcome.logprobs) == [1]
    (entry,) = outcome.logprobs[1]
    exact = model(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(0)
    assert (entry.token_id,) == outcome.tokens[1]
    assert entry.logprob == pytest.approx(float(exact[entry.token_id]), abs=1e-4)
    assert [token for token, _ in entry.top] == exact.topk(4).indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(exact.topk(4).values.tolist(), abs=1e-4)


def test_logprobs_of_drafted_tokens(model: Any) -> None:
    driver = driver_of(model)
    free = driver.generate([driver.add("free", PROMPTS[0])], 4)[0]
    sequence = driver.add("r", PROMPTS[0], SamplingParams(logprobs=0))
    outcome = driver.run(driver.work(sequence, drafted=[*free[:2], (free[2] + 1) % VOCAB_SIZE]))
    assert outcome.tokens[0] == tuple(free[:3])
    exact = model(torch.tensor([PROMPTS[0] + free[:3]])).logits[0].log_softmax(1)
    for step, entry in enumerate(outcome.logprobs[0]):
        assert (entry.token_id, entry.top) == (free[step], ())
        assert entry.logprob == pytest.approx(float(exact[len(PROMPTS[0]) + step - 1, free[step]]), abs=1e-4)


@pytest.mark.parametrize("chunk", [None, 1, 5, 16], ids=lambda chunk: f"chunks of {chunk}")
def test_prompt_logprobs(model: Any, chunk: int | None) -> None:
    """However the prompt is cut up, each of its tokens but the first is told about once, in order."""
    driver = driver_of(model)
    sequence = driver.add("r", PROMPTS[0], SamplingParams(prompt_logprobs=2))
    entries: list[TokenLogprobs] = []
    while not sequence.output:
        size = min(sequence.missing, chunk or sequence.missing)
        outcome = driver.step((driver.add(f"other {sequence.count}", PROMPTS[1]), 7), (sequence, size))
        assert set(outcome.prompt_logprobs) <= {1}
        entries += outcome.prompt_logprobs.get(1, ())
    exact = model(torch.tensor([PROMPTS[0]])).logits[0].log_softmax(1)
    assert [entry.token_id for entry in entries] == PROMPTS[0][1:]
    for position, entry in enumerate(entries, start=1):
        assert entry.logprob == pytest.approx(float(exact[position - 1, PROMPTS[0][position]]), abs=1e-4)
        assert [token for token, _ in entry.top] == exact[position - 1].topk(2).indices.tolist()
    assert not driver.step((sequence, None)).prompt_logprobs


def test_prompt_logprobs_end_with_the_prompt(model: Any) -> None:
    """What was generated, or is drafted, behind the prompt's end is no part of it."""
    driver = driver_of(model)
    sequence = driver.add("r", PROMPTS[0], SamplingParams(prompt_logprobs=0))
    outcome = driver.run(driver.work(sequence, drafted=[1, 2]))
    assert [entry.token_id for entry in outcome.prompt_logprobs[0]] == PROMPTS[0][1:]
    tokens = tuple(PROMPTS[0] + [1, 2, 3])
    resumed = Work("r", 0, tokens, (5, 6), SamplingParams(prompt_logprobs=0), num_output=3, prompt_logprobs=0)
    assert [entry.token_id for entry in driver.run(resumed).prompt_logprobs[0]] == PROMPTS[0][1:]
    piece = Work("r", 0, tokens[:22], (5, 6), None, num_output=3, prompt_logprobs=0)
    assert driver.run(piece) == Outcome(((),))


def test_prompt_logprobs_beside_drafts_for_the_last_prompt_token(model: Any) -> None:
    driver = driver_of(model)
    sequence = driver.add("r", PROMPTS[0], SamplingParams(prompt_logprobs=0))
    driver.step((sequence, len(PROMPTS[0]) - 1))
    outcome = driver.run(driver.work(sequence, drafted=[1, 2]))
    assert outcome.tokens[0]
    assert not outcome.prompt_logprobs


def test_a_following_token_that_the_model_does_not_know(model: Any) -> None:
    driver = driver_of(model)
    sequence = driver.add("r", [1, 2, VOCAB_SIZE, 4], SamplingParams(prompt_logprobs=0))
    outcome = driver.run(driver.work(sequence, 2), driver.work(driver.add("other", PROMPTS[1])))
    assert list(outcome.errors) == [0]
    assert outcome.tokens[1] == run_three(driver_of(model)).tokens[1]


def test_swapped_blocks_come_back_bit_for_bit(model: Any) -> None:
    driver = driver_of(model, swap_bytes=10**6)
    sequence = driver.add("r", PROMPTS[2])
    twin = driver.add("twin", PROMPTS[2])
    driver.generate([sequence, twin], 3)
    backend = driver.executor.attention
    before = [tensor[sequence.table].clone() for tensor in backend.tensors()]
    old = sequence.table
    driver.run(swap_out=[BlockCopy(block, number + 3) for number, block in enumerate(old)])
    backend_blocks = [driver.free.pop() for _ in old]
    with torch.inference_mode():
        for tensor in backend.tensors():
            tensor[old] = float("nan")
    sequence.table = backend_blocks
    work, twin_work = driver.work(sequence), driver.work(twin)
    swap_in = [BlockCopy(number + 3, block) for number, block in enumerate(backend_blocks)]
    outcome = driver.run(work, twin_work, swap_in=swap_in)
    assert outcome.tokens[0] == outcome.tokens[1]
    computed = sequence.count % driver.block_size
    for tensor, kept in zip(backend.tensors(), before, strict=True):
        now = tensor[backend_blocks]
        assert torch.equal(now[:-1], kept[:-1])
        assert torch.equal(now[-1, :, :, :computed], kept[-1, :, :, :computed])


def test_copies_between_unknown_blocks_raise(model: Any) -> None:
    driver = driver_of(model, swap_bytes=10**5)
    with pytest.raises(ExecutionError, match=r"target blocks \[99\]"):
        driver.run(swap_out=[BlockCopy(0, 99)])
    with pytest.raises(ExecutionError, match=r"target blocks \[64\]"):
        driver.run(swap_in=[BlockCopy(0, 64)])


def test_a_logits_hook_sees_one_row_for_each_sampled_position(model: Any) -> None:
    seen: list[tuple[torch.Size, list[str]]] = []

    def forbid_all_but(logits: torch.Tensor, works: Sequence[Work]) -> None:
        seen.append((logits.shape, [work.request_id for work in works]))
        logits[:, :7] = float("-inf")
        logits[:, 8:] = float("-inf")

    driver = driver_of(model, process_logits=forbid_all_but)
    seen.clear()
    first, second = driver.add("first", PROMPTS[0]), driver.add("second", PROMPTS[1])
    silent = driver.work(driver.add("silent", PROMPTS[2]), 4)
    outcome = driver.run(driver.work(first), silent, driver.work(second, drafted=[7, 9]))
    assert outcome.tokens == ((7,), (), (7, 7))
    assert seen == [(torch.Size([4, VOCAB_SIZE]), ["first", "second", "second", "second"])]


def test_min_tokens_holds_for_each_drafted_position(model: Any) -> None:
    """The hook makes 7 the best token and 9 the next; 7 ends the text and is forbidden until two tokens are there."""

    def favour(logits: torch.Tensor, works: Sequence[Work]) -> None:
        logits[:, 7], logits[:, 9] = 1000.0, 900.0

    driver = driver_of(model, process_logits=favour)
    sequence = driver.add("r", PROMPTS[0], SamplingParams(min_tokens=2, stop_token_ids=(7,)))
    assert driver.run(driver.work(sequence, drafted=[9, 9, 9])).tokens == ((9, 9, 7),)
