"""Sharing of blocks: within a step, across steps, in chunked prefill, in groups; and what must not be shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from treadle import Handle, SamplingParams, hookimpl
from treadle.errors import InvalidRequest
from treadle.plan import Outcome, StepPlan, TokenLogprobs
from treadle.testing import FakeExecutor, drain_checked

SIZE = 16
REUSING = pytest.mark.parametrize("prefix", ["hash_chain", "radix"])
FOUR = SamplingParams(max_tokens=4)
CHUNKED = {"budget": {"strategy": "decode_first", "max_tokens": 24}}


def _cached(handles: list[Handle]) -> list[int]:
    return [handle.result().num_cached_tokens for handle in handles]


@REUSING
@pytest.mark.parametrize("length", [SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1, 3 * SIZE + 5])
def test_two_equal_prompts_in_one_step_share_what_is_full(
    length: int, prefix: str, build: Any, assert_right: Any, executor: FakeExecutor
) -> None:
    engine = build(prefix=prefix, executor=executor)
    handles = [engine.submit(list(range(length)), FOUR) for _ in range(2)]
    engine.step()
    assert len(executor.plans[0].works) == 2, "both run in the first pass"
    drain_checked(engine)
    assert_right(handles)
    # at least one token is left to compute: its logits are needed
    assert _cached(handles) == [0, (length - 1) // SIZE * SIZE]


@REUSING
def test_a_finished_request_is_matched_by_a_later_one(prefix: str, build: Any, assert_right: Any) -> None:
    engine = build(prefix=prefix)
    first = engine.submit(list(range(40)), SamplingParams(max_tokens=30))
    drain_checked(engine)
    answer = first.result().token_ids
    follow_up = engine.submit([*range(40), *answer, 5], FOUR)
    drain_checked(engine)
    assert_right([first, follow_up])
    # the last token of the answer was never computed: 69 of 70 are there, 64 in full blocks
    assert _cached([first, follow_up]) == [0, 64]


@REUSING
def test_requests_share_in_chunked_prefill_one_behind_the_other(
    prefix: str, build: Any, assert_right: Any, executor: FakeExecutor
) -> None:
    engine = build(prefix=prefix, executor=executor, **CHUNKED)
    prompt = list(range(1, 121))
    handles = [engine.submit(prompt, FOUR)]
    for number in range(3):
        engine.step()
        handles.append(engine.submit([*prompt, number], FOUR))
    drain_checked(engine)
    assert_right(handles)
    assert all(_cached(handles)[1:])
    num_prefill = sum(len(work.tokens) for plan in executor.plans for work in plan.works if len(work.tokens) > 1)
    assert num_prefill < 2 * len(prompt), "the common prompt is computed about once, not four times"


@REUSING
def test_a_request_in_prefill_catches_up_at_a_block_boundary(prefix: str, build: Any, assert_right: Any) -> None:
    """The second arrives when the first is one chunk ahead, and computes nothing that the first has computed meanwhile."""
    engine = build(prefix=prefix, budget={"strategy": "decode_first", "max_tokens": 2 * SIZE})
    prompt = list(range(1, 8 * SIZE + 2))
    first = engine.submit(prompt, FOUR)
    engine.step()
    second = engine.submit([*prompt[: 6 * SIZE], 7, 7, 7], FOUR)
    drain_checked(engine)
    assert_right([first, second])
    assert _cached([first, second])[1] >= 5 * SIZE


@REUSING
def test_blocks_are_not_shared_across_salts(prefix: str, build: Any, assert_right: Any) -> None:
    engine = build(prefix=prefix)
    prompt = list(range(50))
    handles = [engine.submit(prompt, FOUR, cache_salt=salt) for salt in ("a", "b", None, "a")]
    drain_checked(engine)
    handles += [engine.submit(prompt, FOUR, cache_salt=salt) for salt in ("b", None, "c", "")]
    drain_checked(engine)
    assert_right(handles)
    assert _cached(handles) == [0, 0, 0, 48, 48, 48, 0, 0]


@REUSING
def test_a_group_shares_its_prompts_full_blocks(prefix: str, build: Any, assert_right: Any) -> None:
    engine = build(prefix=prefix)
    handles = engine.submit_group(list(range(40)), SamplingParams(max_tokens=12, temperature=1.0, seed=3), 4)
    engine.step()
    tables = [handle.request.block_table for handle in handles]
    assert len({table[:2] for table in tables}) == 1
    assert len({table[2] for table in tables}) == 4, "a partial block has one owner"
    drain_checked(engine)
    done = assert_right(handles)
    assert _cached(handles) == [0, 32, 32, 32]
    assert [handle.request.params.seed for handle in handles] == [3, 4, 5, 6]
    assert len({completion.token_ids for completion in done}) == 4
    assert len({handle.request.group for handle in handles}) == 1


def test_a_group_without_a_seed_draws_one_for_each(build: Any, assert_right: Any) -> None:
    engine = build()
    handles = engine.submit_group([1, 2], SamplingParams(max_tokens=8, temperature=1.0), 3)
    drain_checked(engine)
    assert_right(handles)
    assert len({handle.request.params.seed for handle in handles}) == 3


@pytest.mark.parametrize("n", [0, -1])
def test_a_group_of_none_is_refused(n: int, build: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"n={n}"):
        build().submit_group([1], FOUR, n)


def test_a_group_is_posted_whole_or_not_at_all(build: Any) -> None:
    engine = build()
    engine.submit([1], FOUR, request_id="mine-1")
    with pytest.raises(InvalidRequest, match="mine-1"):
        engine.submit_group([1], FOUR, 3, request_id="mine")
    engine.step()
    assert engine.queues.load.num_running == 1


class WithLogprobs(FakeExecutor):
    """Brings a log-probability for each prompt token behind a work's first, as the torch executor does."""

    @hookimpl
    def execute(self) -> WithLogprobs:
        return self

    def run(self, plan: StepPlan) -> Outcome:
        found = {}
        for place, work in enumerate(plan.works):
            if work.following is not None:
                found[place] = (*work.tokens[1:], work.following)
            elif work.prompt_logprobs is not None and work.sampling is not None:
                found[place] = work.tokens[1 : len(work.tokens) - work.num_output]
        told = {place: tuple(TokenLogprobs(token, -1.0) for token in tokens) for place, tokens in found.items()}
        return replace(super().run(plan), prompt_logprobs=told)


