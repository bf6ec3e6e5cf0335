"""A waiting request is matched before it is judged, takes nothing until it starts, and nobody gives way to one that does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from treadle import Admission, Match, NotBefore, Open, Phase, Preemption, Request, SamplingParams, Step, hookimpl
from treadle.testing import FakeExecutor, drain_checked

BLOCK = 16
BUDGETS = ["decode_first", {"strategy": "decode_first", "max_prefill_tokens": 9}, "whole_prompt", "adaptive"]
COMMON = list(range(1, 6 * BLOCK + 1))


class Watch:
    """Counts what is told, and who runs."""

    name = "watch"

    def __init__(self) -> None:
        self.most_running = 0
        self.told: Counter[str] = Counter()
        self.in_vain: list[int] = []
        self._gave_way: list[Request] = []
        self._started: list[Request] = []

    @hookimpl
    def blocks_reused(self) -> None:
        self.told["reused"] += 1

    @hookimpl
    def prefix_matched(self) -> None:
        self.told["matched"] += 1

    @hookimpl
    def blocks_released(self) -> None:
        self.told["released"] += 1

    @hookimpl(wrapper=True)
    def preempt(self, request: Request) -> Any:
        answer = yield
        if answer is not None and request.is_waiting:
            self._gave_way.append(answer.victim)
        return answer

    @hookimpl
    def request_preempted(self) -> None:
        self.told["preempted"] += 1

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        self._started.append(request)

    @hookimpl
    def request_resumed(self, request: Request) -> None:
        self._started.append(request)

    @hookimpl
    def step_committed(self, step: Step) -> None:
        self.most_running = max(self.most_running, step.num_running)
        victims = [victim for victim in self._gave_way if victim.is_waiting]
        best = max((request.priority for request in self._started), default=-1)
        if any(victim.priority >= best for victim in victims):
            self.in_vain.append(step.number)
        self._gave_way, self._started = [], []


class TenantLimit:
    """The README's example: at most `most` requests of a tenant run together."""

    name = "tenant_limit"

    def __init__(self, most: int) -> None:
        self.most = most

    @hookimpl
    def admit(self, step: Step, request: Request) -> Admission | None:
        tenant = request.labels.get("tenant")
        running = sum(other.labels.get("tenant") == tenant for other in step.running)
        return Admission.SKIP if running >= self.most else None


def test_five_that_share_six_of_twelve_blocks_run_together(build: Any, assert_right: Any) -> None:
    watch = Watch()
    engine = build(watch, num_blocks=12)
    handles = [engine.submit([*COMMON, 200 + n], SamplingParams(max_tokens=8)) for n in range(5)]
    engine.step()
    assert engine.queues.load.num_running == 5
    drain_checked(engine)
    assert_right(handles)
    assert watch.told["preempted"] == 0


def test_cached_blocks_that_are_matched_count_once(build: Any, assert_right: Any) -> None:
    """They are not free for the rest of the prompt, and they are not evicted for it either."""
    engine = build(num_blocks=9)
    first = engine.submit(COMMON, SamplingParams(max_tokens=1))
    drain_checked(engine)
    running = engine.submit([300] * 30, SamplingParams(max_tokens=3))
    engine.step()
    second = engine.submit([*COMMON, *range(400, 400 + 2 * BLOCK)], SamplingParams(max_tokens=1))
    drain_checked(engine)
    done = assert_right([first, running, second])
    assert done[2].num_cached_tokens == len(COMMON)


def test_a_request_that_does_not_fit_takes_nothing_in_any_step(build: Any, assert_right: Any) -> None:
    watch = Watch()
    engine = build(watch, num_blocks=12)
    first = engine.submit(COMMON, SamplingParams(max_tokens=1))
    drain_checked(engine)
    long = engine.submit([7] * (5 * BLOCK), SamplingParams(max_tokens=20))
    engine.step()
    waiting = engine.submit([*COMMON, *[9] * BLOCK * 2], SamplingParams(max_tokens=2))
    before = Counter(watch.told)
    for _ in range(15):
        engine.step()
        assert waiting.request.is_waiting
    assert (watch.told["reused"], watch.told["matched"], watch.told["released"]) == (
        before["reused"], before["matched"], before["released"],
    )  # fmt: skip
    drain_checked(engine)
    assert_right([first, long, waiting])


