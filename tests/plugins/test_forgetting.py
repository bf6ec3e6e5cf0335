"""What a plugin keeps for a request, a block or a key it forgets with it: thousands of requests leave no more behind than few."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle import Engine, SamplingParams
from treadle.registry import Registry
from treadle.testing import FakeExecutor, make_engine
from treadle.testing.combinations import SLOTS

REGISTRY = Registry.installed()
STRATEGIES = [(slot, name) for slot in SLOTS for name in REGISTRY.names(slot)]
NUM_BLOCKS = 8
MOST = 1_000
"""Entries of all containers that a plugin may keep, whatever it has seen."""
OWN = ("treadle_plugins.", "treadle_tenant_rules.", __name__)


def children(value: object) -> Iterator[object]:
    """What a container holds, or an object of a plugin's own class keeps."""
    if isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif type(value).__module__.startswith(OWN):
        yield from vars(value).values() if hasattr(value, "__dict__") else ()
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            yield from (getattr(value, name) for name in slots if hasattr(value, name))


def num_kept(plugin: object) -> int:
    """Entries of all containers that can be reached from a plugin through its own objects."""
    seen: set[int] = set()
    todo, number = [plugin], 0
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        number += isinstance(value, (Mapping, list, tuple, set, frozenset, deque)) and len(value)
        todo += children(value)
    return number


def run(engine: Engine, num_requests: int) -> None:
    """Short requests that have nothing in common: served, refused, cancelled while they wait and before they do."""
    for number in range(num_requests):
        handle = engine.submit(
            [number % 900] * 18 if number % 50 else [1] * 4000,
            SamplingParams(max_tokens=1 + number % 3),
            request_id=f"request {number}",
            cache_salt=f"salt {number}",
            priority=number % 1000,
            labels={"tenant": f"tenant {number}", "lane": f"lane {number}", "ttft_ms": str(number)},
        )
        if number % 20 == 1:
            handle.cancel()
        if number % 4 == 3:
            engine.step()
        if number % 20 == 2:
            handle.cancel()
    serve_rest(engine)
    # all blocks at once, for one that shares nothing: whatever was cached is evicted
    engine.submit([1] * (NUM_BLOCKS * 16 - 4), SamplingParams(max_tokens=4), reuse=False)
    serve_rest(engine)
    assert engine.kv_cache.pool.num_cached == 0


def serve_rest(engine: Engine) -> None:
    while engine.busy:
        until_s = engine.step()
        if until_s is not None:
            engine.clock.wait(until_s)


def assert_it_forgets(plugin: object, engine: Engine, num_requests: int = 2000) -> None:
    with engine:
        run(engine, num_requests)
        assert num_kept(plugin) <= MOST, {name: num_kept(value) for name, value in vars(plugin).items()}


@pytest.mark.parametrize(("slot", "name"), STRATEGIES)
def test_a_strategy_forgets(slot: str, name: str) -> None:
    slots: dict[str, Any] = {"accept": "open", slot: name}
    if name == "contiguous":
        slots["prefix"] = "none"
    engine = make_engine(executor=FakeExecutor(num_swap_blocks=4), num_blocks=NUM_BLOCKS, registry=REGISTRY, **slots)
    factory = REGISTRY.find(slot, name, "a test").load()
    plugin = next(item.plugin for item in engine.manager.registered if isinstance(item.plugin, factory))
    assert_it_forgets(plugin, engine)


@pytest.mark.parametrize("name", REGISTRY.names("plugin"))
def test_an_observer_forgets(name: str, tmp_path: Path) -> None:
    factory: Any = REGISTRY.find("plugin", name, "a test").load()
    values = {"portrait": {"path": tmp_path / "p.jsonl"}, "block_log": {"path": tmp_path / "b.jsonl", "length": 20}}
    plugin = factory(factory.Settings(**values.get(name, {}))) if hasattr(factory, "Settings") else factory()
    assert_it_forgets(plugin, make_engine(plugin, num_blocks=NUM_BLOCKS, accept="open"))


def test_the_count_itself() -> None:
    class Hoarder:
        def __init__(self) -> None:
            self.seen: dict[str, list[int]] = {}

    plugin = Hoarder()
    plugin.seen = {"a": [1, 2], "b": [3]}
    assert num_kept(plugin) == 5