@REUSING
def test_requests_that_ask_for_prompt_logprobs_take_no_match_and_give_one(prefix: str, build: Any, assert_right: Any) -> None:
    executor = WithLogprobs()
    engine = build(prefix=prefix, executor=executor, **CHUNKED)
    prompt = list(range(1, 61))
    asking = SamplingParams(max_tokens=4, prompt_logprobs=0)
    handles = [engine.submit(prompt, asking), engine.submit(prompt, asking)]
    drain_checked(engine)
    handles += [engine.submit(prompt, asking), engine.submit(prompt, FOUR)]
    drain_checked(engine)
    done = assert_right(handles)
    assert _cached(handles) == [0, 0, 0, 48]
    told = [[entry.token_id for entry in completion.prompt_logprobs] for completion in done]
    assert told == [prompt[1:]] * 3 + [[]]


def test_prompt_logprobs_come_once_though_the_request_is_preempted(build: Any, assert_right: Any) -> None:
    engine = build(executor=WithLogprobs(), num_blocks=9, **CHUNKED)
    asking = SamplingParams(max_tokens=50, prompt_logprobs=0)
    handles = [engine.submit(list(range(n, n + 40)), asking) for n in range(1, 5)]
    drain_checked(engine)
    done = assert_right(handles)
    assert any(completion.num_preempted for completion in done)
    assert [[e.token_id for e in c.prompt_logprobs] for c in done] == [list(c.prompt_token_ids[1:]) for c in done]


@REUSING
def test_a_duplicate_of_an_indexed_block_is_not_indexed(prefix: str, build: Any, assert_right: Any) -> None:
    engine = build(prefix=prefix)
    asking = SamplingParams(max_tokens=2, prompt_logprobs=0)
    handles = [engine.submit(list(range(33)), asking) for _ in range(3)]
    drain_checked(engine)
    assert_right(handles)
    assert engine.kv_cache.pool.num_cached == 2


def test_without_reuse_nothing_is_indexed(build: Any, assert_right: Any) -> None:
    engine = build(prefix="none")
    handles = [engine.submit(list(range(50)), FOUR) for _ in range(3)]
    drain_checked(engine)
    assert_right(handles)
    assert _cached(handles) == [0, 0, 0]
    assert engine.kv_cache.pool.num_free == 64


class Liar:
    """Nominates any indexed blocks as a match: what a hash collision or a stale entry would do."""

    name = "liar"

    @hookimpl
    def match_prefix(self, step: Any, request: Any) -> list[int]:
        indexed = [b for b in range(step.pool.num_blocks) if step.pool.record(b) is not None]
        return indexed[: (request.num_tokens - 1) // step.pool.block_size]


def test_a_wrong_nomination_can_never_share_a_wrong_block(build: Any, assert_right: Any) -> None:
    engine = build(Liar())
    handles = [engine.submit([n] * 20 + list(range(30)), SamplingParams(max_tokens=20)) for n in range(4)]
    drain_checked(engine)
    handles += [engine.submit([n] * 20 + list(range(30 - n)), SamplingParams(max_tokens=20)) for n in range(4)]
    drain_checked(engine)
    assert_right(handles)
