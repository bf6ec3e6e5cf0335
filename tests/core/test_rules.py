"""Each rule of each hookspec, broken: the breach is named, and everyone else gets the right tokens.

The rules are read from the docstrings, so a rule that is added there fails `test_every_rule_is_broken_by_a_plugin` until it is
enforced and broken here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from treadle import (
    Admission,
    Engine,
    Handle,
    KVFormat,
    NotBefore,
    Open,
    Preemption,
    PreemptionMode,
    Refuse,
    Request,
    SamplingParams,
    Step,
    Trim,
    hookimpl,
)
from treadle.errors import PluginContractError
from treadle.hookspecs import Hooks
from treadle.testing import FakeExecutor, drain_checked

GUILTY = "guilty"
SHARED = list(range(1, 41))  # two full blocks and a half, which the guilty request shares with innocent ones


# --- plugins that break rules -------------------------------------------------------------------------------------------------


class Watching:
    """Knows who waits, and whether the guilty request is under way: outside of that it breaks nothing."""

    name = "culprit"

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer
        self.guilty: Request | None = None
        self.waiting: dict[str, Request] = {}

    @hookimpl
    def request_queued(self, request: Request) -> None:
        self.waiting[request.id] = request
        if request.id == GUILTY:
            self.guilty = request

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        del self.waiting[request.id]

    @hookimpl
    def request_finished(self, request: Request) -> None:
        self.waiting.pop(request.id, None)
        if request.id == GUILTY:
            self.guilty = None


class Order(Watching):
    @hookimpl
    def order(self, step: Step) -> Iterable[Request] | None:
        return self.answer(step, self) if self.guilty else None


class OrderOfSkipped(Order):
    """A request that is yielded twice must not have started in between."""

    @hookimpl
    def admit(self, request: Request) -> Admission | None:
        return Admission.SKIP if request.id == GUILTY else None


class Gate(Watching):
    @hookimpl
    def gate(self, step: Step) -> Any:
        return self.answer(step) if self.guilty else None


class FullGate(Watching):
    """Says that a place alone is lacking, and does not open when somebody gave up his."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__(answer)
        self.gave_way = False

    @hookimpl
    def request_preempted(self) -> None:
        self.gave_way = True

    @hookimpl
    def gate(self, step: Step) -> Any:
        if self.guilty is None:
            return None
        return self.answer(step) if self.gave_way else Open(0, full=True)


class Propose:
    """Has odd drafts for the guilty request only."""

    name = "culprit"

    def __init__(self, draft: Callable[[int], Any]) -> None:
        self._draft = draft

    @hookimpl
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> Any:
        return [self._draft(n) if r.id == GUILTY else None for r, n in zip(requests, most, strict=True)]


class ProposeForAll(Watching):
    @hookimpl
    def propose(self, requests: Sequence[Request]) -> Any:
        return self.answer(requests) if self.guilty in requests else None


class Budgets(Watching):
    @hookimpl
    def budget(self, step: Step) -> Any:
        return self.answer(step) if self.guilty else None


class Take:
    """Is odd to the guilty request only."""

    name = "culprit"
    may_shrink = True

    def __init__(self, granted: Callable[[int], Any]) -> None:
        self._granted = granted

    @hookimpl
    def budget(self) -> Take:
        return self

    def take(self, request: Request, wanted: int) -> Any:
        return self._granted(wanted) if request.id == GUILTY else wanted


class Evict:
    """Answers the guilty request's need with what it should not, and leaves the others' to the strategy."""

    name = "culprit"

    def __init__(self, answer: Callable[[Step, int], Any]) -> None:
        self._answer = answer
        self._asking = ""

    @hookimpl
    def allocate(self, request: Request) -> None:
        self._asking = request.id

    @hookimpl
    def evict(self, step: Step, num_blocks: int) -> Any:
        return self._answer(step, num_blocks) if self._asking == GUILTY else None


