"""Sampling: the right distribution, the same token whatever stands beside a row, and every edge of the parameters."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

from treadle.errors import ExecutionError
from treadle.sampling_params import SamplingParams
from treadle_plugins.sampling.sampler import Row, sample, token_logprobs, uniform

VOCAB_SIZE = 40
NUM_DRAWS = 8000


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": 1} | values))


def random_logits(num_rows: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits: torch.Tensor, sampling: SamplingParams, num: int = NUM_DRAWS) -> Counter[int]:
    """How often each token comes, over `num` positions of one request."""
    tokens = sample(logits.expand(num, -1), [Row(sampling, position) for position in range(num)])
    return Counter(token for token in tokens if token is not None)


def allowed(logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float) -> torch.Tensor:
    """The distribution by the book, one token after another."""
    probabilities = (logits.double() / temperature).softmax(0).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))[:top_k]
    total = sum(probabilities[token] for token in ranked)
    kept: list[int] = []
    mass = 0.0
    for token in ranked:
        if mass >= top_p:
            break
        kept.append(token)
        mass += probabilities[token] / total
    exact = torch.zeros(len(probabilities), dtype=torch.float64)
    exact[kept] = torch.tensor([probabilities[token] for token in kept], dtype=torch.float64)
    return exact / exact.sum()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (7, 1.0), (None, 0.8), (12, 0.9), (1, 1.0), (900, 1.0)])
def test_distribution(temperature: float, top_k: int | None, top_p: float) -> None:
    """Chi-square with fixed seeds; the bound is passed by chance once in a million."""
    logits = random_logits(1)[0]
    exact = allowed(logits, temperature, top_k, top_p)
    found = draws(logits, params(temperature=temperature, top_k=top_k, top_p=top_p))
    assert set(found) <= set(exact.nonzero()[:, 0].tolist())
    common = [token for token in range(VOCAB_SIZE) if exact[token] * NUM_DRAWS >= 5]
    chi_square = sum(
        (found[token] - float(exact[token]) * NUM_DRAWS) ** 2 / (float(exact[token]) * NUM_DRAWS) for token in common
    )
    freedom = max(1, len(common) - 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 12


def test_random_numbers_are_even_and_independent() -> None:
    for numbers in ([uniform(3, n) for n in range(20000)], [uniform(n, 3) for n in range(20000)]):
        counts = Counter(int(number * 20) for number in numbers)
        assert min(numbers) >= 0
        assert max(numbers) < 1
        assert sum((counts[cell] - 1000) ** 2 / 1000 for cell in range(20)) < 50
        pairs = Counter((int(a * 5), int(b * 5)) for a, b in pairwise(numbers))
        assert sum((count - 800) ** 2 / 800 for count in pairs.values()) < 65


def test_seed_and_position_decide() -> None:
    assert uniform(1, 5) == uniform(1, 5)
    assert len({uniform(seed, position) for seed in (-1, 0, 1, 2**63, 2**64 - 2) for position in range(100)}) == 500
    logits = random_logits(1, scale=0.1)
    one = [sample(logits, [Row(params(seed=1), position)]) for position in range(50)]
    assert one == [sample(logits, [Row(params(seed=1), position)]) for position in range(50)]
    assert one != [sample(logits, [Row(params(seed=2), position)]) for position in range(50)]


def mixed_rows(num_rows: int) -> list[Row]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_k": 30, "top_p": 0.7},
        {"top_p": 0.5},
        {"temperature": 4.0},
        {"top_k": 1000},
        {"min_tokens": 3},
    ]
    return [Row(params(seed=n, **kinds[n % len(kinds)]), 7 * n, n % 5) for n in range(num_rows)]


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "many ties"])
def test_a_row_does_not_depend_on_its_neighbours(rounded: bool) -> None:
    rows = mixed_rows(200)
    logits = random_logits(len(rows))
    if rounded:
        logits = logits.round()
    together = sample(logits, rows, {3, 4})
    alone = [sample(logits[n : n + 1], [row], {3, 4})[0] for n, row in enumerate(rows)]
    assert together == alone
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [rows[n] for n in order], {3, 4})
    assert shuffled == [together[n] for n in order]


def test_greedy_is_argmax_and_the_first_of_equals() -> None:
    logits = random_logits(50).round()
    assert sample(logits, [Row(SamplingParams(), n) for n in range(50)]) == logits.argmax(dim=1).tolist()
    assert sample(torch.zeros(1, 9), [Row(SamplingParams(), 0)]) == [0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.5}, {0, 1}),
        ({"top_p": 0.51}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 2, "top_p": 0.5}, {0}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
    ],
)
def test_edges_among_equal_tokens(values: dict[str, Any], expected: set[int]) -> None:
    assert set(draws(torch.zeros(4), params(**values), 500)) == expected


def test_the_first_token_is_kept_when_it_alone_passes_top_p() -> None:
    logits = torch.tensor([0.0, 9.0, 0.0])
    assert set(draws(logits, params(top_p=0.1), 500)) == {1}


def test_extreme_temperatures() -> None:
    logits = random_logits(1)[0]
    assert set(draws(logits, params(temperature=1e-30), 200)) == {int(logits.argmax())}
    assert len(draws(logits, params(temperature=100.0))) == VOCAB_SIZE


def test_forbidden_tokens_never_come() -> None:
    logits = torch.full((VOCAB_SIZE,), float("-inf"))
    logits[[5, 39]] = 1.0
    for values in ({}, {"top_k": 30}, {"top_p": 0.99}):
        assert set(draws(logits, params(**values), 500)) == {5, 39}


def test_ends_are_not_chosen_before_min_tokens() -> None:
    logits = torch.arange(10.0)[None]
    sampling = SamplingParams(min_tokens=2, stop_token_ids=(9, 999))
    assert [sample(logits, [Row(sampling, 0, n)], {8}) for n in range(4)] == [[7], [7], [9], [9]]
    ignoring = SamplingParams(min_tokens=2, stop_token_ids=(9,), ignore_eos=True)
    assert sample(logits, [Row(ignoring, 0, 0)], {8}) == [8]
    assert logits[0].tolist() == list(range(10))


def test_rows_from_which_nothing_can_be_chosen() -> None:
    logits = random_logits(6)
    logits[1, 3], logits[2, 3], logits[3] = float("nan"), float("inf"), float("-inf")
    for sampling in (SamplingParams(), params(), params(top_k=3), params(top_p=0.5)):
        tokens = sample(logits, [Row(sampling, n) for n in range(6)])
        assert [token is None for token in tokens] == [False, True, True, True, False, False]
    everything = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(VOCAB_SIZE)))
    assert sample(logits[:1], [Row(everything, 0)]) == [None]


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB_SIZE), []) == []
    assert token_logprobs(torch.empty(0, VOCAB_SIZE), [], []) == []


def test_a_missing_seed_is_an_error() -> None:
    with pytest.raises(ExecutionError, match="no seed"):
        sample(torch.zeros(1, 4), [Row(SamplingParams(temperature=1.0), 0)])


def test_logprobs() -> None:
    logits = random_logits(3)
    exact = logits.double().log_softmax(dim=1)
    entries = token_logprobs(logits, [4, 0, 39], [0, 2, 999])
    for row, (entry, token, num) in enumerate(zip(entries, [4, 0, 39], [0, 2, VOCAB_SIZE], strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(exact[row, token]), abs=1e-5)
        assert [token for token, _ in entry.top] == exact[row].topk(num).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(exact[row].topk(num).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("vocab_size", [16, 48, 300, 512, 1000, 49152])
def test_greedy_takes_the_first_of_the_best_in_any_vocabulary(vocab_size: int) -> None:
    """The places of the best are found piece by piece where a vocabulary can be cut into pieces."""
    logits = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(1)).round()  # many ties
    logits[1] = 0.0
    logits[2, -1] = 99.0
    logits[3, [vocab_size // 2, vocab_size - 1]] = 99.0
    logits[4] = float("-inf")
    logits[5, vocab_size // 3] = float("nan")
    logits[6, vocab_size - 1] = float("inf")
    expected = [row.tolist().index(max(row.tolist())) for row in logits]
    expected[4] = expected[5] = expected[6] = None
    assert sample(logits, [Row(SamplingParams(), position) for position in range(40)]) == expected
