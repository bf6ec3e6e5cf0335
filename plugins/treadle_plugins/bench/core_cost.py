"""`treadle bench-core`: what the core itself costs, without any model.

Requests are served by the simulated executor, on its virtual clock, with the default strategies; what is measured is real time,
less the time spent inside the executor.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Generator, Mapping, Sequence

import click

from treadle import Engine, Executor, SamplingParams, hookimpl, load
from treadle.contracts import Clock, ModelInfo, PoolSize, PoolSpec
from treadle.plan import Outcome, StepPlan
from treadle.text import Tokenizer


class Watched:
    """An executor with a watch on it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.spent_s = 0.0

    @property
    def model(self) -> ModelInfo:
        """That of the executor, like all that follows."""
        return self._executor.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """See above."""
        return self._executor.tokenizer

    @property
    def clock(self) -> Clock:
        """See above."""
        return self._executor.clock

    def open_pool(self, spec: PoolSpec) -> PoolSize:
        """See above."""
        return self._executor.open_pool(spec)

    @property
    def overlaps(self) -> bool:
        """See above."""
        return self._executor.overlaps

    def launch(self, plan: StepPlan) -> None:
        """Launch, and add up the time."""
        begin = time.perf_counter()
        self._executor.launch(plan)
        self.spent_s += time.perf_counter() - begin

    def collect(self) -> Outcome:
        """Collect, and add up the time."""
        begin = time.perf_counter()
        outcome = self._executor.collect()
        self.spent_s += time.perf_counter() - begin
        return outcome

    def describe(self) -> dict[str, str]:
        """See above."""
        return self._executor.describe()

    def memory(self) -> Mapping[str, int]:
        """See above."""
        return self._executor.memory()

    def close(self) -> None:
        """See above."""
        self._executor.close()


class Watch:
    """A plugin that puts a watch on the executor, whichever it is."""

    executor: Watched

    @hookimpl(wrapper=True)
    def execute(self) -> Generator[None, Executor, Executor]:
        """Wrap the answer."""
        self.executor = Watched((yield))
        return self.executor


def make_engine(batch: int, num_blocks: int, overrides: Sequence[str]) -> tuple[Engine, Watched]:
    """The default strategies around a watched executor."""
    watch = Watch()
    values = {
        "execute": "simulated",
        "pool": {"num_blocks": num_blocks},
        "admit": {"max_batch_size": batch},
        "accept": {"max_waiting": 10_000_000},
    }
    engine = Engine(load(environment=False, values=values, overrides=overrides), [watch])
    return engine, watch.executor


def decode_step_ms(batch: int, waiting: int, steps: int, overrides: Sequence[str] = ()) -> list[float]:
    """Milliseconds of the core in each of `steps` steps: `batch` requests in decode, `waiting` others in the queue."""
    engine, executor = make_engine(batch, 40 * batch, overrides)
    with engine:
        for _ in range(batch + waiting):
            engine.submit([1] * 32, SamplingParams(max_tokens=16 + steps * 2))
        while engine.queues.load.num_running < batch or any(r.num_output < 4 for r in engine.queues.running):
            engine.step()
        taken = []
        for _ in range(steps):
            spent, begin = executor.spent_s, time.perf_counter()
            engine.step()
            taken.append((time.perf_counter() - begin - (executor.spent_s - spent)) * 1e3)
    return taken


def serve_many(num_requests: int, batch: int, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Serve requests of W1's lengths (prompt 32 to 256, output 16 to 256 tokens), all queued at once."""
    lengths = random.Random(20261130)  # noqa: S311  # lengths, not secrets
    engine, executor = make_engine(batch, 8 * batch, overrides)
    with engine:
        begin = time.perf_counter()
        for place in range(num_requests):
            prompt = [place % 40_000 + 1] * lengths.randint(32, 256)
            engine.submit(prompt, SamplingParams(max_tokens=lengths.randint(16, 256)))
        steps = 0
        while engine.busy:
            engine.step()
            steps += 1
        seconds = time.perf_counter() - begin
        engine.check_integrity()
        return {
            "requests": num_requests,
            "steps": steps,
            "seconds": seconds,
            "executor_seconds": executor.spent_s,
            "core_ms_per_step": (seconds - executor.spent_s) / steps * 1e3,
            "virtual_seconds": engine.clock.now(),
        }


@click.command("bench-core")
@click.option("--batch", default=256, show_default=True, help="Requests that run together.")
@click.option("--steps", default=200, show_default=True, help="Steps to time.")
@click.option("--waiting", default=(100, 100_000), show_default=True, multiple=True, help="Lengths of the queue to compare.")
@click.option("--requests", default=100_000, show_default=True, help="Requests to serve in all; 0 for none.")
@click.option("--set", "overrides", multiple=True, metavar="NAME=VALUE", help="A setting, such as prefix.strategy=radix.")
def bench_core(batch: int, steps: int, waiting: tuple[int, ...], requests: int, overrides: tuple[str, ...]) -> None:
    """Measure the core's own cost with the simulated executor."""
    taken = decode_step_ms(batch, 0, steps, overrides)
    click.echo(f"decode, batch {batch}: median {statistics.median(taken):.3f} ms, least {min(taken):.3f} ms a step")
    medians = {}
    for queue in waiting:
        taken = decode_step_ms(batch, queue, steps, overrides)
        medians[queue] = statistics.median(taken)
        click.echo(f"decode, batch {batch}, {queue} waiting: median {medians[queue]:.3f} ms a step")
    if len(medians) > 1:
        click.echo(f"ratio of the longest queue to the shortest: {medians[max(medians)] / medians[min(medians)]:.2f}")
    if requests:
        result = serve_many(requests, batch, overrides)
        click.echo(", ".join(f"{name} {value:,.3f}".rstrip("0").rstrip(".") for name, value in result.items()))
