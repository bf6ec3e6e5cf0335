from __future__ import annotations

import pytest

from workloads import LONGEST, WORKLOADS, Corpus, lengths, make, make_warm_up

CORPUS = Corpus(list(range(5000)), "numbers")


@pytest.mark.parametrize(("name", "requests", "output"), [("W1", 64, 8466), ("W2", 48, 2263), ("W3", 1, 128)])
def test_lengths_are_those_of_the_comparison(name: str, requests: int, output: int) -> None:
    assert len(lengths(name)) == requests
    assert sum(tokens for _, tokens in lengths(name)) == output


@pytest.mark.parametrize("name", WORKLOADS)
def test_contents_are_repeatable_and_differ_between_turns(name: str) -> None:
    assert make(name, CORPUS, 3) == make(name, CORPUS, 3)
    assert make(name, CORPUS, 3) != make(name, CORPUS, 4)
    assert [len(job.prompt) for job in make(name, CORPUS, 3)] == [len(job.prompt) for job in make(name, CORPUS, 4)]
    assert all(len(job.prompt) + job.max_tokens <= LONGEST for job in make(name, CORPUS, 0))


def test_prompts_share_what_they_should() -> None:
    first, *others = make("W2", CORPUS, 0)
    assert all(other.prompt[:512] == first.prompt[:512] for other in others)
    assert len({tuple(job.prompt) for job in make("W2", CORPUS, 0)}) == 48


def test_a_share_is_the_first_requests() -> None:
    assert make("W1", CORPUS, 0, 0.25) == make("W1", CORPUS, 0)[:16]
    assert make("W3", CORPUS, 0, 0.25) == make("W3", CORPUS, 0)


def test_the_warm_up_touches_batches_a_shared_prompt_and_a_single_stream() -> None:
    assert [(len(jobs), at_once) for jobs, at_once in make_warm_up(CORPUS)] == [(24, 24), (4, 24), (1, 1)]
