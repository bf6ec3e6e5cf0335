"""Tight pools with shared prefixes: who runs together, who waits, and what is thrown away. Public names only, no model.

    python tests/tight_pools.py [--seed 0] > table.md

Prints a Markdown table, the same on every tree for the same seed as long as the policies are the same, so that two trees can be
compared line by line. Every token is checked, and the books are proved after each step.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from treadle import Admission, Preemption, Request, SamplingParams, Step, StepReport, hookimpl
from treadle.testing import FakeExecutor, make_engine
from treadle.testing.traffic import Arrival, assert_right, serve

BLOCK = 16
STEP_S = 0.001
HEADINGS = (
    "scenario",
    "steps to finish",
    "most running together",
    "mean running",
    "mean steps waited",
    "preemptions",
    "urgent preemptions",
    "of them for one that did not start in that step",
    "recomputed tokens",
    "`blocks_reused` tells",
)


class TenantLimit:
    """The README's rule: at most `most` requests of a tenant run together."""

    def __init__(self, most: int) -> None:
        self.most = most

    @hookimpl
    def admit(self, step: Step, request: Request) -> Admission | None:
        tenant = request.labels.get("tenant")
        running = sum(other.labels.get("tenant") == tenant for other in step.running)
        return Admission.SKIP if running >= self.most else None


class Watch:
    """What a run came to."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self.num_waited = 0
        self.num_preempted = 0
        self.num_urgent = 0
        self.num_in_vain = 0
        self.num_reused_tells = 0
        self._asked_by: Request | None = None
        self._victims: list[Request] = []
        """Who preempted in this step, once for each victim."""

    @hookimpl(wrapper=True)
    def preempt(self, request: Request) -> Generator[None, Preemption | None, Preemption | None]:
        answer = yield
        self._asked_by = request if answer is not None and request.is_waiting else None
        return answer

    @hookimpl
    def request_preempted(self) -> None:
        self.num_preempted += 1
        if self._asked_by is not None:
            self._victims.append(self._asked_by)
            self._asked_by = None

    @hookimpl
    def blocks_reused(self) -> None:
        self.num_reused_tells += 1

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        self.running.append(report.num_running + sum(request.batch is not None for request in report.finished))
        self.num_waited += report.num_waiting

    @hookimpl
    def step_committed(self, step: Step) -> None:
        self.num_urgent += len(self._victims)
        self.num_in_vain += sum(request.batch != step.number for request in self._victims)
        self._victims.clear()


@dataclass(frozen=True)
class Scenario:
    """A pool, its traffic and its strategies."""

    name: str
    num_blocks: int
    arrivals: Sequence[Arrival]
    slots: Mapping[str, Any] = field(default_factory=dict)
    tenant_limit: int | None = None


def row(scenario: Scenario) -> list[str]:
    """The scenario's line of the table."""
    watch = Watch()
    plugins: list[object] = [watch]
    if scenario.tenant_limit is not None:
        plugins.append(TenantLimit(scenario.tenant_limit))
    executor = FakeExecutor(step_s=STEP_S, num_swap_blocks=8)
    with make_engine(*plugins, executor=executor, num_blocks=scenario.num_blocks, **scenario.slots) as engine:
        done = assert_right(engine, serve(engine, scenario.arrivals))
    steps = len(watch.running)
    figures = (
        steps,
        max(watch.running),
        f"{sum(watch.running) / steps:.2f}",
        f"{watch.num_waited / len(done):.1f}",
        watch.num_preempted,
        watch.num_urgent,
        watch.num_in_vain,
        sum(completion.num_recomputed_tokens for completion in done),
        watch.num_reused_tells,
    )
    return [scenario.name, *map(str, figures)]


def five_that_share_six(*, spaced: bool = False, urgent: bool = False) -> list[Arrival]:
    """Five requests of seven blocks, six of them in common: together they need eleven. The last one may be urgent."""
    common = tuple(range(6 * BLOCK))
    return [
        Arrival(
            5 * STEP_S * number if spaced else 0.0,
            (*common, 500 + number, 600 + number),
            SamplingParams(max_tokens=12),
            {"priority": 9 if urgent and number == 4 else 0},
        )
        for number in range(5)
    ]


