"""Memory that cannot be had and copies that fail half-way, at every site: who asked goes on or is told, and nobody else notices.

The fake leaves wrong tokens where it failed, so whoever relies on what a failed pass wrote brings wrong tokens.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import structlog

from treadle import Handle, SamplingParams, hookimpl
from treadle.errors import ConfigError, ExecutionError, PluginError
from treadle.plan import Outcome, StepPlan, Work
from treadle.testing import FakeExecutor, drain_checked
from treadle.testing.faults import FailingExecutor, Site
from treadle.testing.traffic import Tally

NUM_SWAP_BLOCKS = 9
COMMON = list(range(1, 36))
PREFIXES = pytest.mark.parametrize("prefix", ["hash_chain", "radix", "none"])
PARTIAL = pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])


def _contend(engine: Any) -> list[Handle]:
    """A group of one prompt, some that begin alike and some of their own, which outgrow the pool; some come later."""
    params = SamplingParams(max_tokens=45, temperature=1.0, seed=3)
    handles = engine.submit_group([*COMMON, 7], params, 3)
    handles += [engine.submit([*COMMON[: 16 * n], 60 + n], SamplingParams(max_tokens=25 + 9 * n)) for n in range(3)]
    for n in range(6):
        for _ in range(12):
            engine.step()
            engine.check_integrity()
        handles.append(engine.submit([*COMMON[: 10 * (n % 4)], 90 + n], SamplingParams(max_tokens=40 + n)))
    drain_checked(engine, 5000)
    return handles


def _serves(engine: Any, assert_right: Any) -> None:
    """Nothing is left behind, and whoever comes next is served, from the cache too."""
    assert engine.kv_cache.swap_space.num_free == engine.kv_cache.swap_space.num_blocks
    assert engine.kv_cache.pool.num_used == 0
    for _ in range(2):
        later = [engine.submit([*COMMON, 7, n], SamplingParams(max_tokens=9)) for n in range(2)]
        drain_checked(engine)
        assert_right(later)


def _swapping(executor: FakeExecutor, build: Any, *plugins: object, **options: Any) -> Any:
    partial = options.pop("partial", False)
    return build(*plugins, executor=executor, num_blocks=7, preempt={"strategy": "swap", "partial": partial}, **options)


def _failing(site: Site, at: int, **options: Any) -> FailingExecutor:
    return FailingExecutor(site, at, num_swap_blocks=NUM_SWAP_BLOCKS, **options)


# --- copies ---------------------------------------------------------------------------------------------------------------------


@PREFIXES
@PARTIAL
@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("site", ["swap_out", "swap_in"])
def test_a_copy_that_fails_half_way_costs_nobody_a_token(
    site: Site, at: int, partial: bool, prefix: str, build: Any, assert_right: Any
) -> None:
    executor, tally = _failing(site, at), Tally()
    engine = _swapping(executor, build, tally, partial=partial, prefix=prefix)
    handles = _contend(engine)
    assert executor.num_failed == 1
    assert tally["swapped"]
    assert_right(handles)
    _serves(engine, assert_right)


@PREFIXES
@PARTIAL
@pytest.mark.parametrize("site", ["swap_out", "swap_in"])
def test_copies_that_fail_each_time_are_given_up_for_computing_anew(
    site: Site, partial: bool, prefix: str, build: Any, assert_right: Any
) -> None:
    executor = _failing(site, 1, times=None)
    engine = _swapping(executor, build, partial=partial, prefix=prefix)
    handles = _contend(engine)
    assert executor.num_failed > 1
    done = assert_right(handles)
    assert sum(completion.num_recomputed_tokens for completion in done)
    _serves(engine, assert_right)


@pytest.mark.parametrize("site", ["swap_out", "swap_in"])
def test_who_computes_beside_a_failing_copy_is_not_to_blame(site: Site, build: Any, assert_right: Any) -> None:
    """Two requests: the pass in which one is copied has the other's work alone in it."""
    executor = _failing(site, 1)
    engine = _swapping(executor, build, prefix="none")
    handles = [engine.submit([n] * 30, SamplingParams(max_tokens=70)) for n in range(2)]
    drain_checked(engine, 5000)
    assert executor.num_failed == 1
    failed = next(plan for plan, after in itertools.pairwise(executor.plans) if getattr(plan, site))
    assert len(failed.works) == 1
    assert_right(handles)
    _serves(engine, assert_right)


def test_a_failed_pass_with_copies_is_logged_with_them(build: Any) -> None:
    engine = _swapping(_failing("swap_out", 1), build)
    with structlog.testing.capture_logs() as events:
        _contend(engine)
    (failed,) = (event for event in events if event["event"] == "pass_failed")
    assert failed["error"] == "MemoryError: no memory at swap_out"
    assert failed["copies"]


