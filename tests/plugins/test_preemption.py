"""Victims, partial preemption, swap and auto."""

from __future__ import annotations

from typing import Any

import pytest

from treadle import Engine, Preemption, PreemptionMode, SamplingParams, hookimpl
from treadle.contracts import StepReport
from treadle.errors import ConfigError
from treadle.testing import FakeExecutor, drain_checked, expected_tokens, make_engine
from treadle_plugins.preempt.auto import Auto, AutoSettings


class Witness:
    """Remembers who gave way, how, and what it kept."""

    def __init__(self) -> None:
        self.victims: list[tuple[str, PreemptionMode, int]] = []

    @hookimpl
    def request_preempted(self, request: Any, mode: PreemptionMode) -> None:
        self.victims.append((request.id, mode, request.num_computed))


def serve(
    witness: Witness, preempt: dict[str, Any], *, step: int = 4, num_swap_blocks: int = 0, num_blocks: int = 7, **slots: Any
) -> Engine:
    """Three requests that outgrow a pool of seven blocks; their tokens are right whatever is done."""
    executor = FakeExecutor(num_swap_blocks=num_swap_blocks)
    engine = make_engine(witness, executor=executor, num_blocks=num_blocks, preempt=preempt, **slots)
    with engine:
        params = SamplingParams(max_tokens=40)
        prompts = [[n] * (12 + step + step * n) for n in range(1, 4)]
        handles = [
            engine.submit(prompt, params, request_id=f"q{n}", priority=priority)
            for n, (prompt, priority) in enumerate(zip(prompts, (1, 0, 2), strict=True))
        ]
        drain_checked(engine)
        for handle, prompt in zip(handles, prompts, strict=True):
            assert handle.result().token_ids == expected_tokens(prompt, params, executor.model)
    assert witness.victims
    return engine


@pytest.mark.parametrize("prefix", ["none", "hash_chain"])
@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("victim", ["last_admitted", "lowest_priority", "fewest_tokens_lost", "most_blocks_freed"])
@pytest.mark.parametrize("step", [4, 8])
@pytest.mark.parametrize(("strategy", "num_swap_blocks"), [("recompute", 0), ("swap", 8), ("swap", 1), ("auto", 0), ("auto", 8)])
def test_tokens_are_right_whoever_gives_way(
    step: int, strategy: str, num_swap_blocks: int, victim: str, partial: bool, prefix: str
) -> None:
    settings = {"strategy": strategy, "victim": victim, "partial": partial}
    serve(Witness(), settings, step=step, num_swap_blocks=num_swap_blocks, prefix=prefix)


def test_the_victim_is_the_one_that_the_rule_names() -> None:
    first = {}
    for victim in ("last_admitted", "lowest_priority", "most_blocks_freed"):
        witness = Witness()
        serve(witness, {"strategy": "recompute", "victim": victim})
        first[victim] = witness.victims[0][0]
    assert first == {"last_admitted": "q2", "lowest_priority": "q1", "most_blocks_freed": "q2"}


def test_a_partial_victim_keeps_its_head() -> None:
    whole, part = Witness(), Witness()
    serve(whole, {"strategy": "recompute"}, prefix="none")
    serve(part, {"strategy": "recompute", "partial": True}, prefix="none")
    assert {kept for _, _, kept in whole.victims} == {0}
    assert any(kept > 0 for _, _, kept in part.victims)


def test_lost_work_is_counted_and_partial_preemption_loses_less() -> None:
    lost = {}
    for partial in (False, True):
        executor = FakeExecutor()
        preempt = {"strategy": "recompute", "partial": partial}
        with make_engine(executor=executor, num_blocks=6, preempt=preempt, prefix="none") as engine:
            handles = [engine.submit([n] * 40, SamplingParams(max_tokens=30)) for n in range(2)]
            drain_checked(engine)
            lost[partial] = sum(handle.result().num_recomputed_tokens for handle in handles)
    assert lost[False] > lost[True] > 0


