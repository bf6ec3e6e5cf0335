"""What the suites of all slots share: engines with the strategy under test in its place, and the promises that none may break."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from treadle.engine import Engine
from treadle.handles import Handle
from treadle.plugin import Trait
from treadle.registry import Offer, Registry
from treadle.sampling_params import SamplingParams
from treadle.testing.engines import make_engine
from treadle.testing.fake_executor import FakeExecutor
from treadle.testing.traffic import Arrival, Tally, assert_right, serve, shared_prefix_traffic

Strategy = str | type | Mapping[str, Any]
"""A strategy's name, its class, or a table of settings whose `strategy` is one of the two."""

UNDER_TEST = "under_test"


class StrategySuite:
    """Every request of a workload gets the right tokens in a pool that is too small, whatever becomes of its neighbours."""

    slot: ClassVar[str]
    """The slot that the strategy fills."""
    num_swap_blocks: ClassVar[int] = 6
    """Blocks of swap space in the engines of this suite."""

    @pytest.fixture
    def strategy(self) -> Strategy:
        """What is under test. Override it."""
        pytest.fail(f"{type(self).__name__} must override the fixture `strategy`")

    # --- tools ----------------------------------------------------------------------------------------------------------------

    def engine(self, strategy: Strategy, *plugins: object, executor: FakeExecutor | None = None, **options: Any) -> Engine:
        """An engine with the strategy in its slot. `options` are those of `make_engine`."""
        table: dict[str, Any] = dict(strategy) if isinstance(strategy, Mapping) else {"strategy": strategy}
        registry = Registry.installed()
        chosen: Any = table["strategy"]
        if not isinstance(chosen, str):
            registry = registry.with_offers([Offer(self.slot, UNDER_TEST, "a test", lambda: chosen)])
            table["strategy"] = UNDER_TEST
        factory = registry.find(self.slot, table["strategy"], "a test").load()
        if self.slot != "prefix" and Trait.PREFIX_REUSE in getattr(factory, "refuses", {}):
            options["prefix"] = "none"
        executor = executor or FakeExecutor(num_swap_blocks=self.num_swap_blocks)
        return make_engine(*plugins, executor=executor, registry=registry, **{**options, self.slot: table})

    def play(
        self, strategy: Strategy, *plugins: object, arrivals: Sequence[Arrival] | None = None, num_blocks: int = 8, **options: Any
    ) -> Tally:
        """Serve a workload and check every token. The strategy is part of a stack of defaults, unless `options` say else."""
        tally = Tally()
        with self.engine(strategy, tally, *plugins, num_blocks=num_blocks, **options) as engine:
            assert_right(engine, self.served(serve(engine, shared_prefix_traffic() if arrivals is None else arrivals)))
        return tally

    def served(self, handles: Sequence[Handle]) -> list[Handle]:
        """Those of these requests that must have been served."""
        return list(handles)

    # --- promises -------------------------------------------------------------------------------------------------------------

    def test_everybody_gets_the_right_tokens(self, strategy: Strategy) -> None:
        """Over several workloads."""
        for seed in range(3):
            self.play(strategy, arrivals=shared_prefix_traffic(seed=seed))

    def test_two_requests_that_do_not_fit_together_both_finish(self, strategy: Strategy) -> None:
        """Each grows to 60 % of the pool."""
        params = SamplingParams(max_tokens=64)
        arrivals = [Arrival(0.0, tuple(range(start, start + 32)), params) for start in (1, 100)]
        self.play(strategy, arrivals=arrivals, num_blocks=10)

    def test_a_request_as_large_as_the_pool_runs_after_trouble(self, strategy: Strategy) -> None:
        """Cancelled and failed requests leave nothing behind that stands in its way."""
        executor = FakeExecutor(num_swap_blocks=self.num_swap_blocks)
        with self.engine(strategy, executor=executor, num_blocks=8) as engine:
            handles = [engine.submit([number] * 40, SamplingParams(max_tokens=20)) for number in range(1, 7)]
            executor.fail_on.add(handles[1].id)
            for number in range(12):
                engine.step()
                engine.check_integrity()
                if number == 6:
                    handles[0].cancel()
                    handles[4].cancel()
            serve(engine, [])
            assert_right(engine, self.served([handles[2], handles[3], handles[5]]))
            whole = Arrival(engine.clock.now(), tuple(range(100)), SamplingParams(max_tokens=29))
            assert_right(engine, serve(engine, [whole]))