def _those(step: Step, is_wanted: Callable[[int], bool]) -> list[int]:
    return [block_id for block_id in range(step.pool.num_blocks) if is_wanted(block_id)]


def _free(step: Step) -> list[int]:
    return _those(step, step.pool.is_free)


def _cached(step: Step) -> list[int]:
    return _those(step, step.pool.is_cached)


def _used(step: Step) -> list[int]:
    return _those(step, lambda block_id: step.pool.count(block_id) > 0)


def _planned(step: Step) -> Request:
    return next(request for request in step.running if request.planned_in(step.number))


def _last(step: Step) -> Request:
    return next(step.victims())


# --- the table ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Breach:
    """How to break one rule. `answer` goes to a plugin of just the hook, asked for the guilty request; `plugin` makes another."""

    answer: Callable[..., Any] | None = None
    plugin: Callable[[], object] | None = None
    wrapper: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    shares: frozenset[str] = frozenset()
    """Who ends with the same error, besides the guilty one: requests that wait, or run, when a whole answer is wrong."""
    stretch: int = 1
    """How many times longer everyone generates, so that the pool gets full."""


BESIDE = frozenset({"before", "behind"})
EARLY = frozenset({"early0", "early1", "early2"})
TIGHT = {"num_blocks": 16, "prefix": "none"}
URGENT = {"order": "priority", "admit": {"strategy": "continuous", "max_batch_size": 3}}


def _each(answers: Iterable[Callable[..., Any]], **more: Any) -> list[Breach]:
    return [Breach(answer, **more) for answer in answers]


def _made(make: Callable[[Callable[..., Any]], object], answers: Iterable[Callable[..., Any]], **more: Any) -> list[Breach]:
    return [Breach(plugin=partial(make, answer), **more) for answer in answers]


