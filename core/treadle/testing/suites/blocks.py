"""Suites of the slots that deal with blocks: which are reused, given, forgotten, and taken back."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise

from treadle.engine import Engine
from treadle.hookspecs import hookimpl
from treadle.plugin import Trait
from treadle.request import Request
from treadle.sampling_params import SamplingParams
from treadle.step import Step
from treadle.testing.fake_executor import FakeExecutor
from treadle.testing.suites.base import Strategy, StrategySuite
from treadle.testing.traffic import Arrival, Tally, assert_right, serve, shared_prefix_traffic

BLOCK = 16


class PrefixSuite(StrategySuite):
    """Never a wrong block: not under churn, not across salts, not the one that holds the last token."""

    slot = "prefix"

    def test_every_nominated_block_is_right(self, strategy: Strategy) -> None:
        """A stale or foreign block is caught by the core, but costs the reuse: the strategy must not name it."""
        for seed in range(6):
            spy = NominationSpy()
            self.play(strategy, spy, arrivals=shared_prefix_traffic(seed=seed))
            assert not spy.wrong, f"wrong blocks were nominated: {spy.wrong}"

    def test_what_was_computed_is_reused(self, strategy: Strategy) -> None:
        """All full blocks but the one of the last token, if the strategy reuses anything at all."""
        for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5):
            with self.engine(strategy) as engine:
                saved = self._saved(engine, range(length), range(length))
                most = (length - 1) // BLOCK * BLOCK if engine.manager.has_trait(Trait.PREFIX_REUSE) else 0
                assert saved == most, f"{saved} of {length} tokens were reused, not {most}"

    def test_salts_keep_requests_apart(self, strategy: Strategy) -> None:
        """Only equal salts share."""
        with self.engine(strategy) as engine:
            assert self._saved(engine, range(50), range(50), cache_salt="other") == 0

    def test_a_request_that_wants_prompt_logprobs_takes_nothing(self, strategy: Strategy) -> None:
        """Its logits must be computed."""
        with self.engine(strategy) as engine:
            assert self._saved(engine, range(50), range(50), prompt_logprobs=1) == 0

    def test_a_failed_pass_leaves_no_trace(self, strategy: Strategy) -> None:
        """What it was to write is not there to be matched."""
        executor = FakeExecutor()
        with self.engine(strategy, executor=executor) as engine:
            doomed = engine.submit(range(60), SamplingParams(max_tokens=4))
            executor.fail_on.add(doomed.id)
            serve(engine, [])
            handles = serve(engine, [Arrival(0.0, tuple(range(60)), SamplingParams(max_tokens=4))] * 2)
            assert_right(engine, handles)

    def _saved(
        self,
        engine: Engine,
        first: Sequence[int],
        second: Sequence[int],
        cache_salt: str | None = None,
        prompt_logprobs: int | None = None,
    ) -> int:
        """Tokens of the second prompt that were not computed, after the first was."""
        params = SamplingParams(max_tokens=1)
        serve(engine, [Arrival(0.0, tuple(first), params)])
        params = SamplingParams(max_tokens=1, prompt_logprobs=prompt_logprobs)
        handles = serve(engine, [Arrival(0.0, tuple(second), params, {"cache_salt": cache_salt})])
        return assert_right(engine, handles)[0].num_cached_tokens


class NominationSpy:
    """Compares what is nominated with the pool's own records."""

    name = "nomination_spy"

    def __init__(self) -> None:
        self.wrong: list[str] = []

    @hookimpl(wrapper=True)
    def match_prefix(self, step: Step, request: Request) -> Generator[None, Sequence[int] | None, Sequence[int] | None]:
        """Hand on what was looked at."""
        answer = yield
        size = step.pool.block_size
        for place, block_id in enumerate(answer or ()):
            record = step.pool.record(block_id)
            right = request.token_ids(place * size, (place + 1) * size)
            if record is None or record.tokens != right or record.isolation_key != request.isolation_key:
                self.wrong.append(f"block {block_id} for place {place} of {request.id}")
        return answer