def test_admit_is_told_what_would_be_reused(build: Any) -> None:
    seen: list[Match] = []

    class Looks:
        @hookimpl
        def admit(self, match: Match) -> None:
            seen.append(match)

    engine = build(Looks())
    for _ in range(2):
        engine.submit([*COMMON, 5], SamplingParams(max_tokens=1))
        drain_checked(engine)
    assert [(match.num_tokens, match.num_blocks_needed) for match in seen] == [(0, 7), (len(COMMON), 7)]


# --- urgent requests ------------------------------------------------------------------------------------------------------------


def _urgent(build: Any, *plugins: object, **options: Any) -> tuple[Any, Watch]:
    watch = Watch()
    return build(watch, *plugins, order="priority", **options), watch


def test_an_urgent_request_whose_prompt_is_cached_takes_nobodys_blocks(build: Any, assert_right: Any) -> None:
    engine, watch = _urgent(build, num_blocks=12)
    first = engine.submit(COMMON, SamplingParams(max_tokens=1))
    drain_checked(engine)
    low = [engine.submit([50 + n] * 20, SamplingParams(max_tokens=10)) for n in range(2)]
    engine.step()
    urgent = engine.submit([*COMMON, 5], SamplingParams(max_tokens=4), priority=5)
    engine.step()
    assert urgent.request.admitted_s is not None
    drain_checked(engine)
    assert_right([first, *low, urgent])
    assert watch.told["preempted"] == 0


def test_no_work_is_thrown_away_for_a_tenant_at_its_limit(build: Any, assert_right: Any) -> None:
    admit = {"strategy": "continuous", "max_batch_size": 3}
    engine, watch = _urgent(build, TenantLimit(1), admit=admit)
    handles = [engine.submit([1] * 20, SamplingParams(max_tokens=100), priority=9, labels={"tenant": "a"})]
    handles += [engine.submit([2 + n] * 20, SamplingParams(max_tokens=100), labels={"tenant": f"b{n}"}) for n in range(2)]
    engine.step()
    handles.append(engine.submit([5] * 20, SamplingParams(max_tokens=10), priority=9, labels={"tenant": "a"}))
    drain_checked(engine)
    assert_right(handles)
    assert watch.told["preempted"] <= 1
    assert not watch.in_vain


