"""Strategies in all their combinations: which go together, rows that cover every pair, and one workload for each of them.

Everything is read from a registry, so that a strategy of one's own is combined with all others as soon as it is offered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treadle.errors import ConfigError
from treadle.registry import Registry
from treadle.testing.engines import make_engine
from treadle.testing.fake_executor import FakeExecutor
from treadle.testing.traffic import Arrival, Tally, assert_right, serve, shared_prefix_traffic

SLOTS = ("accept", "order", "admit", "budget", "prefix", "allocate", "evict", "preempt", "release")
"""Slots whose strategies can be combined without a model."""

Row = Mapping[str, str]
"""A strategy's name for each slot."""
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two slots, each with a strategy's name, in the order of SLOTS."""

SMALL: Mapping[str, Mapping[str, Any]] = {
    "order.priority": {"level_s": 0.01},
    "admit.continuous": {"max_batch_size": 8},
    "admit.static": {"batch_size": 5, "max_wait_ms": 6},
    "admit.windowed": {"max_batch_size": 8, "window_ms": 2, "min_batch": 3},
    "order.length_bucket": {"limits": [16, 32], "min_batch": 2, "wait_ms": 3},
    "order.prefix_affinity": {"prefix_tokens": 16, "max_delay_s": 0.05},
    "order.deadline": {"bulk_target_ms": 50},
    "budget.adaptive": {"tpot_ms": 2, "max_prefill_tokens": 40, "max_batch_size": 8},
    "budget.decode_first": {"max_tokens": 40},
    "budget.whole_prompt": {"max_tokens": 80},
    "allocate.coalescing": {"run_blocks": 2},
}
"""Settings by which a strategy has something to do in a workload of 30 requests."""


def tables(row: Row) -> dict[str, Any]:
    """The row as values for `make_engine`."""
    return {slot: {"strategy": name, **SMALL.get(f"{slot}.{name}", {})} for slot, name in row.items()}


def strategies(registry: Registry) -> dict[str, list[str]]:
    """For each slot, what is offered."""
    return {slot: registry.names(slot) for slot in SLOTS}


def refusal(row: Row, registry: Registry) -> str | None:
    """Why these strategies do not go together, given swap space; None when they do."""
    try:
        make_engine(executor=FakeExecutor(num_swap_blocks=1), registry=registry, **tables(row)).close()
    except ConfigError as error:
        return str(error)
    return None


def allowed_pairs(registry: Registry) -> set[Pair]:
    """Every pair of strategies of two slots that some row may hold."""
    pairs: set[Pair] = set()
    for (one, its_names), (other, other_names) in itertools.combinations(strategies(registry).items(), 2):
        for name, other_name in itertools.product(its_names, other_names):
            # without prefix reuse nobody refuses anybody, except for these two
            if refusal({"prefix": "none", one: name, other: other_name}, registry) is None:
                pairs.add(((one, name), (other, other_name)))
    return pairs


def pairs_of(row: Row) -> set[Pair]:
    """Every pair in a row."""
    ordered = [(slot, row[slot]) for slot in SLOTS if slot in row]
    return set(itertools.combinations(ordered, 2))


def covering_rows(registry: Registry, allowed: set[Pair] | None = None) -> list[dict[str, str]]:
    """Rows in which every allowed pair occurs, far fewer than the full product. The same registry gives the same rows.

    `allowed`: what `allowed_pairs` said, for those who have it already.
    """
    allowed = allowed_pairs(registry) if allowed is None else allowed
    missing = set(allowed)
    rows = []
    while missing:
        row = _fill(dict(min(missing)), strategies(registry), allowed, missing)
        rows.append({slot: row[slot] for slot in SLOTS})
        missing -= pairs_of(row)
    return rows


def _fill(row: dict[str, str], names: Mapping[str, list[str]], allowed: set[Pair], missing: set[Pair]) -> dict[str, str]:
    """Complete a row, slot by slot, with whoever brings the most missing pairs and goes together with all others so far."""
    # a slot whose choice some other slot restricts comes first, so that there always is a choice left
    restricted = sorted(set(names) - set(row), key=lambda slot: (_num_partners(slot, names, allowed), SLOTS.index(slot)))
    for slot in restricted:
        fitting = [name for name in names[slot] if pairs_of({**row, slot: name}) <= allowed]
        assert fitting, f"nothing in {slot!r} goes together with {row}"
        row[slot] = max(fitting, key=lambda name: len(pairs_of({**row, slot: name}) & missing))
    return row


def _num_partners(slot: str, names: Mapping[str, list[str]], allowed: set[Pair]) -> float:
    """Share of the pairs with this slot that are allowed."""
    num_allowed = sum(slot in (one[0], other[0]) for one, other in allowed)
    return num_allowed / (len(names[slot]) * sum(len(n) for s, n in names.items() if s != slot))


def full_product(registry: Registry) -> Iterator[dict[str, str]]:
    """Every row there is, also those whose strategies refuse each other."""
    names = strategies(registry)
    for chosen in itertools.product(*names.values()):
        yield dict(zip(names, chosen, strict=True))


def play_row(
    row: Row, registry: Registry, *, arrivals: Sequence[Arrival] | None = None, num_blocks: int = 8, num_swap_blocks: int = 6
) -> Tally:
    """Serve a workload with these strategies in a pool that is too small for it.

    Raises AssertionError for a wrong token, books that do not balance, a request that does not end by itself, or when memory was
    never short though these strategies allow it; ConfigError when they refuse each other.
    """
    tally = Tally()
    executor = FakeExecutor(num_swap_blocks=num_swap_blocks)
    with make_engine(tally, executor=executor, num_blocks=num_blocks, registry=registry, **tables(row)) as engine:
        assert_right(engine, serve(engine, shared_prefix_traffic() if arrivals is None else arrivals))
    missing = [event for event in _expected_events(row) if not tally[event]]
    assert not missing, f"{', '.join(missing)}: never happened, with {dict(tally.counts)}"
    return tally


def _expected_events(row: Row) -> list[str]:
    """What must happen in a pool that is too small, where the strategies allow it."""
    events = []
    if row.get("prefix") != "none":
        events.append("evicted")
    # who reserved everything at the start never lacks room, and with `none` nobody gives way
    if row.get("allocate") != "contiguous" and row.get("preempt") != "none":
        events.append("preempted")
        if row.get("preempt") == "swap":
            events.append("swapped")
    return events
