"""Run prompts through an engine with the fake executor: for examples, and for tests of a plugin's policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.engine import Engine
from treadle.handles import Completion
from treadle.registry import Registry
from treadle.sampling_params import SamplingParams
from treadle.settings import load
from treadle.testing.fake_executor import FakeExecutor


def make_engine(
    *plugins: object,
    executor: FakeExecutor | None = None,
    num_blocks: int = 64,
    block_size: int = 16,
    swap_memory: int = 0,
    registry: Registry | None = None,
    **slots: Any,
) -> Engine:
    """An engine with the fake executor and small blocks. `slots`: a strategy's name, or a table of settings with `strategy`.

    The fake executor has as many swap blocks as it was made with; `swap_memory` is for executors that plugins bring.
    """
    values: dict[str, Any] = {"pool": {"num_blocks": num_blocks}, "quantize": "none", "execute": "simulated"}
    for slot, value in slots.items():
        values[slot] = {"strategy": value} if isinstance(value, str) else dict(value)
    values.setdefault("allocate", {}).setdefault("block_size", block_size)
    executor = executor or FakeExecutor()
    # any size will do for the fake executor
    values["pool"]["swap_memory"] = swap_memory or executor.num_swap_blocks
    settings = load(environment=False, values=values, registry=registry)
    return Engine(settings, [executor, *plugins])


def run_prompts(
    *plugins: object,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 4,
    max_batch_size: int | None = None,
    labels: Mapping[str, str] | None = None,
    num_blocks: int = 64,
    executor: FakeExecutor | None = None,
    **slots: Any,
) -> list[Completion]:
    """Serve all prompts together and return their completions, in order. The pool's integrity is checked after each step."""
    if max_batch_size is not None:
        slots["admit"] = {"strategy": "continuous", "max_batch_size": max_batch_size}
    with make_engine(*plugins, executor=executor, num_blocks=num_blocks, **slots) as engine:
        params = SamplingParams(max_tokens=max_tokens)
        handles = [engine.submit(prompt, params, labels=labels) for prompt in prompts]
        drain_checked(engine)
        return [handle.result() for handle in handles]


def drain_checked(engine: Engine, most_steps: int = 100_000, step: Callable[[], float | None] | None = None) -> None:
    """Step until idle, with the books proved after each step, and nothing left in the pool but what is cached.

    `step` makes one step and proves more; by default it is the engine's own.
    """
    for _ in range(most_steps):
        if not engine.busy:
            break
        until_s = engine.step() if step is None else step()
        engine.check_integrity()
        if until_s is not None:
            engine.clock.wait(until_s)
    assert not engine.busy, f"still busy after {most_steps} steps with {list(engine.queues.running)} and others that wait"
    pool = engine.kv_cache.pool
    assert pool.num_used == 0, f"{pool.num_used} blocks are used by nobody"
    assert pool.num_free + pool.num_cached == pool.num_blocks, f"{pool.num_free} free and {pool.num_cached} cached are not all"
