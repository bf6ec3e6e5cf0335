"""Every pair of strategies of two slots serves a workload in a pool that is too small for it, and gets every token right."""

from __future__ import annotations

import itertools

import pytest

from treadle import Request, Step, hookimpl
from treadle.registry import Offer, Registry
from treadle.testing.combinations import (
    SLOTS,
    allowed_pairs,
    covering_rows,
    pairs_of,
    play_row,
    refusal,
    strategies,
)

REGISTRY = Registry.installed()
ALLOWED = allowed_pairs(REGISTRY)
ROWS = covering_rows(REGISTRY, ALLOWED)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_a_row(row: dict[str, str]) -> None:
    play_row(row, REGISTRY)


def test_rows_cover_every_allowed_pair() -> None:
    covered = set().union(*map(pairs_of, ROWS))
    assert covered == ALLOWED
    assert all(tuple(row) == SLOTS for row in ROWS)


def test_only_contiguous_allocation_refuses_anything() -> None:
    names = strategies(REGISTRY)
    every = {
        ((one, name), (other, other_name))
        for one, other in itertools.combinations(SLOTS, 2)
        for name, other_name in itertools.product(names[one], names[other])
    }
    reusing = [name for name in names["prefix"] if name != "none"]
    assert every - ALLOWED == {(("prefix", name), ("allocate", "contiguous")) for name in reusing}
    reason = refusal({"prefix": "radix", "allocate": "contiguous"}, REGISTRY)
    assert reason is not None
    assert "'none'" in reason


class Newest:
    """A stranger's order: the last come is first served."""

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}

    @hookimpl
    def request_queued(self, request: Request) -> None:
        self._waiting[request.id] = request

    request_preempted = request_queued

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        self._waiting.pop(request.id, None)

    request_resumed = request_admitted
    request_finished = request_admitted

    @hookimpl
    def order(self, step: Step) -> list[Request]:
        return sorted(self._waiting.values(), key=lambda request: -request.sequence)


def test_a_new_strategy_is_combined_with_all_others() -> None:
    registry = REGISTRY.with_offers([Offer("order", "newest", "stranger 1", lambda: Newest)])
    rows = [row for row in covering_rows(registry) if row["order"] == "newest"]
    for slot, names in strategies(registry).items():
        if slot != "order":
            assert {row[slot] for row in rows} == set(names)
    for row in rows:
        play_row(row, registry)