TABLE: dict[tuple[str, str], list[Breach]] = {
    ("accept", "answers Accept, Trim, Refuse or None"): _each([lambda request, load: "yes", lambda request, load: Trim]),
    ("accept", "Trim keeps at least 1 prompt token"): _each(
        [lambda request, load: Trim(0), lambda request, load: Trim(True), lambda request, load: Trim(max_prompt_tokens=None)]  # type: ignore[arg-type]
    ),
    ("accept", "Refuse gives a reason"): _each([lambda request, load: Refuse("")]),
    ("admit", "answers an Admission, NotBefore or None"): _each(
        [
            lambda step, request, match: True,
            lambda step, request, match: "start",
            lambda step, request, match: Admission,
            lambda step, request, match: NotBefore(float("nan")),
            lambda step, request, match: NotBefore(10**400),
        ]
    ),
    ("admit", "does not hold a request back without a time while nothing runs"): _each(
        [
            lambda step, request, match: Admission.SKIP,
            lambda step, request, match: Admission.STOP,
            lambda step, request, match: NotBefore(step.now),
            lambda step, request, match: NotBefore(step.now - 1),
            lambda step, request, match: NotBefore(float("inf")),
        ]
    )
    + _each([lambda step, request, match, answer: Admission.SKIP if request.id == GUILTY else answer], wrapper=True),
    ("propose", "drafts at most `most` token ids of the model's vocabulary"): _made(
        Propose,
        [
            lambda most: [1] * (most + 1),
            lambda most: [-1],
            lambda most: [997],
            lambda most: ["a"],
            lambda most: 7,
        ],
    ),
    ("propose", "answers a sequence of drafts for each request, or None"): _made(
        ProposeForAll,
        [
            lambda requests: [None] * (len(requests) + 1),
            lambda requests: dict.fromkeys(requests, ()),
            lambda requests: "drafts",
            lambda requests: 7,
        ],
        shares=BESIDE | EARLY,
    ),
    ("match_prefix", "answers at most floor((known tokens - 1) / block size) blocks"): _each(
        [lambda step, request: list(range((request.num_tokens - 1) // step.pool.block_size + 1))]
    ),
    ("match_prefix", "answers ids of blocks of the pool, each once"): _each(
        [
            lambda step, request: [0, 0],
            lambda step, request: [step.pool.num_blocks],
            lambda step, request: [-1],
            lambda step, request: [True],
            lambda step, request: 5,
        ]
    ),
    ("allocate", "answers ids of free blocks, each once"): _each(
        [
            lambda step, request, num_blocks: _used(step)[:num_blocks],
            lambda step, request, num_blocks: _free(step)[:1] * num_blocks * 2,
            lambda step, request, num_blocks: [-1 - place for place in range(num_blocks)],
            lambda step, request, num_blocks: [step.pool.num_blocks + place for place in range(num_blocks)],
            lambda step, request, num_blocks: num_blocks,
        ]
    ),
    ("allocate", "answers at least num_blocks blocks, or None"): _each(
        [lambda step, request, num_blocks: _free(step)[: num_blocks - 1], lambda step, request, num_blocks: ()]
    ),
    # a plugin's None passes the question on: only a wrapper, or the strategy itself, can end with it
    ("allocate", "finds room when nothing else holds a block"): _each(
        [lambda step, request, num_blocks, answer: None if request.id == GUILTY else answer], wrapper=True
    ),
    ("preempt", "answers a Preemption or None"): _each(
        [
            lambda step, request, num_blocks: _last(step),
            lambda step, request, num_blocks: Preemption(_last(step), "swap"),  # type: ignore[arg-type]
        ],
        options=TIGHT,
        stretch=4,
    ),
    ("preempt", "names a running request with no work planned in this step, each once"): _each(
        [
            lambda step, request, num_blocks: Preemption(_planned(step)),
            lambda step, request, num_blocks: Preemption(request.id),
            lambda step, request, num_blocks: Preemption(step.oldest_waiting),
        ],
        options=TIGHT,
        stretch=4,
    ),
    ("preempt", "names a victim of lower priority when the request is waiting"): _each(
        [lambda step, request, num_blocks: Preemption(max(step.victims(), key=lambda victim: victim.priority))], options=URGENT
    ),
    ("preempt", "takes at least one block, or all"): _each(
        [
            lambda step, request, num_blocks: Preemption(_last(step), num_blocks=0),
            lambda step, request, num_blocks: Preemption(_last(step), num_blocks=True),
            lambda step, request, num_blocks: Preemption(_last(step), num_blocks="all"),  # type: ignore[arg-type]
        ],
        options=TIGHT,
        stretch=4,
    ),
    ("preempt", "swaps only where the executor has swap space"): _each(
        [lambda step, request, num_blocks: Preemption(_last(step), PreemptionMode.SWAP)], options=TIGHT, stretch=4
    ),
    ("release", "answers a bool or None"): _each([lambda step, request: "yes", lambda step, request: 0])
    + _each([lambda step, request, answer: "yes" if request.id == GUILTY else answer], wrapper=True),
    # whole answers: those who wait share the guilty one's end, those who run and those who come later do not
    ("order", "yields waiting requests only"): _made(
        Order,
        [
            lambda step, me: [me.waiting["before"], step.running[0]],
            lambda step, me: [me.waiting["before"], "guilty"],
            lambda step, me: [me.waiting["before"], None],
        ],
        shares=frozenset({"behind"}),
    ),
    ("order", "yields each request once"): _made(
        OrderOfSkipped, [lambda step, me: [me.waiting["before"], me.guilty, me.guilty]], shares=frozenset({"behind"})
    ),
    ("order", "yields at least one request while nothing runs"): _made(
        Order, [lambda step, me: (), lambda step, me: iter([])], shares=BESIDE
    ),
    ("gate", "answers Open, NotBefore or None"): _made(
        Gate, [lambda step: True, lambda step: Open, lambda step: Open(-1), lambda step: NotBefore(float("nan"))], shares=BESIDE
    ),
    ("gate", "is open, or gives a time still to come, while nothing runs"): _made(
        Gate,
        [
            lambda step: Open(0),
            lambda step: NotBefore(step.now),
            lambda step: NotBefore(0.0),
            lambda step: NotBefore(float("inf")),
        ],
        shares=BESIDE,
    ),
    ("gate", "opens in the step in which a request gave up its place, after saying `full`"): _made(
        FullGate, [lambda step: Open(0, full=True), lambda step: NotBefore(step.now + 1)], options=URGENT
    ),
    ("budget", "answers a Budget or None"): _made(Budgets, [lambda step: 5, lambda step: object()], shares=BESIDE | EARLY),
    ("budget", "take grants a whole number of 0 to wanted tokens"): _made(
        Take, [lambda wanted: wanted + 1, lambda wanted: -1, lambda wanted: True, lambda wanted: 1.0, lambda wanted: None]
    ),
    ("budget", "take grants at least one request a token in each step"): _made(Take, [lambda wanted: 0]),
    ("evict", "answers ids of cached blocks that are not pinned, each once"): _made(
        Evict,
        [
            lambda step, num_blocks: _used(step)[:1] or _free(step)[:1],
            lambda step, num_blocks: _cached(step)[:1] * 2,
            lambda step, num_blocks: [-1],
            lambda step, num_blocks: [step.pool.num_blocks],
            lambda step, num_blocks: 3,
        ],
        options={"num_blocks": 9},
    ),
    # start-up: there is no engine, and what was loaded is given back
    ("quantize", "answers a KVFormat or None"): _each([lambda model: 4, lambda model: "int8"]),
    ("quantize", "names heads and layers that the model has"): _each(
        [
            lambda model: KVFormat(key_bits=8, whole_layers=frozenset({model.num_layers})),
            lambda model: KVFormat(key_bits=8, whole_heads=frozenset({(0, model.num_kv_heads)})),
            lambda model: KVFormat(key_bits=8, whole_heads=frozenset({(-1, 0)})),
            lambda model: KVFormat(key_bits=8, whole_keys=frozenset({(model.num_layers, 0)})),
            lambda model: KVFormat(key_bits=8, whole_layers=frozenset({"first"})),  # type: ignore[arg-type]
            lambda model: KVFormat(key_bits=8, whole_heads=frozenset({1})),  # type: ignore[arg-type]
        ]
    ),
    ("execute", "answers an Executor"): _each([lambda settings, hooks: object()]),
}
AT_START = ("quantize", "execute")


def _cases(*, at_start: bool) -> list[Any]:
    return [
        pytest.param(rule, breach, id=f"{': '.join(rule)}-{place}".replace(" ", "_"))
        for rule, breaches in TABLE.items()
        for place, breach in enumerate(breaches)
        if (rule[0] in AT_START) == at_start
    ]


def _rules() -> set[tuple[str, str]]:
    """(hook, rule) of every hookspec's docstring."""
    found = set()
    for hook in vars(Hooks):
        _, _, part = (getattr(Hooks, hook).__doc__ or "").partition("Rules:\n")
        bullets = re.split(r"\n\s*\n", part, maxsplit=1)[0]
        found |= {(hook, " ".join(text.split())) for text in re.split(r"^\s*- ", bullets, flags=re.MULTILINE) if text.strip()}
    return {item for item in found if not item[0].startswith("_")}


OF_OUTCOMES = {
    "collect returns an Outcome",
    "ends a sampled work by STOP or LENGTH",
    "an Outcome has an entry for each work",
    "a work that is not sampled brings no token",
    "a sampled work brings 1 token, and at most 1 for each drafted one",
    "tokens are ids of the model's vocabulary",
}
"""Rules of `execute` that hold in every step: test_outcome_rules.py breaks them."""


def test_every_rule_is_broken_by_a_plugin() -> None:
    assert set(TABLE) | {("execute", rule) for rule in OF_OUTCOMES} == _rules()
    assert all(TABLE.values())


@pytest.fixture
def culprit(plugin_with: Callable[..., object]) -> Callable[[str, Breach], object]:
    def make(hook: str, breach: Breach) -> object:
        if breach.plugin is not None:
            return breach.plugin()
        answer = breach.answer
        assert answer is not None
        if hook in AT_START or breach.wrapper:
            return plugin_with(hook, answer, wrapper=breach.wrapper)
        return plugin_with(hook, lambda **given: answer(**given) if given["request"].id == GUILTY else None)

    return make


def _submit(engine: Engine, name: str, prompt: Sequence[int], max_tokens: int, priority: int = 0) -> Handle:
    return engine.submit(prompt, SamplingParams(max_tokens=max_tokens), request_id=name, priority=priority)


@pytest.mark.parametrize(("broken", "breach"), _cases(at_start=False))
def test_a_broken_rule_is_named_and_everyone_else_gets_the_right_tokens(
    broken: tuple[str, str], breach: Breach, culprit: Any, build: Callable[..., Engine], assert_right: Any
) -> None:
    engine, long = build(culprit(broken[0], breach), **breach.options), breach.stretch
    early = [
        _submit(engine, f"early{n}", SHARED[: 36 + 4 * n] + [50 + n] * 5, long * (14 + n), priority=9 * (n > 0)) for n in range(3)
    ]
    for _ in range(3):
        engine.step()
        engine.check_integrity()
    beside = [_submit(engine, "before", [*SHARED, 60, 61, 62], long * 12)]
    guilty = _submit(engine, GUILTY, SHARED + list(range(200, 232)), long * 40, priority=5)
    beside += [_submit(engine, "behind", [70] * 20, long * 9)]
    drain_checked(engine, 3000)
    late = [_submit(engine, f"late{n}", [*SHARED, 80 + n], 8) for n in range(2)]
    drain_checked(engine, 3000)

    error = guilty.result().error
    assert isinstance(error, PluginContractError), repr(error)
    assert (error.plugin, error.hook, error.rule) == ("culprit", *broken)
    assert "culprit" in str(error)
    assert broken[1] in str(error)
    others = [*early, *beside, *late]
    assert_right([handle for handle in others if handle.id not in breach.shares])
    assert [handle.result().error for handle in others if handle.id in breach.shares] == [error] * len(breach.shares)


@pytest.mark.parametrize(("broken", "breach"), _cases(at_start=True))
def test_a_broken_rule_at_start_up_is_named_and_the_executor_closed(
    broken: tuple[str, str], breach: Breach, culprit: Any, build: Callable[..., Engine], executor: FakeExecutor
) -> None:
    with pytest.raises(PluginContractError) as raised:
        build(culprit(broken[0], breach), executor=executor)
    assert (raised.value.plugin, raised.value.hook, raised.value.rule) == ("culprit", *broken)
    assert executor.closed == (broken[0] == "quantize")


def test_a_pinned_block_is_not_evicted(build: Callable[..., Engine], assert_right: Any) -> None:
    def pinned(step: Step, num_blocks: int) -> list[int]:
        return [block_id for block_id in _cached(step) if step.pool.is_pinned(block_id)]

    engine = build(Evict(pinned), num_blocks=9)
    first = _submit(engine, "first", SHARED, 20)
    drain_checked(engine, 3000)
    cached = [block_id for block_id in range(9) if engine.kv_cache.pool.is_cached(block_id)]
    engine.kv_cache.pool.pin(cached[:1])
    guilty, second = _submit(engine, GUILTY, [90] * 120, 8), _submit(engine, "second", [91] * 70, 20)
    drain_checked(engine, 3000)
    error = guilty.result().error
    assert isinstance(error, PluginContractError)
    assert error.rule == "answers ids of cached blocks that are not pinned, each once"
    assert_right([first, second])
    assert engine.kv_cache.pool.is_cached(cached[0])