@pytest.mark.parametrize(
    "admit",
    [
        {"strategy": "continuous", "max_batch_size": 3},
        {"strategy": "continuous", "max_batch_size": 3, "every_steps": 4},
        {"strategy": "continuous", "max_batch_size": 3, "max_inserts": 1, "spare_blocks": 2},
        {"strategy": "windowed", "max_batch_size": 3, "window_ms": 7, "min_batch": 2},
        {"strategy": "static", "batch_size": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("preempt", ["recompute", "swap", "none"])
@pytest.mark.parametrize(
    "budget", ["decode_first", {"strategy": "decode_first", "max_prefill_tokens": 9}, "whole_prompt", "adaptive"]
)
def test_whoever_gives_way_gives_way_to_one_that_starts(
    admit: Any, preempt: str, budget: Any, build: Any, assert_right: Any
) -> None:
    executor = FakeExecutor(num_swap_blocks=8)
    engine, watch = _urgent(build, TenantLimit(2), admit=admit, preempt=preempt, budget=budget, num_blocks=14, executor=executor)
    handles = []
    for number in range(24):
        length = 10 + 13 * number % 70
        params = SamplingParams(max_tokens=6 + 5 * number % 23)
        prompt = COMMON[:length] if number % 3 else [number] * length
        labels = {"tenant": f"t{number % 2}"}
        handles.append(engine.submit(prompt, params, priority=7 * number % 4, labels=labels))
        engine.step()
        engine.check_integrity()
    drain_checked(engine, 5000)
    assert_right(handles)
    assert not watch.in_vain, f"in steps {watch.in_vain} somebody gave way, and nobody more urgent started"


class OneVictim:
    """A preempt rule that finds a victim once, and then no more."""

    name = "one_victim"

    def __init__(self) -> None:
        self.num_asked = 0

    @hookimpl(tryfirst=True)
    def preempt(self, step: Step, request: Request) -> Preemption | None:
        self.num_asked += 1
        return Preemption(next(step.victims())) if request.is_waiting and self.num_asked % 2 else None


def test_victims_give_way_together_or_not_at_all(build: Any, assert_right: Any) -> None:
    engine, watch = _urgent(build, OneVictim(), preempt="none", num_blocks=12, prefix="none")
    low = [engine.submit([n] * 40, SamplingParams(max_tokens=5)) for n in range(4)]
    engine.step()
    urgent = engine.submit([9] * 90, SamplingParams(max_tokens=3), priority=5)
    engine.step()
    assert watch.told["preempted"] == 0, "one victim is not enough, so nobody gives way"
    drain_checked(engine)
    assert_right([*low, urgent])


def test_no_drafts_are_asked_for_who_started_in_the_place_of_others(build: Any, assert_right: Any) -> None:
    planned: list[Request] = []

    class Proposes:
        @hookimpl
        def propose(self, step: Step, requests: Sequence[Request]) -> None:
            planned.extend(request for request in requests if request.planned_in(step.number))

    engine, watch = _urgent(build, Proposes(), admit={"strategy": "continuous", "max_batch_size": 2})
    low = [engine.submit([n], SamplingParams(max_tokens=9)) for n in range(2)]
    engine.step()
    urgent = engine.submit([5], SamplingParams(max_tokens=3), priority=5)
    drain_checked(engine)
    assert watch.told["preempted"]
    assert not planned
    assert_right([*low, urgent])


class Gate:
    """A gate that opens once and then says for how long it is closed."""

    def __init__(self) -> None:
        self.answers: list[Open | NotBefore] = []

    @hookimpl(wrapper=True)
    def gate(self) -> Any:
        answer = yield
        self.answers.append(answer)
        return answer


def test_the_gate_is_asked_once_a_step_unless_somebody_gave_up_a_place(build: Any) -> None:
    gate = Gate()
    engine, _ = _urgent(build, gate, admit={"strategy": "windowed", "max_batch_size": 4, "window_ms": 1, "min_batch": 1})
    low = engine.submit([1] * 5, SamplingParams(max_tokens=90))
    for _ in range(4):
        engine.step()
    asked = len(gate.answers)
    both: Sequence[Any] = [engine.submit([n] * 5, SamplingParams(max_tokens=5), priority=n) for n in (2, 3)]
    for _ in range(4):
        engine.step()
        if both[0].request.admitted_s is not None:
            break
    assert both[0].request.admitted_s == both[1].request.admitted_s, "an urgent request does not close the gate for the other"
    assert len(gate.answers) - asked <= 4
    low.cancel()
    drain_checked(engine)


def test_who_comes_back_from_swap_space_is_not_told_to_match_nothing(build: Any, assert_right: Any) -> None:
    """A rate of hits would suffer by it: nothing was looked for."""
    watch = Watch()
    engine = build(watch, num_blocks=7, preempt="swap", executor=FakeExecutor(num_swap_blocks=8))
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=40)) for n in range(3)]
    drain_checked(engine)
    done = assert_right(handles)
    assert watch.told["preempted"]
    assert all(completion.num_recomputed_tokens == 0 for completion in done), "all of them were swapped"
    assert watch.told["matched"] == len(handles)


# --- what is matched and then lost ----------------------------------------------------------------------------------------------


class Chunks:
    """Chunks by name; `b` gives way by one block, and then waits as long as `c` runs."""

    name = "chunks"
    may_shrink = True

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    @hookimpl
    def budget(self) -> Chunks:
        return self

    def take(self, request: Request, wanted: int) -> int:
        return min(wanted, self.sizes.get(request.id, wanted))

    @hookimpl
    def preempt(self, step: Step) -> Preemption | None:
        return next((Preemption(victim, num_blocks=1) for victim in step.victims() if victim.id == "b"), None)

    @hookimpl
    def admit(self, step: Step, request: Request) -> Admission:
        held_back = request.num_preempted and any(other.id == "c" for other in step.running)
        return Admission.SKIP if held_back else Admission.START


def test_a_match_may_go_with_a_block_that_the_request_has_a_copy_of(build: Any, assert_right: Any) -> None:
    """`b` computed its first block beside an equal one of `a`, on which the match rests, and which nobody protects."""
    chunks = Chunks()
    engine = build(chunks, Watch(), num_blocks=7, prefix="hash_chain", evict="lru")
    prompt = list(range(1, 100))
    c = engine.submit(range(100, 128), SamplingParams(max_tokens=9), request_id="c")
    engine.step()
    chunks.sizes = {"a": 1, "b": 12}
    a = engine.submit(prompt[:48], SamplingParams(max_tokens=1), request_id="a", pin_s=0.0045)
    b = engine.submit(prompt, SamplingParams(max_tokens=2), request_id="b")
    engine.step()
    del chunks.sizes["a"]
    engine.step()
    assert a.finished
    chunks.sizes["b"] = 1
    while b.request.phase is not Phase.PREEMPTED:
        engine.step()
    assert b.request.num_computed == BLOCK
    chunks.sizes.clear()
    drain_checked(engine)
    assert_right([a, b, c])