# --- a pass ---------------------------------------------------------------------------------------------------------------------


@PREFIXES
@PARTIAL
@pytest.mark.parametrize("at", [1, 2, 6, 9, 30, 77, 150])
def test_a_write_that_fails_half_way_ends_at_most_who_was_computed_alone(
    at: int, partial: bool, prefix: str, build: Any, assert_right: Any
) -> None:
    error = MemoryError if at % 2 else RuntimeError
    executor = _failing("write", at, error=error)
    engine = _swapping(executor, build, partial=partial, prefix=prefix)
    handles = _contend(engine)
    assert executor.num_failed == 1
    ended = [handle for handle in handles if handle.result().error is not None]
    assert len(ended) <= 1
    for handle in ended:
        assert isinstance(handle.result().error, ExecutionError)
        assert f"{error.__name__}: no memory at write" in str(handle.result().error)
    assert_right([handle for handle in handles if handle not in ended])
    _serves(engine, assert_right)


@PREFIXES
@PARTIAL
def test_when_nothing_can_be_written_any_more_all_end_with_the_reason(
    partial: bool, prefix: str, build: Any, truth: Any, assert_right: Any
) -> None:
    executor = _failing("write", 60, times=None)
    engine = _swapping(executor, build, partial=partial, prefix=prefix)
    handles = _contend(engine)
    ended = [handle for handle in handles if handle.result().error is not None]
    assert len(ended) > 3
    for handle in ended:
        assert "MemoryError: no memory at write" in str(handle.result().error)
        tokens = handle.result().token_ids
        assert tokens == truth(handle)[: len(tokens)]
    assert_right([handle for handle in handles if handle not in ended])
    executor.mend()
    _serves(engine, assert_right)


