"""Random requests, cancellations, failures and strategies on tiny pools: the books always balance, every token is right.

The default run takes some seconds; `pytest tests/core/test_state_machine.py --hypothesis-profile=soak` searches for hours.
"""

# ruff: noqa: S311  # random numbers have to be repeatable here, not secret

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from treadle import FinishReason, Handle, SamplingParams
from treadle.engine import Engine
from treadle.errors import ConfigError, ExecutionError, InvalidRequest, Refused
from treadle.registry import Registry
from treadle.testing import FakeExecutor, drain_checked, make_engine
from treadle.testing.combinations import SLOTS
from treadle.testing.faults import RandomDrafts, RandomSkips, RandomVictims, UnsteadyExecutor
from treadle.testing.traffic import right_tokens

BLOCK = 16
VOCAB = 60
REGISTRY = Registry.installed()
PREFIXES = [tuple(random.Random(seed).randrange(VOCAB) for _ in range(12 * BLOCK)) for seed in range(3)]


def small(most: int) -> st.SearchStrategy[int]:
    return st.integers(1, most)


VICTIM: dict[str, st.SearchStrategy[Any]] = {
    "victim": st.sampled_from(["last_admitted", "lowest_priority", "fewest_tokens_lost", "most_blocks_freed"]),
    "partial": st.booleans(),
}
SETTINGS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "accept.queue_limit": {
        "max_waiting": st.sampled_from([2, 500]),
        "trim_above": st.sampled_from([None, 1]),
        "trim_to_tokens": st.sampled_from([5, 20]),
    },
    "order.priority": {"level_s": st.sampled_from([0.005, 10.0]), "preempt": st.sampled_from([True, True, False])},
    "order.shortest_first": {"token_s": st.sampled_from([0.0, 0.001])},
    "admit.continuous": {
        "max_batch_size": small(6),
        "max_inserts": st.none() | small(2),
        "every_steps": small(3),
        "near_end_tokens": st.integers(0, 3),
        "spare_blocks": st.integers(0, 2),
    },
    "admit.windowed": {"max_batch_size": small(5), "window_ms": st.sampled_from([0.5, 5.0]), "min_batch": small(4)},
    "admit.static": {"batch_size": small(4), "max_wait_ms": st.sampled_from([0.0, 4.0])},
    "budget.decode_first": {
        "max_tokens": st.sampled_from([1, 3, 16, 40, 2048]),
        "max_prefill_tokens": st.none() | small(20),
        "max_decode_tokens": st.none() | small(3),
    },
    "budget.whole_prompt": {"max_tokens": st.sampled_from([1, 20, 4096])},
    "budget.adaptive": {
        "tpot_ms": st.sampled_from([0.5, 50.0]),
        "max_prefill_tokens": st.sampled_from([16, 40]),
        "min_prefill_tokens": small(16),
        "max_batch_size": small(6),
    },
    "order.length_bucket": {"limits": st.just([16, 32]), "min_batch": small(3), "wait_ms": st.sampled_from([0.0, 3.0])},
    "order.prefix_affinity": {"prefix_tokens": st.sampled_from([1, 16]), "max_delay_s": st.sampled_from([0.01, 5.0])},
    "order.deadline": {"bulk_target_ms": st.sampled_from([10.0, 1000.0]), "max_bulk_running": st.none() | small(2)},
    "allocate.coalescing": {"run_blocks": small(4)},
    "allocate.contiguous": {"reserve": st.sampled_from(["max_tokens", "model_length"])},
    "preempt.recompute": VICTIM,
    "preempt.swap": VICTIM,
    "preempt.auto": {**VICTIM, "copy_us": st.sampled_from([1.0, 200.0, 1e6])},
}
"""Settings to draw from; strategies that are not named here are used as they come."""
FAVOURED = {"order": ["priority", "priority"], "preempt": ["swap", "auto"]}
"""Drawn more often, since what they do needs much else to come together."""


@dataclass
class Setup:
    """An engine to be."""

    slots: dict[str, Any]
    num_blocks: int
    num_swap_blocks: int
    plugins: Sequence[str]
    eos: tuple[int, ...]
    seed: int


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    slots: dict[str, Any] = {}
    for slot in SLOTS:
        name = draw(st.sampled_from([*REGISTRY.names(slot), *FAVOURED.get(slot, ())]), label=slot)
        table = draw(st.fixed_dictionaries(SETTINGS.get(f"{slot}.{name}", {})), label=f"{slot}.{name}")
        slots[slot] = {"strategy": name, **table}
    return Setup(
        slots,
        num_blocks=draw(st.sampled_from([2, 3, 4, 4, 5, 6, 8, 12]), label="num_blocks"),
        num_swap_blocks=draw(st.sampled_from([0, 2, 8]), label="num_swap_blocks"),
        plugins=draw(st.lists(st.sampled_from(sorted(PLUGINS)), unique=True, max_size=3), label="plugins"),
        eos=draw(st.sampled_from([(), (7,)]), label="eos"),
        seed=draw(st.integers(0, 3), label="seed"),
    )


