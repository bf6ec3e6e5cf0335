"""A request: which moves between phases are possible, what plugins may read and not write, and its verbs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from treadle import FinishReason, Phase, Request, SamplingParams, StashKey
from treadle.request import LiveRequest, RequestOptions


@pytest.fixture
def request_in() -> Callable[..., LiveRequest]:
    """Make a request that has come to a phase; its prompt is 0, 1, ... 9."""

    def make(phase: Phase = Phase.SUBMITTED, **params: Any) -> LiveRequest:
        options = RequestOptions(priority=2, timeout_s=5.0, cache_salt="salt", labels={"tenant": "a"}, group="g")
        request = LiveRequest("r1", range(10), SamplingParams(**params), options, arrival_s=100.0, sequence=7)
        if phase is not Phase.SUBMITTED:
            request.queue(30, frozenset({999}), "key")
        if phase in (Phase.RUNNING, Phase.PREEMPTED):
            request.start(3, 101.0)
        if phase is Phase.PREEMPTED:
            request.preempt()
        if phase is Phase.FINISHED:
            request.finish(FinishReason.CANCELLED, 102.0)
        assert request.phase is phase
        return request

    return make


VERBS: dict[str, Callable[[LiveRequest], object]] = {
    "queue": lambda r: r.queue(30, frozenset(), None),
    "start": lambda r: r.start(4, 103.0),
    "preempt": lambda r: r.preempt(),
    "finish": lambda r: r.finish(FinishReason.LENGTH, 104.0),
}
ALLOWED = {
    Phase.SUBMITTED: {"queue": Phase.WAITING, "finish": Phase.FINISHED},
    Phase.WAITING: {"start": Phase.RUNNING, "finish": Phase.FINISHED},
    Phase.RUNNING: {"preempt": Phase.PREEMPTED, "finish": Phase.FINISHED},
    Phase.PREEMPTED: {"start": Phase.RUNNING, "finish": Phase.FINISHED},
    Phase.FINISHED: {},
}


@pytest.mark.parametrize(("phase", "verb"), list(itertools.product(Phase, VERBS)))
def test_a_phase_changes_as_allowed_or_not_at_all(phase: Phase, verb: str, request_in: Any) -> None:
    request = request_in(phase)
    if verb in ALLOWED[phase]:
        VERBS[verb](request)
        assert request.phase is ALLOWED[phase][verb]
    else:
        with pytest.raises(AssertionError, match=r"<Request r1 .*cannot become"):
            VERBS[verb](request)
        assert request.phase is phase


PUBLIC = sorted(name for name in dir(Request) if not name.startswith("_"))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_attribute_is_read_only(name: str, request_in: Any) -> None:
    request = request_in(Phase.RUNNING)
    with pytest.raises(AttributeError):
        setattr(request, name, None)


def test_plugins_cannot_invent_attributes(request_in: Any) -> None:
    with pytest.raises(AttributeError):
        request_in().tenant = "a"


def test_what_a_caller_said_is_what_plugins_read(request_in: Any) -> None:
    request = request_in()
    assert (request.id, request.priority, request.cache_salt, request.group) == ("r1", 2, "salt", "g")
    assert request.labels == {"tenant": "a"}
    assert (request.arrival_s, request.expires_s, request.sequence) == (100.0, 105.0, 7)
    assert (request.prompt_length, request.num_tokens, request.num_output) == (10, 10, 0)
    assert request.token_ids() == tuple(range(10))
    assert request.token_ids(2, 4) == (2, 3)
    assert request.token_ids(-1) == (9,)


def test_without_a_timeout_it_never_expires() -> None:
    request = LiveRequest("r", [1], SamplingParams(), RequestOptions(), arrival_s=0.0, sequence=1)
    assert request.expires_s is None


@pytest.mark.parametrize(
    ("most", "kept"), [(3, [7, 8, 9]), (9, list(range(1, 10))), (10, list(range(10))), (50, list(range(10)))]
)
def test_trimming_keeps_the_last_tokens(most: int, kept: list[int], request_in: Any) -> None:
    request = request_in()
    request.trim(most)
    assert list(request.token_ids()) == kept
    assert request.prompt_length == len(kept)
    assert request.was_trimmed == (len(kept) < 10)


def test_trimming_is_over_once_it_waits(request_in: Any) -> None:
    with pytest.raises(AssertionError):
        request_in(Phase.WAITING).trim(3)


def test_tokens_are_computed_and_appended(request_in: Any) -> None:
    request = request_in(Phase.RUNNING)
    assert request.num_pending == 10
    request.table.num_computed = 10
    assert request.append(50) is None
    assert (request.num_tokens, request.num_output, request.num_computed, request.num_pending) == (11, 1, 10, 1)
    request.table.num_computed += 1
    assert request.append(999) is FinishReason.STOP
    assert request.token_ids(10) == (50, 999)


def test_the_limit_ends_it(request_in: Any) -> None:
    request = request_in(Phase.RUNNING)
    reasons = [request.append(5) for _ in range(20)]
    assert reasons == [None] * 19 + [FinishReason.LENGTH]


def test_a_stop_token_counts_from_min_tokens_on(request_in: Any) -> None:
    request = request_in(Phase.RUNNING, min_tokens=2)
    assert [request.append(999) for _ in range(3)] == [None, None, FinishReason.STOP]


def test_admission_is_remembered_though_it_is_preempted(request_in: Any) -> None:
    request = request_in(Phase.PREEMPTED)
    assert (request.batch, request.is_waiting) == (None, True)
    request.start(9, 200.0)
    assert (request.batch, request.admitted_s, request.num_preempted) == (9, 101.0, 1)


def test_what_is_lost_by_preemption_counts_when_it_resumes(request_in: Any) -> None:
    request = request_in(Phase.RUNNING)
    request.table.num_computed = 10
    request.preempt()
    request.table.num_computed = 4
    request.start(9, 200.0)
    assert request.num_recomputed_tokens == 6


def test_other_threads_see_what_is_published_and_nothing_before(request_in: Any) -> None:
    request = request_in(Phase.RUNNING)
    request.append(5)
    request.append(999)
    request.finish(FinishReason.STOP, 104.0)
    assert request.progress == (0, None)
    calls: list[int] = []
    request.watch(lambda: calls.append(1))
    for watcher in request.publish():
        watcher()
    assert request.progress == (2, (FinishReason.STOP, None))
    assert calls == [1]


def test_labels_are_a_copy_that_cannot_be_changed() -> None:
    given = {"tenant": "a"}
    options = RequestOptions(labels=given)
    request = LiveRequest("r", [1], SamplingParams(), options, arrival_s=0.0, sequence=1)
    given["tenant"] = "b"
    assert request.labels == {"tenant": "a"}
    with pytest.raises(TypeError):
        request.labels["tenant"] = "c"  # type: ignore[index]
    with pytest.raises(AttributeError):
        request.labels.clear()  # type: ignore[attr-defined]


def test_state_of_plugins_is_reached_by_its_key_alone(request_in: Any) -> None:
    request = request_in()
    mine, yours = StashKey[int](), StashKey[int]()
    request.stash[mine] = 3
    assert request.stash[mine] == 3
    assert mine in request.stash
    assert yours not in request.stash
    assert request.stash.get(yours, 9) == 9
    with pytest.raises(KeyError):
        request.stash[yours]