class AllocateSuite(StrategySuite):
    """Every block of the pool can be given, comes back, and can be given again."""

    slot = "allocate"

    def test_the_whole_pool_can_be_given(self, strategy: Strategy) -> None:
        """To one request, to as many as there are blocks, and to one again."""
        with self.engine(strategy, num_blocks=8, prefix="none", admit={"strategy": "continuous", "max_batch_size": 8}) as engine:
            for length, number in ((8 * BLOCK - 3, 1), (BLOCK - 3, 8), (8 * BLOCK - 3, 1)):
                arrivals = [Arrival(0.0, (name,) * length, SamplingParams(max_tokens=4)) for name in range(number)]
                assert_right(engine, serve(engine, arrivals))

    def test_scattered_blocks_are_found(self, strategy: Strategy) -> None:
        """Every other request ends; the rest goes on, and a long one comes."""
        arrivals = [Arrival(0.0, (number,) * BLOCK, SamplingParams(max_tokens=1 + 30 * (number % 2))) for number in range(8)] + [
            Arrival(0.004, tuple(range(4 * BLOCK)), SamplingParams(max_tokens=20))
        ]
        self.play(strategy, arrivals=arrivals, num_blocks=9)

    def test_blocks_are_not_asked_for_twice(self, strategy: Strategy) -> None:
        """What was reserved beyond the need is used before more is taken."""
        executor = FakeExecutor()
        with self.engine(strategy, executor=executor, num_blocks=8, prefix="none") as engine:
            handle = engine.submit([1] * 10, SamplingParams(max_tokens=8 * BLOCK - 9))
            serve(engine, [])
            assert_right(engine, [handle])
            tables = [plan.works[0].block_table for plan in executor.plans if plan.works]
            for before, after in pairwise(tables):
                assert after[: len(before)] == before, f"blocks {before} became {after} while the request ran"


class EvictSuite(StrategySuite):
    """Cached blocks make room when it is needed, as many as are asked for, never pinned ones."""

    slot = "evict"

    def test_it_finds_what_there_is(self, strategy: Strategy) -> None:
        """As many cached blocks as are asked for, or all that may go."""
        for seed in range(3):
            spy = EvictionSpy()
            tally = self.play(strategy, spy, arrivals=shared_prefix_traffic(seed=seed))
            assert tally["evicted"], "nothing was evicted: the pool is too large for this test"
            assert not spy.short, f"too few blocks were evicted: {spy.short}"

    def test_pinned_blocks_stay(self, strategy: Strategy) -> None:
        """The prompt of a request that asked for it is still there after others filled the pool."""
        tally = Tally()
        with self.engine(strategy, tally, num_blocks=8) as engine:
            params = SamplingParams(max_tokens=2)
            prompt = tuple(range(2 * BLOCK + 3))
            serve(engine, [Arrival(0.0, prompt, params, {"pin_s": 1e6})])
            others = [Arrival(0.0, (number,) * (3 * BLOCK), params) for number in range(100, 130)]
            assert_right(engine, serve(engine, others))
            assert tally["evicted"], "nothing was evicted: the pool is too large for this test"
            done = assert_right(engine, serve(engine, [Arrival(0.0, prompt, params)]))[0]
            assert done.num_cached_tokens == 2 * BLOCK, f"{done.num_cached_tokens} tokens are left of what was pinned"


class EvictionSpy:
    """Compares what is evicted with what might have been."""

    name = "eviction_spy"

    def __init__(self) -> None:
        self.short: list[str] = []

    @hookimpl(wrapper=True)
    def evict(self, step: Step, num_blocks: int) -> Generator[None, Sequence[int] | None, Sequence[int] | None]:
        """Hand on what was looked at."""
        answer = yield
        pool = step.pool
        most = min(num_blocks, pool.num_available - pool.num_free)
        if len(answer or ()) < most:
            self.short.append(f"{len(answer or ())} of {num_blocks} in step {step.number}, where {most} may go")
        return answer


class PreemptSuite(StrategySuite):
    """Whoever gives way comes back, and everybody finishes, with and without priorities and swap space."""

    slot = "preempt"

    def test_victims_come_back(self, strategy: Strategy) -> None:
        """As often as they went, whatever the budget and the allocation."""
        for budget in ("decode_first", "whole_prompt"):
            for allocate in ("paged", "coalescing"):
                tally = self.play(strategy, budget=budget, allocate=allocate)
                assert tally["preempted"] == tally["resumed"], f"{dict(tally.counts)}"

    def test_urgent_requests_do_not_stop_others_for_ever(self, strategy: Strategy) -> None:
        """Few places, many priorities."""
        arrivals = shared_prefix_traffic(num_priorities=5, seed=1)
        admit = {"strategy": "continuous", "max_batch_size": 3}
        self.play(strategy, arrivals=arrivals, order="priority", admit=admit)

    def test_little_swap_space_is_enough(self, strategy: Strategy) -> None:
        """A victim that does not fit there is recomputed."""
        executor = FakeExecutor(num_swap_blocks=1)
        with self.engine(strategy, executor=executor, num_blocks=8) as engine:
            assert_right(engine, serve(engine, shared_prefix_traffic()))

    def test_a_failed_pass_loses_nothing_else(self, strategy: Strategy) -> None:
        """Copies of the failed pass are not relied on."""
        executor = FakeExecutor(num_swap_blocks=self.num_swap_blocks)
        with self.engine(strategy, executor=executor, num_blocks=8) as engine:
            handles = [engine.submit([number] * 30, SamplingParams(max_tokens=40)) for number in range(1, 6)]
            for number in range(60):
                engine.step()
                engine.check_integrity()
                if number == 20:
                    executor.fail_on.add(handles[2].id)
            serve(engine, [])
            assert_right(engine, handles[:2] + handles[3:])