def test_swapping_computes_nothing_twice() -> None:
    witness = Witness()
    executor = FakeExecutor(num_swap_blocks=8)
    with make_engine(witness, executor=executor, num_blocks=6, preempt="swap", prefix="none") as engine:
        handles = [engine.submit([n] * 40, SamplingParams(max_tokens=30)) for n in range(2)]
        drain_checked(engine)
        assert [handle.result().num_recomputed_tokens for handle in handles] == [0, 0]
        assert engine.kv_cache.swap_space.num_free == 8
    assert {mode for _, mode, _ in witness.victims} == {PreemptionMode.SWAP}
    computed = sum(len(work.tokens) for plan in executor.plans for work in plan.works)
    assert computed == 2 * (40 + 30 - 1)


def test_full_swap_space_falls_back_to_recompute_and_tells_so() -> None:
    witness = Witness()
    serve(witness, {"strategy": "swap"}, num_swap_blocks=1)
    assert PreemptionMode.RECOMPUTE in {mode for _, mode, _ in witness.victims}


def test_swap_without_swap_space_is_refused_at_start_up() -> None:
    with pytest.raises(ConfigError, match=r"pool\.swap_memory=0 \(from "):
        make_engine(preempt="swap")
    with pytest.raises(ConfigError, match=r"pool\.swap_memory holds no block"):
        make_engine(preempt="swap", swap_memory=1)


def test_a_preempted_request_keeps_its_place() -> None:
    order: list[str] = []

    class Starts:
        @hookimpl
        def request_admitted(self, request: Any) -> None:
            order.append(request.id)

        @hookimpl
        def request_resumed(self, request: Any) -> None:
            order.append(request.id)

    with make_engine(Starts(), num_blocks=6, admit={"strategy": "continuous", "max_batch_size": 2}) as engine:
        for n in range(4):
            engine.submit([n] * 40, SamplingParams(max_tokens=30), request_id=f"q{n}")
        drain_checked(engine)
    assert order.index("q1", order.index("q1") + 1) < order.index("q2")


class Measured:
    """Steps as `auto` is told of them."""

    def __init__(self, auto: Auto) -> None:
        self._auto = auto

    def step(self, seconds: float, *, prefill: int = 0, swapped: int = 0, copy_s: float = 0.0) -> None:
        report = StepReport(1, 0.0, seconds, 1, 1 + prefill, prefill, swapped, copy_s, 1, 0, 1, 1, 0)
        self._auto.step_finished(report=report)


@pytest.mark.parametrize(("token_s", "block_s", "expected"), [(1e-2, 1e-4, "swap"), (1e-6, 1e-1, "recompute")])
def test_auto_takes_what_was_measured_as_faster(token_s: float, block_s: float, expected: str) -> None:
    answers: list[Preemption] = []

    class Spy:
        @hookimpl(wrapper=True)
        def preempt(self) -> Any:
            answer = yield
            if answer is not None:
                answers.append(answer)
            return answer

    executor = FakeExecutor(num_swap_blocks=16)
    with make_engine(Spy(), executor=executor, num_blocks=6, preempt="auto", prefix="none") as engine:
        auto = next(item.plugin for item in engine.manager.registered if item.name == "preempt.auto")
        assert isinstance(auto, Auto)
        measured = Measured(auto)
        for _ in range(100):
            measured.step(0.01)
            measured.step(0.01 + 64 * token_s, prefill=64)
            measured.step(0.01 + 2 * block_s, swapped=2, copy_s=2 * block_s)
        for n in range(2):
            engine.submit([n] * 40, SamplingParams(max_tokens=30))
        drain_checked(engine)
    assert {answer.mode.value for answer in answers} == {expected}


def test_auto_without_swap_space_recomputes() -> None:
    witness = Witness()
    serve(witness, {"strategy": "auto", **AutoSettings(prefill_us=1e6, copy_us=1e-3).model_dump(exclude={"victim", "partial"})})
    assert {mode for _, mode, _ in witness.victims} == {PreemptionMode.RECOMPUTE}