def urgent_at_its_limit() -> list[Arrival]:
    """Tenants a and b fill two places for 100 tokens, and an urgent request of a, which is at its limit, waits for one."""
    wanted = (("a", 0), ("b", 0), ("a", 9))
    params = SamplingParams(max_tokens=100)
    return [
        Arrival(5 * STEP_S * number, (number,) * BLOCK, params, {"priority": priority, "labels": {"tenant": tenant}})
        for number, (tenant, priority) in enumerate(wanted)
    ]


def traffic(num_prefixes: int, num_blocks: int, seed: int, *, num_priorities: int = 1) -> list[Arrival]:
    """Requests that begin with one of a few prefixes, of up to three quarters of the pool, and arrive faster than they end."""
    rng = random.Random(f"{num_prefixes} {num_blocks} {seed}")  # noqa: S311  # has to be repeatable
    depth = max(2, min(6, num_blocks // 2))
    prefixes = [tuple(rng.randrange(900) for _ in range(depth * BLOCK)) for _ in range(num_prefixes)]
    arrivals, at_s = [], 0.0
    for number in range(30):
        at_s += rng.choice([0.0, 2 * STEP_S, 6 * STEP_S])
        tail = tuple(rng.randrange(900) for _ in range(rng.randint(1, BLOCK)))
        params = SamplingParams(max_tokens=rng.randint(4, 20))
        options = {"priority": rng.randrange(num_priorities), "labels": {"tenant": "ab"[number % 2]}}
        arrivals.append(Arrival(at_s, rng.choice(prefixes) + tail, params, options))
    return arrivals


def scenarios(seed: int) -> Iterator[Scenario]:
    """All of them."""
    urgent = {"order": {"strategy": "priority", "level_s": 10.0}}
    yield Scenario("12 blocks, five share six, at once", 12, five_that_share_six())
    yield Scenario("12 blocks, five share six, one by one", 12, five_that_share_six(spaced=True))
    yield Scenario("12 blocks, five share six, the last urgent", 12, five_that_share_six(spaced=True, urgent=True), urgent)
    two_places = {**urgent, "admit": {"strategy": "continuous", "max_batch_size": 2}}
    yield Scenario("full places, the urgent one's tenant at its limit of 1", 32, urgent_at_its_limit(), two_places, 1)
    for num_blocks in (8, 12, 16, 24, 32):
        for num_prefixes in (1, 2, 3):
            where = f"{num_blocks} blocks, {num_prefixes} prefix{'es' if num_prefixes > 1 else ''}"
            plain = traffic(num_prefixes, num_blocks, seed)
            yield Scenario(where, num_blocks, plain)
            yield Scenario(f"{where}, at most 2 of a tenant", num_blocks, plain, tenant_limit=2)
            ranked = traffic(num_prefixes, num_blocks, seed, num_priorities=4)
            yield Scenario(f"{where}, urgent preempt", num_blocks, ranked, urgent)
            yield Scenario(f"{where}, urgent preempt, at most 2 of a tenant", num_blocks, ranked, urgent, 2)
    ranked = traffic(2, 32, seed, num_priorities=4)
    places = {"strategy": "continuous", "max_batch_size": 3}
    yield Scenario("32 blocks, urgent preempt, 3 places", 32, ranked, {**urgent, "admit": places})
    yield Scenario("32 blocks, urgent preempt, 3 places, at most 1 of a tenant", 32, ranked, {**urgent, "admit": places}, 1)
    for name, admit in (
        ("every 4 steps", {**places, "every_steps": 4}),
        ("windows of 6 ms", {"strategy": "windowed", "max_batch_size": 3, "window_ms": 6, "min_batch": 1}),
    ):
        yield Scenario(f"32 blocks, urgent preempt, 3 places, {name}", 32, ranked, {**urgent, "admit": admit})
    swap = {**urgent, "preempt": "swap"}
    yield Scenario("12 blocks, 2 prefixes, urgent preempt by swap", 12, traffic(2, 12, seed, num_priorities=4), swap)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="seed of the traffic")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    print(f"| {' | '.join(HEADINGS)} |")
    print("|---" * len(HEADINGS) + "|")
    for scenario in scenarios(options.seed):
        print(f"| {' | '.join(row(scenario))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