@PREFIXES
@pytest.mark.parametrize("site", ["write", "swap_out", "swap_in"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_who_catches_an_interrupt_of_a_pass_may_step_on(at: int, site: Site, prefix: str, build: Any, assert_right: Any) -> None:
    executor = _failing(site, at, error=KeyboardInterrupt)
    engine = _swapping(executor, build, prefix=prefix)
    handles = [engine.submit([*COMMON, n % 2, 8], SamplingParams(max_tokens=40)) for n in range(4)]
    with pytest.raises(KeyboardInterrupt):
        drain_checked(engine, 5000)
    engine.check_integrity()
    drain_checked(engine, 5000)
    assert_right(handles)
    _serves(engine, assert_right)


class Holding(FakeExecutor):
    """Fails with something large in its hands."""

    held: weakref.ref[Any] | None = None

    @hookimpl
    def execute(self) -> Holding:
        return self

    def run(self, plan: StepPlan) -> Outcome:
        large = {object()}
        self.held = weakref.ref(large)
        raise MemoryError(f"{len(large)} too large")


def test_an_error_that_is_kept_keeps_nothing_of_the_failed_pass(build: Any) -> None:
    executor = Holding()
    engine = build(executor=executor)
    handle = engine.submit([1, 2, 3], SamplingParams(max_tokens=3))
    drain_checked(engine)
    completion = handle.result()
    gc.collect()
    assert isinstance(completion.error, ExecutionError)
    assert completion.error.__cause__ is not None
    assert completion.error.__cause__.__traceback__ is not None, "where it failed is still told"
    assert executor.held is not None
    assert executor.held() is None


class Spoiling(FakeExecutor):
    """Writes wrong KV for one request, and says so only in the pass that samples its first token."""

    guilty: Sequence[str] = ()

    @hookimpl
    def execute(self) -> Spoiling:
        return self

    def _write(self, work: Work) -> None:
        bad = work.request_id in self.guilty
        super()._write(work._replace(tokens=tuple(token + 1 for token in work.tokens)) if bad else work)

    def run(self, plan: StepPlan) -> Outcome:
        outcome = super().run(plan)
        sampled = {n: work for n, work in enumerate(plan.works) if work.sampling is not None}
        return Outcome(outcome.tokens, {n: "spoilt" for n, work in sampled.items() if work.request_id in self.guilty})


@PREFIXES
@pytest.mark.parametrize("chunk", [16, 2048])
@pytest.mark.parametrize("release", ["at_once", "with_batch"])
def test_what_a_request_that_could_not_be_computed_has_written_is_found_by_nobody(
    release: str, chunk: int, prefix: str, build: Any, assert_right: Any
) -> None:
    executor = Spoiling()
    engine = build(executor=executor, prefix=prefix, release=release, budget={"strategy": "decode_first", "max_tokens": chunk})
    first = engine.submit(COMMON, SamplingParams(max_tokens=30))
    for _ in range(4):
        engine.step()
    executor.guilty = ["guilty"]
    guilty = engine.submit([*COMMON, *range(50, 90)], SamplingParams(max_tokens=5), request_id="guilty")
    while not guilty.finished:
        engine.step()
        engine.check_integrity()
    assert "spoilt" in str(guilty.result().error)
    again = [engine.submit([*COMMON, *range(50, 90), n], SamplingParams(max_tokens=5)) for n in range(2)]
    drain_checked(engine)
    assert_right([first, *again])
    _serves(engine, assert_right)


# --- blocks ---------------------------------------------------------------------------------------------------------------------


class NthCall:
    """Stands in front of a strategy and fails when one hook is called for the n-th time."""

    name = "culprit"

    def __init__(self, hook: str, at: int) -> None:
        self._left = {hook: at}
        self.failed = False

    def _called(self, hook: str) -> None:
        if hook in self._left:
            self._left[hook] -= 1
            if self._left[hook] == 0:
                self.failed = True
                raise MemoryError(f"no memory in {hook}")

    @hookimpl
    def allocate(self) -> None:
        self._called("allocate")

    @hookimpl
    def evict(self) -> None:
        self._called("evict")

    @hookimpl
    def preempt(self) -> None:
        self._called("preempt")

    @hookimpl
    def match_prefix(self) -> None:
        self._called("match_prefix")


CALLS = [("allocate", at) for at in (1, 2, 3, 6, 11, 17)]
CALLS += [(hook, at) for hook in ("evict", "match_prefix") for at in (1, 2, 6, 11)]
CALLS += [("preempt", at) for at in (1, 2, 6)]


@PARTIAL
@pytest.mark.parametrize(("hook", "at"), CALLS)
def test_a_strategy_without_memory_ends_the_request_that_it_was_asked_about(
    hook: str, at: int, partial: bool, build: Any, assert_right: Any
) -> None:
    plugin = NthCall(hook, at)
    engine = _swapping(FakeExecutor(num_swap_blocks=NUM_SWAP_BLOCKS), build, plugin, partial=partial)
    handles = _contend(engine)
    assert plugin.failed
    (ended,) = (handle for handle in handles if handle.result().error is not None)
    error = ended.result().error
    assert isinstance(error, PluginError)
    assert (error.plugin, error.hook) == ("culprit", hook)
    assert f"MemoryError: no memory in {hook}" in str(error)
    assert_right([handle for handle in handles if handle is not ended])
    _serves(engine, assert_right)


class NoneAt:
    """Finds no room when it is asked for the n-th time, whatever is free."""

    def __init__(self, at: int) -> None:
        self._left = at

    @hookimpl(wrapper=True)
    def allocate(self) -> Any:
        answer = yield
        self._left -= 1
        return None if self._left == 0 else answer


@PARTIAL
@pytest.mark.parametrize("at", [2, 3, 5, 8, 13, 21])
def test_room_that_is_denied_once_is_found_the_next_time(at: int, partial: bool, build: Any, assert_right: Any) -> None:
    engine = _swapping(FakeExecutor(num_swap_blocks=NUM_SWAP_BLOCKS), build, NoneAt(at), partial=partial)
    assert_right(_contend(engine))
    _serves(engine, assert_right)


@PARTIAL
@pytest.mark.parametrize("num_swap_blocks", [1, 2, 4])
@pytest.mark.parametrize("site", ["swap_out", "swap_in"])
def test_swap_space_that_is_full_and_fails_as_well(
    site: Site, num_swap_blocks: int, partial: bool, build: Any, assert_right: Any
) -> None:
    executor = FailingExecutor(site, 2, times=2, num_swap_blocks=num_swap_blocks)
    engine = _swapping(executor, build, partial=partial)
    assert_right(_contend(engine))
    _serves(engine, assert_right)


# --- start-up -------------------------------------------------------------------------------------------------------------------


def test_an_executor_that_finds_no_memory_at_start_up_is_named_and_closed(build: Any) -> None:
    executor = FailingExecutor("open_pool", 1)
    with pytest.raises(PluginError, match="MemoryError: no memory at open_pool") as raised:
        build(executor=executor)
    assert (raised.value.plugin, raised.value.hook) == ("fake_executor", "execute")
    assert executor.closed


def test_what_an_executor_explains_at_start_up_is_passed_on(build: Any) -> None:
    executor = FailingExecutor("open_pool", 1, error=ConfigError)
    with pytest.raises(ConfigError, match="no memory at open_pool"):
        build(executor=executor)
    assert executor.closed
