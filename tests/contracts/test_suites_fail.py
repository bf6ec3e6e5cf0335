"""Each suite can fail: something that breaks the contract is caught by the test that is there for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from treadle import Accept, Admission, BlockSettings, EngineInfo, NotBefore, Open, Preemption, Refuse, Request, Step, hookimpl
from treadle.plan import Outcome, StepPlan
from treadle.testing import FakeExecutor
from treadle.testing.suites import (
    SUITES,
    AcceptSuite,
    AdmitSuite,
    AllocateSuite,
    BudgetSuite,
    EvictSuite,
    ExecutorSuite,
    OrderSuite,
    PreemptSuite,
    PrefixSuite,
    ReleaseSuite,
    StrategySuite,
    TokenizerSuite,
)
from treadle.testing.suites.executors import Driver


class NeverAccepts:
    @hookimpl
    def accept(self) -> Refuse:
        return Refuse("not today")


class RefusesBadly:
    """Tells callers to come back before they came."""

    @hookimpl
    def accept(self, request: Request) -> Accept | Refuse:
        return Refuse("busy", -1.0) if request.sequence > 5 else Accept()


class LastComeFirst:
    """Starves whoever came early."""

    def __init__(self) -> None:
        self.waiting: dict[str, Request] = {}

    @hookimpl
    def request_queued(self, request: Request) -> None:
        self.waiting[request.id] = request

    request_preempted = request_queued

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        self.waiting.pop(request.id, None)

    request_resumed = request_admitted
    request_finished = request_admitted

    @hookimpl
    def order(self) -> Iterator[Request]:
        return iter(sorted(self.waiting.values(), key=lambda request: -request.sequence))


class HeadOnly(LastComeFirst):
    """Yields the first in the queue and nobody else."""

    @hookimpl
    def order(self) -> Iterator[Request]:
        return itertools.islice(iter(list(self.waiting.values())), 1)


class SendsToTheBack(LastComeFirst):
    """First come, first served, but whoever was preempted starts again at the end."""

    @hookimpl
    def request_preempted(self, request: Request) -> None:
        self.waiting.pop(request.id, None)
        self.waiting[request.id] = request

    @hookimpl
    def order(self) -> Iterator[Request]:
        return iter(list(self.waiting.values()))


class AlwaysLater:
    """Promises a time, and then another."""

    @hookimpl
    def gate(self, step: Step) -> Open | NotBefore:
        return NotBefore(step.now + 5) if step.number % 50 else Open()


class EvenOnesFirst:
    """Passes over every other request."""

    @hookimpl
    def admit(self, step: Step, request: Request) -> Admission:
        if step.num_running and request.sequence % 2:
            return Admission.SKIP
        return Admission.START


class Overgenerous:
    may_shrink = True

    @hookimpl
    def budget(self) -> Overgenerous:
        return self

    def take(self, request: Request, wanted: int) -> int:
        return wanted + 1


class ATokenNowAndThen:
    """Grants a token in every third step only."""

    may_shrink = True

    @hookimpl
    def budget(self, step: Step) -> ATokenNowAndThen:
        self.open = step.number % 3 == 0
        return self

    def take(self, request: Request, wanted: int) -> int:
        return int(self.open)


class ForgetsNothing:
    """Remembers blocks by their tokens, also when they are gone, and whosever they were."""

    def __init__(self) -> None:
        self.block_of: dict[tuple[int, ...], int] = {}

    @hookimpl
    def match_prefix(self, step: Step, request: Request) -> list[int]:
        size = step.pool.block_size
        found: list[int] = []
        for place in range((request.num_tokens - 1) // size):
            block_id = self.block_of.get(request.token_ids(place * size, (place + 1) * size))
            if block_id is None or block_id in found:
                break
            found.append(block_id)
        return found

    @hookimpl
    def blocks_filled(self, step: Step, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            record = step.pool.record(block_id)
            assert record is not None
            self.block_of[record.tokens] = block_id


class LosesBlocks:
    """Does not hear of every block that comes back."""

    Settings = BlockSettings

    def __init__(self, settings: BlockSettings) -> None:
        self.free: list[int] = []

    @hookimpl
    def engine_started(self, engine: EngineInfo) -> None:
        self.free = list(range(engine.num_blocks))

    @hookimpl
    def allocate(self, num_blocks: int) -> list[int] | None:
        return self.free[:num_blocks] if num_blocks <= len(self.free) else None

    @hookimpl
    def blocks_allocated(self, block_ids: Sequence[int]) -> None:
        self.free = [block_id for block_id in self.free if block_id not in block_ids]

    @hookimpl
    def blocks_freed(self, block_ids: Sequence[int]) -> None:
        self.free += [block_id for block_id in block_ids if block_id != 3]


class EvictsOne:
    """One block at a time, though more may be asked for."""

    @hookimpl
    def evict(self, step: Step) -> list[int]:
        cached = [b for b in range(step.pool.num_blocks) if step.pool.is_cached(b) and not step.pool.is_pinned(b)]
        return cached[-1:]


class EvictsPinned:
    @hookimpl
    def evict(self, step: Step, num_blocks: int) -> list[int]:
        return [b for b in range(step.pool.num_blocks) if step.pool.is_cached(b)][:num_blocks]


class NamesTheFirst:
    """A victim that has work in this step already."""

    @hookimpl
    def preempt(self, step: Step) -> Preemption:
        return Preemption(step.running[0])


class AnswersInWords:
    @hookimpl
    def release(self) -> str:
        return "yes"


BROKEN = [
    (AcceptSuite, "test_an_idle_engine_takes_a_short_request", NeverAccepts),
    (AcceptSuite, "test_in_a_flood_each_is_served_or_told_why_not", RefusesBadly),
    (OrderSuite, "test_nobody_waits_for_ever", LastComeFirst),
    (OrderSuite, "test_each_waiting_request_is_yielded_once", HeadOnly),
    (OrderSuite, "test_a_preempted_request_keeps_its_place", SendsToTheBack),
    (AdmitSuite, "test_a_single_request_starts_in_time", AlwaysLater),
    (AdmitSuite, "test_a_burst_starts_in_order", EvenOnesFirst),
    (BudgetSuite, "test_grants_are_within_what_is_wanted", Overgenerous),
    (BudgetSuite, "test_a_long_prompt_alone_takes_no_more_steps_than_tokens", ATokenNowAndThen),
    (PrefixSuite, "test_every_nominated_block_is_right", ForgetsNothing),
    (AllocateSuite, "test_the_whole_pool_can_be_given", LosesBlocks),
    (EvictSuite, "test_it_finds_what_there_is", EvictsOne),
    (EvictSuite, "test_pinned_blocks_stay", EvictsPinned),
    (PreemptSuite, "test_everybody_gets_the_right_tokens", NamesTheFirst),
    (ReleaseSuite, "test_nothing_is_held_when_nothing_runs", AnswersInWords),
]


@pytest.mark.parametrize(("suite", "test", "strategy"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_strategy_fails(suite: type[Any], test: str, strategy: type) -> None:
    with pytest.raises(AssertionError):
        getattr(suite(), test)(strategy)


def test_every_suite_is_shown_to_fail() -> None:
    assert {suite.slot for suite, _, _ in BROKEN} == set(SUITES)


class ReadsNeighbours(FakeExecutor):
    """Samples by what else is in the plan."""

    def run(self, plan: StepPlan) -> Outcome:
        tokens = super().run(plan).tokens
        return Outcome(tuple(tuple((t + len(plan.works)) % self.model.vocab_size for t in brought) for brought in tokens))


class SamplesByChunk(FakeExecutor):
    """Samples by where the chunk began."""

    def run(self, plan: StepPlan) -> Outcome:
        tokens = super().run(plan).tokens
        pairs = zip(plan.works, tokens, strict=True)
        return Outcome(tuple(tuple((t + work.start) % self.model.vocab_size for t in brought) for work, brought in pairs))


class SkipsCopies(FakeExecutor):
    def run(self, plan: StepPlan) -> Outcome:
        return super().run(StepPlan(plan.step, plan.works))


@pytest.mark.parametrize(
    ("test", "executor"),
    [
        ("test_neighbours_make_no_difference", ReadsNeighbours),
        ("test_chunks_make_no_difference", SamplesByChunk),
        ("test_kv_comes_back_from_swap_space", SkipsCopies),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_executor_fails(test: str, executor: type[FakeExecutor]) -> None:
    with pytest.raises(AssertionError):
        getattr(ExecutorSuite(), test)(Driver(executor(num_swap_blocks=8)))


class Lossy:
    """Has no small letters."""

    def encode(self, text: str) -> list[int]:
        return list(text.upper().encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return []


def test_a_broken_tokenizer_fails() -> None:
    for test in ("test_any_text_comes_back", "test_a_conversation_holds_what_was_said"):
        with pytest.raises(AssertionError):
            getattr(TokenizerSuite(), test)(Lossy())


@pytest.mark.parametrize("suite", [*SUITES.values()], ids=lambda suite: suite.__name__)
def test_every_suite_has_tests_of_its_own(suite: type[StrategySuite]) -> None:
    own = {name for name in vars(suite) if name.startswith("test_")}
    assert own - set(vars(StrategySuite))