PLUGINS: dict[str, Callable[[Setup, FakeExecutor], object]] = {
    "victims": lambda setup, executor: RandomVictims(setup.seed, may_swap=setup.num_swap_blocks > 0),
    "drafts": lambda setup, executor: RandomDrafts(setup.seed, executor),
    "skips": lambda setup, executor: RandomSkips(setup.seed),
}
"""Plugins in front of the strategies."""


@dataclass
class Fate:
    """What may become of a request."""

    handle: Handle
    oversized: bool = False
    may_fail: bool = False
    cancelled: bool = False
    expected: tuple[int, tuple[int, ...]] | None = None
    """What it must generate, for a prompt of this length: it may be trimmed."""
    ended: bool = False
    """Checked after its end, which is once more when all have ended."""


class EngineMachine(RuleBasedStateMachine):
    """The engine under a random life."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.fates: list[Fate] = []

    # --- life ---------------------------------------------------------------------------------------------------------------

    @initialize(setup=setups())
    def build(self, setup: Setup) -> None:
        self.setup = setup
        self.executor = UnsteadyExecutor(
            vocab_size=VOCAB, max_length=300, eos_token_ids=setup.eos, num_swap_blocks=setup.num_swap_blocks
        )
        ways_out = self._ways_out(setup)
        for slot, name in ways_out.items():
            with pytest.raises(ConfigError, match=f"'{name}'"):
                self._make(setup)
            setup.slots[slot] = {"strategy": name}
        self.engine = self._make(setup)

    def _ways_out(self, setup: Setup) -> dict[str, str]:
        """Strategies that have to be replaced before the engine starts, in the order in which it complains."""
        names = {slot: table["strategy"] for slot, table in setup.slots.items()}
        ways_out = {}
        if names["allocate"] == "contiguous" and names["prefix"] != "none":
            ways_out["prefix"] = "none"
        if names["preempt"] == "swap" and not setup.num_swap_blocks:
            ways_out["preempt"] = "recompute"
        return ways_out

    def _make(self, setup: Setup) -> Engine:
        plugins = [PLUGINS[name](setup, self.executor) for name in setup.plugins]
        return make_engine(*plugins, executor=self.executor, num_blocks=setup.num_blocks, registry=REGISTRY, **setup.slots)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.run_to_the_end()
            self.engine.close()
            assert self.executor.closed

    # --- what callers do ------------------------------------------------------------------------------------------------------

    @rule(
        prefix=st.integers(0, 2),
        num_shared=st.sampled_from([0, 0, 1, 15, 16, 17, 31, 32, 33, 48]),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=40),
        params=st.builds(
            dict,
            max_tokens=st.sampled_from([1, 2, 16, 17, 40, None]),
            min_tokens=st.sampled_from([0, 0, 1]),
            temperature=st.sampled_from([0.0, 0.7]),
            seed=st.none() | small(3),
            stop_token_ids=st.sampled_from([(), (3,), (3, 5)]),
            ignore_eos=st.booleans(),
            prompt_logprobs=st.sampled_from([None, None, None, 1]),
        ),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        timeout_s=st.sampled_from([None, None, None, 0.004, 0.05]),
        cache_salt=st.sampled_from([None, None, "salt"]),
        labels=st.sampled_from([{}, {"lane": "interactive"}, {"ttft_ms": "2"}]),
        reuse=st.sampled_from([True, True, True, False]),
        pin_s=st.sampled_from([None, None, None, 0.02]),
    )
    def submit(self, prefix: int, num_shared: int, tail: list[int], params: dict[str, Any], n: int, **options: Any) -> None:
        """Fits the pool, more or less."""
        prompt = (*PREFIXES[prefix][:num_shared], *tail) or (1,)
        prompt = prompt[: self._num_places() - (params["max_tokens"] or 1) + 1] or (1,)
        if not options["reuse"]:
            options["pin_s"] = None
        handles = self.engine.submit_group(prompt, SamplingParams(**params), n, **options)
        limit = min(self._num_places() + 1, 300)
        oversized = len(prompt) + (params["max_tokens"] or 1) > limit
        self.fates += [Fate(handle, oversized) for handle in handles]

    @rule(
        num_requests=st.integers(2, 4),
        num_steps=st.sampled_from([1, 2, 12]),
        priorities=st.sampled_from([(0, 0, 0, 0), (0, 1, 2, 2), (0, 2, 0, 2), (1, 0, 2, 1)]),
        failing=st.booleans(),
        cache_salt=st.sampled_from([None, None, "salt"]),
        pin_s=st.sampled_from([None, 0.02]),
    )
    def crowd(self, num_requests: int, num_steps: int, priorities: Sequence[int], failing: bool, **options: Any) -> None:
        """Requests that do not fit together, one after the other: somebody gives way, often to a more urgent one."""
        blocks = max(1, self.setup.num_blocks // 2)
        params = {"max_tokens": BLOCK * (blocks - blocks // 2) + 5}
        for number in range(num_requests):
            prefix, tail = number % len(PREFIXES), [number] * (BLOCK // 2)
            num_shared = BLOCK * (blocks // 2)
            self.submit(prefix, num_shared, tail, params, 1, priority=priorities[number], reuse=True, **options)
            self.executor.fail_next = self.executor.fail_next or failing
            self.step_on(num_steps)

    @rule(extra=st.integers(0, 40), max_tokens=small(20))
    def submit_too_large(self, extra: int, max_tokens: int) -> None:
        """Refused in the next step, whatever else is going on, and not in the way of others."""
        prompt = PREFIXES[0][:1] * (self._num_places() + 2 - max_tokens + extra)
        if not prompt:
            return
        handle = self.engine.submit(prompt, SamplingParams(max_tokens=max_tokens))
        self.fates.append(Fate(handle, oversized=True))
        self.step()
        trimmed = handle.request.was_trimmed
        assert handle.finished or trimmed, "a request larger than the pool is refused at once"
        assert trimmed or handle.completion().finish_reason is FinishReason.REFUSED

    @precondition(lambda self: self.fates)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        fate = data.draw(st.sampled_from(self.fates[-6:]), label="whom")
        fate.cancelled = True
        fate.handle.cancel()

    # --- what happens ----------------------------------------------------------------------------------------------------------

    @rule(num_steps=st.sampled_from([1, 1, 1, 5, 20]))
    def step_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    @rule(seconds=st.sampled_from([0.0001, 0.005, 0.1]))
    def let_time_pass(self, seconds: float) -> None:
        self.engine.clock.wait(self.engine.clock.now() + seconds)

    @precondition(lambda self: self.fates)
    @rule(data=st.data(), reported=st.booleans())
    def make_fail(self, data: st.DataObject, reported: bool) -> None:
        """A request whose computation fails from now on, alone or with the whole pass."""
        fate = data.draw(st.sampled_from(self.fates[-6:]), label="whom")
        fate.may_fail = True
        (self.executor.report_on if reported else self.executor.fail_on).add(fate.handle.id)

    @rule()
    def make_fail_once(self) -> None:
        """The next pass of several requests fails: nobody may suffer."""
        self.executor.fail_next = True

    @rule()
    def run_to_the_end(self) -> None:
        """No more than so many steps until all is done, and then nothing is left in the pool."""
        live = [fate.handle.request for fate in self.fates if not fate.handle.finished]
        most = 200 + 60 * sum(min(r.prompt_length + (r.params.max_tokens or 300), self._num_places()) for r in live)
        drain_checked(self.engine, most, self.step)
        for fate in self.fates:
            assert fate.handle.finished
            self._check(fate)
        self.fates.clear()

    # --- proof ------------------------------------------------------------------------------------------------------------------

    def step(self) -> float | None:
        until_s = self.engine.step()
        self.engine.check_integrity()
        for fate in self.fates:
            if not fate.ended:
                self._check(fate)
        return until_s

    def _num_places(self) -> int:
        return self.setup.num_blocks * BLOCK

    def _check(self, fate: Fate) -> None:
        """The tokens so far are right, and who ended had a reason."""
        request = fate.handle.request
        expected = self._expected(fate)
        tokens = request.token_ids(request.prompt_length)
        assert tokens == expected[: len(tokens)], f"{request}: {tokens} is not the start of {expected}"
        if not fate.handle.finished:
            return
        fate.ended = True
        done = fate.handle.completion()
        reason = done.finish_reason
        if reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert done.error is None
            assert tokens == expected, f"{request} ended too early"
        elif reason is FinishReason.CANCELLED:
            assert fate.cancelled, request
        elif reason is FinishReason.TIMEOUT:
            assert request.expires_s is not None, request
            assert request.expires_s <= self.engine.clock.now(), request
        elif reason is FinishReason.REFUSED:
            assert str(done.error), request
            assert isinstance(done.error, Refused) or fate.oversized, f"{request}: {done.error}"
            assert isinstance(done.error, (Refused, InvalidRequest)), done.error
        else:
            assert fate.may_fail, f"{request} failed: {done.error!r}"
            assert isinstance(done.error, ExecutionError), done.error

    def _expected(self, fate: Fate) -> tuple[int, ...]:
        request = fate.handle.request
        if fate.expected is None or fate.expected[0] != request.prompt_length:
            fate.expected = request.prompt_length, right_tokens(fate.handle, self.executor.model, self._num_places())
        return fate.expected[1]


EngineMachine.TestCase.settings = settings(max_examples=2 * settings().max_examples)
TestEngine = EngineMachine.TestCase
