"""The contract suites, applied to every strategy that is installed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from treadle.registry import Registry
from treadle.testing.suites import (
    AcceptSuite,
    AdmitSuite,
    AllocateSuite,
    BudgetSuite,
    EvictSuite,
    OrderSuite,
    PreemptSuite,
    PrefixSuite,
    ReleaseSuite,
)
from treadle.testing.suites.base import Strategy

REGISTRY = Registry.installed()


def every(slot: str, *more: Strategy) -> list[Strategy]:
    return [*REGISTRY.names(slot), *more]


def label(strategy: Strategy) -> str:
    return "-".join(map(str, strategy.values())) if isinstance(strategy, Mapping) else str(strategy)


class TestAccept(AcceptSuite):
    @pytest.fixture(
        params=every("accept", {"strategy": "queue_limit", "max_waiting": 3, "trim_above": 1, "trim_to_tokens": 9}), ids=label
    )
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return request.param  # type: ignore[no-any-return]


class TestOrder(OrderSuite):
    @pytest.fixture(params=every("order"), ids=label)
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return request.param  # type: ignore[no-any-return]


class TestAdmit(AdmitSuite):
    @pytest.fixture(
        params=every(
            "admit", {"strategy": "continuous", "max_batch_size": 3, "max_inserts": 1, "every_steps": 3, "spare_blocks": 1}
        ),
        ids=label,
    )
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return request.param  # type: ignore[no-any-return]


class TestBudget(BudgetSuite):
    @pytest.fixture(
        params=every(
            "budget",
            {"strategy": "decode_first", "max_tokens": 5},
            {"strategy": "whole_prompt", "max_tokens": 8},
            {"strategy": "adaptive", "tpot_ms": 0.1, "min_prefill_tokens": 2},
        ),
        ids=label,
    )
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return request.param  # type: ignore[no-any-return]


class TestPrefix(PrefixSuite):
    @pytest.fixture(params=every("prefix"), ids=label)
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return request.param  # type: ignore[no-any-return]


class TestAllocate(AllocateSuite):
    @pytest.fixture(
        params=every(
            "allocate", {"strategy": "coalescing", "run_blocks": 3}, {"strategy": "contiguous", "reserve": "model_length"}
        ),
        ids=label,
    )
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return request.param  # type: ignore[no-any-return]


class TestEvict(EvictSuite):
    @pytest.fixture(params=every("evict"), ids=label)
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return request.param  # type: ignore[no-any-return]


class TestPreempt(PreemptSuite):
    @pytest.fixture(
        params=every(
            "preempt",
            *(
                {"strategy": name, "victim": victim, "partial": True}
                for name, victim in (
                    ("recompute", "fewest_tokens_lost"),
                    ("swap", "most_blocks_freed"),
                    ("auto", "lowest_priority"),
                )
            ),
        ),
        ids=label,
    )
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return request.param  # type: ignore[no-any-return]


class TestRelease(ReleaseSuite):
    @pytest.fixture(params=every("release"), ids=label)
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return request.param  # type: ignore[no-any-return]
