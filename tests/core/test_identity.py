"""Whatever outlives a call holds the request, never its name; what callers hand in is copied; who waits is told in one step."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from treadle import FinishReason, Request, SamplingParams, Step, hookimpl
from treadle.errors import EngineStopped, InvalidRequest, PluginError, WrongCall
from treadle.plan import Outcome, StepPlan
from treadle.testing import FakeExecutor, drain_checked

SHORT = SamplingParams(max_tokens=2)

# --- names that are given again -------------------------------------------------------------------------------------------------


def test_a_cancel_of_one_that_has_ended_does_not_reach_the_next_of_its_name(build: Any, assert_right: Any) -> None:
    engine = build().start()
    for _ in range(20):
        first = engine.submit([1, 2], SHORT, request_id="x")
        first.result(10)
        engine.cancel("x")
        first.cancel()
        second = engine.submit([1, 2, 3], SHORT, request_id="x")
        first.cancel()
        assert_right([second])


def test_a_cancel_that_was_posted_is_for_the_request_of_that_time(build: Any, assert_right: Any) -> None:
    engine = build()
    first = engine.submit([1, 2], SamplingParams(max_tokens=1), request_id="x")
    engine.cancel("x")
    engine._inbox.forget([first._request])  # as if it had ended in a step that began before
    second = engine.submit([1, 2, 3], SHORT, request_id="x")
    drain_checked(engine)
    assert first.result().finish_reason is FinishReason.CANCELLED
    assert_right([second])


def test_a_name_may_be_given_again_while_its_first_holders_blocks_are_held(build: Any, assert_right: Any) -> None:
    engine = build(release="with_batch", num_blocks=32)
    long = engine.submit([9] * 20, SamplingParams(max_tokens=200), request_id="long")
    handles = []
    for number in range(40):
        handles.append(engine.submit([number] * 20, SHORT, request_id="x"))
        engine.submit([number, 1], SamplingParams(max_tokens=9))
        while not handles[-1].finished:
            engine.step()
            engine.check_integrity()
    drain_checked(engine)
    assert_right([*handles, long])


def test_names_of_groups_do_not_collide_with_those_of_callers(build: Any, assert_right: Any) -> None:
    engine = build()
    mine = [engine.submit([n], SHORT, request_id=f"g{n}-0") for n in range(1, 5)]
    group = engine.submit_group([7, 8], SHORT, 3)
    assert len({handle.id for handle in [*mine, *group]}) == 7
    assert len({handle.request.group for handle in group}) == 1
    drain_checked(engine)
    assert_right([*mine, *group])


# --- what callers hand in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["submit", "submit_group"])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"labels": "x"}, "labels='x'"),
        ({"labels": {"a": 1}}, "labels="),
        ({"labels": 3}, "labels=3"),
        ({"priority": "high"}, "priority='high'"),
        ({"timeout_s": -1}, "timeout_s=-1"),
        ({"timeout_s": True}, "timeout_s=True"),
        ({"timeout_s": 10**400}, "timeout_s=1000"),
        ({"pin_s": 10**400}, "pin_s=1000"),
        ({"priority": 10**400}, "priority=1000"),
        ({"reuse": 1}, "reuse=1"),
        ({"pin_s": 1, "reuse": False}, "pin_s=1"),
        ({"adapter": "french"}, "adapter='french'"),
        ({"adapter": 3}, "adapter=3"),
        ({"priorty": 1}, "did you mean 'priority'"),
        ({"temperature": 0.5}, r"SamplingParams\(temperature=...\)"),
        ({"request_id": 7}, "request_id=7"),
    ],
)
def test_both_doors_are_guarded_alike(door: str, options: Any, named: str, build: Any) -> None:
    engine = build(order="deadline")
    with pytest.raises(InvalidRequest, match=named):
        engine.submit([1], SHORT, **options) if door == "submit" else engine.submit_group([1], SHORT, 2, **options)
    assert not engine.busy


def test_no_labels_are_no_labels(build: Any, assert_right: Any) -> None:
    engine = build(order="deadline")
    handles = [engine.submit([1], SHORT, labels=None), *engine.submit_group([1], SHORT, 2, labels=None)]
    drain_checked(engine)
    assert_right(handles)


def test_labels_are_no_plugins_to_change(build: Any) -> None:
    class Vandal:
        name = "vandal"

        @hookimpl
        def accept(self, request: Request) -> None:
            request.labels["tenant"] = "mine"  # type: ignore[index]

    engine, labels = build(Vandal()), {"tenant": "a"}
    handle = engine.submit([1], SHORT, labels=labels)
    drain_checked(engine)
    assert isinstance(handle.result().error, PluginError)
    assert (handle.request.labels, labels) == ({"tenant": "a"}, {"tenant": "a"})


def test_a_text_or_ids_alone_are_one_prompt(build: Any) -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, token_ids: Any) -> str:
            return "".join(chr(97 + token % 26) for token in token_ids)

        def chat(self, messages: Any) -> list[int]:
            return self.encode("".join(f"{message['role']}:{message['content']}\n" for message in messages))

    engine = build(executor=FakeExecutor(tokenizer=Letters()))
    conversation = [{"role": "user", "content": "Hi"}]
    for prompt, length in (("Hi", 2), ([5, 6, 7], 3), (conversation, 8), ((5, 6), 2)):
        (done,) = engine.generate(prompt, SHORT)
        assert len(done.prompt_token_ids) == length
    assert len(engine.submit(conversation, SHORT).result().prompt_token_ids) == 8
    with pytest.raises(InvalidRequest, match=r"messages\[0\]="):
        engine.submit([{"role": "user"}], SHORT)
    with pytest.raises(InvalidRequest, match=r"unknown option 'aheda'"):
        engine.generate(["a"], SHORT, aheda=3)


def test_messages_need_a_template(build: Any) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        build().submit([{"role": "user", "content": "Hi"}], SHORT)


def test_an_unknown_sampling_parameter_is_named_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


# --- values for plugins ---------------------------------------------------------------------------------------------------------


class Grammar:
    """Claims a namespace of its own."""

    name = "grammar"

    def __init__(self) -> None:
        self.extras: dict[str, Callable[[object], object]] = {"grammar": self.check}

    def check(self, value: object) -> object:
        if not isinstance(value, str):
            raise ValueError("a grammar is a text")
        return value.strip()

    @hookimpl
    def accept(self) -> None:
        return None


def test_values_for_plugins_are_checked_by_who_claims_them(build: Any) -> None:
    engine = build(Grammar())
    handle = engine.submit([1], SamplingParams(max_tokens=1, extra={"grammar": " yes | no "}))
    assert handle.request.params.extra == {"grammar": "yes | no"}
    with pytest.raises(InvalidRequest, match=r"extra\['grammar'\]=3 is refused by grammar: a grammar is a text"):
        engine.submit([1], SamplingParams(extra={"grammar": 3}))
    with pytest.raises(InvalidRequest, match="did you mean 'grammar'"):
        engine.submit([1], SamplingParams(extra={"gramar": "x"}))
    with pytest.raises(InvalidRequest, match="extra="):
        SamplingParams(extra="x")  # type: ignore[arg-type]
    drain_checked(engine)


# --- published in one step ------------------------------------------------------------------------------------------------------


def test_a_handle_is_finished_when_its_completion_is_there_and_no_sooner(build: Any) -> None:
    seen: list[bool] = []

    class Peeks:
        @hookimpl
        def request_finished(self) -> None:
            seen.append(handle.finished)

    engine = build(Peeks())
    handle = engine.submit([1], SHORT)
    drain_checked(engine)
    assert seen == [False]
    assert handle.finished
    assert handle.completion().finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("streaming", [False, True])
def test_close_gives_everybody_who_waits_a_completion(streaming: bool, build: Any) -> None:
    for _ in range(5):
        engine = build(num_blocks=4000).start()
        # far more than can be computed before it is closed
        handles = [engine.submit([n], SamplingParams(max_tokens=3900)) for n in range(16)]

        def wait(handle: Any) -> FinishReason:
            if streaming:
                list(handle.stream())
                return handle.completion().finish_reason  # type: ignore[no-any-return]
            return handle.result(20).finish_reason  # type: ignore[no-any-return]

        with ThreadPoolExecutor(16) as pool:
            waiting = [pool.submit(wait, handle) for handle in handles]
            time.sleep(0.01)
            engine.close()
            assert {future.result(20) for future in waiting} == {FinishReason.CANCELLED}


def test_a_stop_tokens_text_never_reaches_a_stream(build: Any) -> None:
    class Numbers:
        def encode(self, text: str) -> list[int]:
            return [int(text)]

        def decode(self, token_ids: Any) -> str:
            return "".join(f"<{token}>" for token in token_ids)

        def chat(self, messages: Any) -> None:
            return None

    executor = FakeExecutor(tokenizer=Numbers())
    answer = build(executor=FakeExecutor()).submit([1], SamplingParams(max_tokens=9)).result().token_ids
    engine = build(executor=executor).start()
    for _ in range(30):
        handle = engine.submit([1], SamplingParams(max_tokens=9, stop_token_ids=(answer[4],)))
        pieces = [chunk.text for chunk in handle.stream()]
        assert "".join(pieces) == handle.completion().text == "".join(f"<{token}>" for token in answer[:4])


def test_a_stream_that_is_dropped_cancels(build: Any) -> None:
    engine = build()
    handle = engine.submit([1], SamplingParams(max_tokens=900))
    for _ in handle.stream():
        break
    gc.collect()
    drain_checked(engine, 5)
    assert handle.result().finish_reason is FinishReason.CANCELLED


def test_answers_that_nobody_waits_for_any_more_are_cancelled(build: Any) -> None:
    engine = build()
    answers = engine.generate([[n] for n in range(9)], SamplingParams(max_tokens=900), ahead=3)
    next(answers)
    answers.close()
    drain_checked(engine, 5)


def test_output_is_polled_without_waiting(build: Any, truth: Any) -> None:
    engine = build()
    handle = engine.submit([1, 2], SamplingParams(max_tokens=4))
    assert handle.poll() is None
    tokens: list[int] = []
    while not handle.finished:
        engine.step()
        chunk = handle.poll()
        tokens += chunk.token_ids if chunk else ()
    assert tuple(tokens) == truth(handle)
    assert handle.poll() is None


def test_a_callback_hears_of_its_own_request_alone(build: Any) -> None:
    engine = build()
    handles = [engine.submit([n], SamplingParams(max_tokens=3 + n)) for n in range(2)]
    heard: dict[int, int] = {0: 0, 1: 0}

    def count(n: int) -> None:
        heard[n] += 1

    for n, handle in enumerate(handles):
        handle.on_progress(lambda n=n: count(n))
    handles[1].on_progress(lambda: 1 // 0)  # what it raises ends nobody
    drain_checked(engine)
    assert heard == {0: 3, 1: 4}
    handles[0].on_progress(lambda: count(0))
    assert heard[0] == 4, "who comes late hears at once"
    assert all(handle.result().error is None for handle in handles)


class Overlapping(FakeExecutor):
    """Computes on a thread of its own, from `launch` to `collect`."""

    overlaps = True

    def launch(self, plan: StepPlan) -> None:
        self._answer: list[Outcome | Exception] = []
        self._thread = threading.Thread(target=self._compute, args=(plan,))
        self._thread.start()

    def collect(self) -> Outcome:
        self._thread.join()
        answer = self._answer[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _compute(self, plan: StepPlan) -> None:
        try:
            self._answer.append(self.run(plan))
        except Exception as error:  # to be raised where it is collected
            self._answer.append(error)


def test_what_a_step_brought_is_told_while_the_next_one_is_computed(build: Any, assert_right: Any) -> None:
    told: list[str] = []

    class Notes(Overlapping):
        def run(self, plan: StepPlan) -> Outcome:
            told.append(f"pass {plan.step}")
            return super().run(plan)

        def collect(self) -> Outcome:
            told.append("collect")
            return super().collect()

    class Hears:
        @hookimpl
        def step_committed(self, step: Step) -> None:
            told.append(f"committed {step.number}")

        @hookimpl
        def step_finished(self, report: Any) -> None:
            told.append(f"finished {report.step}")

    engine = build(Hears(), executor=Notes())
    handle = engine.submit([1], SamplingParams(max_tokens=3))
    engine.step()
    assert not handle.request.progress[0], "it is told with the next pass"  # type: ignore[attr-defined]
    drain_checked(engine)
    assert_right([handle])
    assert [told.index("finished 1") < told.index("collect", told.index("committed 1")), told[-1]] == [True, "finished 3"]


def test_overlapping_passes_that_fail_cost_only_their_own(build: Any, assert_right: Any) -> None:
    executor = Overlapping(num_swap_blocks=4)
    engine = build(executor=executor, num_blocks=10, preempt="swap")
    handles = [engine.submit([n] * 20, SamplingParams(max_tokens=30), request_id=f"r{n}") for n in range(5)]
    executor.fail_on.add("r3")
    drain_checked(engine, 3000)
    assert_right([handle for handle in handles if handle.id != "r3"])
    assert handles[3].result().finish_reason is FinishReason.ERROR


def test_the_executor_may_end_a_request(build: Any) -> None:
    class Complete(FakeExecutor):
        def run(self, plan: StepPlan) -> Outcome:
            right = super().run(plan)
            return Outcome(right.tokens, ends={0: FinishReason.STOP} if plan.step == 3 else {})

    engine = build(executor=Complete())
    handle = engine.submit([1], SamplingParams(max_tokens=30))
    drain_checked(engine)
    assert (len(handle.result().token_ids), handle.result().finish_reason) == (3, FinishReason.STOP)


def test_adapters_do_not_share_blocks(build: Any) -> None:
    executor = FakeExecutor()
    object.__setattr__(executor.model, "adapters", frozenset({"french"}))
    engine = build(executor=executor)
    for adapter in (None, "french", None, "french"):
        engine.submit([1] * 40, SHORT, adapter=adapter)
        drain_checked(engine)
    works = [work for plan in executor.plans for work in plan.works]
    assert [(work.adapter, work.start) for work in works if len(work.tokens) > 1] == [
        (None, 0), ("french", 0), (None, 32), ("french", 32),
    ]  # fmt: skip


# --- calls from the wrong place -------------------------------------------------------------------------------------------------


class Calls:
    """Makes a call within a hook."""

    name = "culprit"

    def __init__(self) -> None:
        self.call: Callable[[], object] = lambda: None

    @hookimpl
    def accept(self) -> None:
        self.call()


@pytest.mark.parametrize("call", ["step", "drain", "close", "result", "stream"])
@pytest.mark.parametrize("started", [False, True])
def test_a_hook_that_steps_or_waits_is_told_so(call: str, started: bool, build: Any, assert_right: Any) -> None:
    plugin = Calls()
    engine = build(plugin)
    first = engine.submit([1], SamplingParams(max_tokens=1))
    first.result(10)
    calls: dict[str, Callable[[], object]] = {
        "step": engine.step,
        "drain": engine.drain,
        "close": engine.close,
        "result": lambda: guilty.result(9),
        "stream": lambda: next(guilty.stream()),
    }
    if started:
        engine.start()

    def called() -> None:
        plugin.call = lambda: None
        calls[call]()

    plugin.call = called
    guilty = engine.submit([2], SHORT)
    error = guilty.result(10).error
    assert isinstance(error, PluginError)
    assert isinstance(error.__cause__, WrongCall)
    assert "hook" in str(error)
    later = engine.submit([3], SHORT)
    assert_right([later])


def test_a_stream_that_a_callback_cannot_read_is_not_given_up(build: Any, assert_right: Any) -> None:
    engine = build()
    handle = engine.submit([1], SamplingParams(max_tokens=4))
    told: list[type[BaseException]] = []

    def read() -> None:
        try:
            list(handle.stream())
        except WrongCall as error:
            told.append(type(error))

    handle.on_progress(read)
    drain_checked(engine)
    assert told
    assert_right([handle])


def test_many_threads_that_start_start_one(build: Any) -> None:
    for _ in range(10):
        engine = build()
        before = threading.active_count()
        barrier = threading.Barrier(8)

        def start(engine: Any = engine, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            engine.start()

        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(start) for _ in range(8)]:
                future.result()
        assert threading.active_count() == before + 1
        engine.close()


def _in_child(engine: Any, answer: Any) -> None:
    found = []
    for call in (engine.step, lambda: engine.submit([1]), engine.start, engine.close):
        try:
            call()
            found.append("nothing")
        except WrongCall as error:  # noqa: PERF203  # four calls
            found.append(str(error))
    answer.send(found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_engine_says_so_instead_of_hanging(build: Any) -> None:
    engine = build().start()
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(engine, there))
    child.start()
    assert here.poll(20), "the child hangs"
    assert all("forked" in text for text in here.recv())
    child.join(10)
    assert engine.submit([1], SHORT).result(10).error is None


class Interrupts:
    """Ctrl-C while a step is planned."""

    name = "interrupted"
    armed = False

    @hookimpl
    def budget(self) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


def test_an_interrupt_outside_of_a_pass_ends_the_engine_with_its_name(build: Any, engines: list[Any]) -> None:
    plugin = Interrupts()
    engine = build(plugin)
    handles = [engine.submit([n], SamplingParams(max_tokens=50)) for n in range(3)]
    engine.step()
    plugin.armed = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    for handle in handles:
        assert isinstance(handle.result(1).error, EngineStopped)
        assert "KeyboardInterrupt" in str(handle.result().error)
    with pytest.raises(EngineStopped, match="KeyboardInterrupt"):
        engine.step()
    with pytest.raises(EngineStopped, match="KeyboardInterrupt"):
        engine.submit([1])
    engine.close()
    engines.remove(engine)  # its books were torn


def test_an_interrupt_on_the_engines_own_thread_has_a_name(build: Any, engines: list[Any]) -> None:
    plugin = Interrupts()
    engine = build(plugin).start()
    plugin.armed = True
    error = engine.submit([1], SHORT).result(10).error
    assert isinstance(error, EngineStopped)
    assert "KeyboardInterrupt" in str(error)
    engine.close()
    engines.remove(engine)


class InterruptsWhenTold:
    """Ctrl-C while plugins are told of a step."""

    name = "interrupted_when_told"

    def __init__(self, step: int) -> None:
        self.step: int | None = step
        self.told: list[int] = []

    @hookimpl
    def step_finished(self, report: Any) -> None:
        self.told.append(report.step)
        if report.step == self.step:
            raise KeyboardInterrupt


def test_an_interrupt_while_a_pass_is_computed_loses_nobodys_end(build: Any, assert_right: Any) -> None:
    """`short` ends in step 2, which is told while the pass of step 3 is computed."""
    plugin = InterruptsWhenTold(2)
    engine = build(plugin, executor=Overlapping())
    short, long = (engine.submit([n], SamplingParams(max_tokens=most)) for n, most in ((1, 2), (2, 9)))
    with pytest.raises(KeyboardInterrupt):
        engine.drain()
    engine.drain()
    assert_right([short, long])
    assert plugin.told == sorted(set(plugin.told)), "each step is told once"


def test_a_torn_step_loses_no_end_that_is_not_told_yet(build: Any, engines: list[Any]) -> None:
    plugin = Interrupts()
    engine = build(plugin, executor=Overlapping())
    short, long = (engine.submit([n], SamplingParams(max_tokens=most)) for n, most in ((1, 2), (2, 9)))
    engine.step()
    engine.step()
    assert not short.finished
    plugin.armed = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert short.result(1).error is None
    assert len(short.result().token_ids) == 2
    assert isinstance(long.result(1).error, EngineStopped)
    engine.close()
    engines.remove(engine)  # its books were torn


def test_an_interrupt_while_the_end_is_told_loses_nobodys_end(build: Any, engines: list[Any]) -> None:
    """A failing plugin ends the engine, and an interrupt that end."""

    class Fails:
        name = "fails"

        @hookimpl
        def step_committed(self, step: Step) -> None:
            if step.number == 3:
                raise RuntimeError("no more")

        @hookimpl
        def request_finished(self, request: Request) -> None:
            if request.id == "b":
                raise KeyboardInterrupt

    engine = build(Fails())
    handles = [engine.submit([n], SamplingParams(max_tokens=9), request_id=name) for n, name in enumerate("abc")]
    with pytest.raises(KeyboardInterrupt):
        engine.drain()
    assert all("no more" in str(handle.completion().error) for handle in handles)
    engine.close()
    engines.remove(engine)  # its books were torn


def test_close_that_was_interrupted_may_be_called_again(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    engine = build(executor=executor).start()
    handle = engine.submit([1], SamplingParams(max_tokens=3000))
    join = threading.Thread.join

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    engine.close()
    assert executor.closed
    assert handle.completion().finish_reason is FinishReason.CANCELLED


# --- nothing is kept ------------------------------------------------------------------------------------------------------------


def test_short_requests_are_not_kept_by_a_long_one(build: Any) -> None:
    engine = build(admit={"strategy": "continuous", "max_batch_size": 64})
    engine.submit([9] * 20, SamplingParams(max_tokens=3000), timeout_s=600)
    for number in range(40):
        for other in range(20):
            engine.submit([number, other], SamplingParams(max_tokens=1), timeout_s=300)
        engine.step()
        engine.step()
    gc.collect()
    kept = sum(isinstance(thing, Request) for thing in gc.get_objects())
    assert kept < 150, f"{kept} requests are kept"


def test_a_refused_request_is_told_and_not_kept(build: Any) -> None:
    told: list[str] = []

    class Hears:
        @hookimpl
        def request_refused(self, request: Request) -> None:
            told.append(request.id)

        @hookimpl
        def request_finished(self, request: Request) -> None:
            told.append("finished")

    engine = build(Hears())
    handle = engine.submit([1] * 5000, request_id="too long")
    engine.step()
    assert told == ["too long"]
    assert handle.result().finish_reason is FinishReason.REFUSED
    assert not engine._inbox.everybody()
