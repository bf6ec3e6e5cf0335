"""The random life of tests/core/test_state_machine.py over a real model: codecs, swap, priorities, salts and pins together.

Every token is compared with a plain model that attends over requantized keys and values, and every slot of the pool that nobody
uses holds NaN. The default run takes half a minute, and longer where kernels have to be compiled;
`--hypothesis-profile=soak` searches for hours.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.reference import Poisoner, attend_requantized  # noqa: E402
from support.tiny import VOCAB_SIZE, info_of, tiny_config, tiny_model  # noqa: E402
from treadle import Engine, FinishReason, Handle, KVFormat, Request, SamplingParams, Step, hookimpl  # noqa: E402
from treadle.contracts import PoolSize, PoolSpec, PreemptionMode  # noqa: E402
from treadle.errors import ExecutionError  # noqa: E402
from treadle.plan import Outcome, StepPlan  # noqa: E402
from treadle.registry import Registry  # noqa: E402
from treadle.testing import VirtualClock, drain_checked, make_engine  # noqa: E402
from treadle_plugins.execute.torch_executor.executor import TorchExecutor  # noqa: E402

BLOCK = 16
REGISTRY = Registry.installed()
PLAIN = "plain, for the state machine"
"""Name of the plain attention with transformers."""
NEAR = 2e-2
"""Tokens whose logits lie this close to the best may follow too: a code that rounding turned may turn the choice."""
_NUMBERS = random.Random(8)  # noqa: S311  # tokens, not secrets
_TEXTS = [[_NUMBERS.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(2)]
PROMPTS = [
    *(tuple(text[:length]) for text in _TEXTS for length in (1, BLOCK, BLOCK + 1, 2 * BLOCK, 44)),
    # two that share a block and two blocks, then go their own way
    (*_TEXTS[0][:BLOCK], *_TEXTS[1][:5]),
    (*_TEXTS[0][: 2 * BLOCK], *_TEXTS[1][40:55]),
]
"""Few, so that what follows is computed once for each codec."""


# --- what is drawn --------------------------------------------------------------------------------------------------------------

WHOLE: dict[str, st.SearchStrategy[Any]] = {
    "whole_layers": st.sampled_from([(), (1,)]),
    "whole_heads": st.sampled_from([(), ((0, 1),)]),
}
VICTIM: dict[str, st.SearchStrategy[Any]] = {
    "victim": st.sampled_from(["last_admitted", "lowest_priority", "fewest_tokens_lost", "most_blocks_freed"]),
    "partial": st.booleans(),
}
SETTINGS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "quantize.int8": {**WHOLE, "symmetric": st.booleans(), "rotation": st.sampled_from(["none", 8])},
    "quantize.int4": {
        **WHOLE,
        "group": st.sampled_from(["auto", 4, "head"]),
        "symmetric": st.booleans(),
        "rotation": st.sampled_from(["auto", "none", 4]),
    },
    "quantize.mixed": {
        **WHOLE,
        "key_bits": st.sampled_from([8, 4, 2, "whole"]),
        "value_bits": st.sampled_from([8, 4, 2]),
        "key_group": st.sampled_from(["auto", 4]),
        "value_symmetric": st.sampled_from([None, True, False]),
    },
    "order.priority": {"preempt": st.sampled_from([True, True, False])},
    "admit.continuous": {"max_batch_size": st.sampled_from([2, 8])},
    "budget.decode_first": {"max_tokens": st.sampled_from([3, 24, 2048])},
    "preempt.recompute": VICTIM,
    "preempt.swap": VICTIM,
    "preempt.auto": {**VICTIM, "copy_us": st.sampled_from([1.0, 1e6])},
}
"""Settings to draw from; strategies that are not named here are used as they come."""
STRATEGIES = {
    "order": ["fcfs", "priority", "priority"],
    "admit": ["continuous"],
    "budget": ["decode_first"],
    "prefix": REGISTRY.names("prefix"),
    "allocate": ["paged", "coalescing"],
    "evict": REGISTRY.names("evict"),
    # what only swap does needs much else to come together, so it comes often
    "preempt": [*REGISTRY.names("preempt"), "swap"],
}
COMPILED: list[dict[str, Any]] = [
    {"strategy": "none"},
    {"strategy": "int4"},
    {"strategy": "int4", "whole_heads": ((0, 1),), "whole_layers": (1,)},
]
"""For the numba backend: kernels for each form of a block take seconds to compile."""


def quantized(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Tables of this quantize strategy."""
    return st.fixed_dictionaries({"strategy": st.just(name), **SETTINGS.get(f"quantize.{name}", {})})


CASES = {
    **{name: ("torch", quantized(name)) for name in REGISTRY.names("quantize")},
    "compiled": ("cpu", st.sampled_from(COMPILED)),
}
"""Attention backends with the codecs that they are tried with. Mere draws would not give each its share of the examples."""


@dataclass
class Setup:
    """An engine to be."""

    slots: dict[str, Any]
    num_blocks: int
    num_swap_blocks: int


@st.composite
def setups(draw: st.DrawFn, case: str) -> Setup:
    attention, codecs = CASES[case]
    slots: dict[str, Any] = {"execute": "torch", "attention": attention, "quantize": draw(codecs, label="quantize")}
    for slot, names in STRATEGIES.items():
        name = draw(st.sampled_from(names), label=slot)
        table = draw(st.fixed_dictionaries(SETTINGS.get(f"{slot}.{name}", {})), label=f"{slot}.{name}")
        slots[slot] = {"strategy": name, **table}
    # swap refuses to start without space
    sizes = [2, 40] if slots["preempt"]["strategy"] == "swap" else [0, 2, 40]
    return Setup(
        slots,
        num_blocks=draw(st.sampled_from([4, 5, 7, 10]), label="num_blocks"),
        num_swap_blocks=draw(st.sampled_from(sizes), label="num_swap_blocks"),
    )


# --- what it is compared with -------------------------------------------------------------------------------------------------


class Reference:
    """A tiny model, and what it says without any pool: attention over requantized keys and values, all tokens in one pass."""

    def __init__(self) -> None:
        transformers.AttentionMaskInterface.register(PLAIN, lambda *_, **__: None)
        config = tiny_config("llama", num_hidden_layers=2)
        self.model = tiny_model(config)
        transformers.AttentionInterface.register(PLAIN, attend_requantized)
        self._plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=PLAIN).eval()
        self._plain.load_state_dict(self.model.state_dict())
        self.following = lru_cache(50_000)(self._following)

    def _following(self, form: KVFormat, context: tuple[int, ...]) -> frozenset[int]:
        """Tokens that may follow: the best one, and those that come near."""
        transformers.AttentionInterface.register(PLAIN, partial(attend_requantized, form))
        with torch.inference_mode():
            logits = self._plain(torch.tensor([context]), use_cache=False).logits[0, -1]
        return frozenset((logits > logits.max() - NEAR).nonzero().flatten().tolist())


# --- what the engine runs on --------------------------------------------------------------------------------------------------


class UnsteadyTorch(TorchExecutor):
    """The torch executor by a virtual clock, with swap space counted in blocks, that can fail before or after it has computed."""

    clock_s = 0.001
    """Of a step, and of each block that is copied."""

    def __init__(self, *args: Any, num_swap_blocks: int, **options: Any) -> None:
        super().__init__(*args, clock=VirtualClock(), **options)
        self._num_swap_blocks = num_swap_blocks
        self.fail_next = False
        """Fail the next pass of several requests; then each of them can be computed."""
        self.fail_on: set[str] = set()
        """Ids of requests whose presence makes a pass fail."""

    def open_pool(self, spec: PoolSpec) -> PoolSize:
        """As asked, with room for so many swapped blocks."""
        block_bytes = spec.kv_format.bytes_per_token(self.model) * spec.block_size
        size = super().open_pool(replace(spec, swap_bytes=int(block_bytes * self._num_swap_blocks)))
        assert size.num_swap_blocks == self._num_swap_blocks
        return size

    def run(self, plan: StepPlan) -> Outcome:
        """Compute, let the time pass that it took, and fail where that is wanted."""
        num_copied = len(plan.swap_out) + len(plan.swap_in)
        self.clock.wait(self.clock.now() + self.clock_s * (1 + plan.num_tokens / BLOCK + num_copied))
        failure = self._failure(plan)
        if failure is not None and plan.step % 2:
            raise failure
        outcome = super().run(plan)
        if failure is not None:
            raise failure
        return replace(outcome, copy_s=self.clock_s * num_copied)

    def _failure(self, plan: StepPlan) -> RuntimeError | None:
        if self.fail_next and len(plan.works) > 1:
            self.fail_next = False
            return RuntimeError("a passing weakness")
        failing = sorted(work.request_id for work in plan.works if work.request_id in self.fail_on)
        return RuntimeError(f"cannot compute {failing}") if failing else None


class TinyModel:
    """A plugin that brings the executor; the strategy `torch` brings its hooks."""

    name = "tiny_model"

    def __init__(self, truth: Reference, num_swap_blocks: int) -> None:
        self._model = copy.deepcopy(truth.model)
        self._num_swap_blocks = num_swap_blocks
        self.executor: UnsteadyTorch

    @hookimpl
    def execute(self, hooks: Any) -> UnsteadyTorch:
        self.executor = UnsteadyTorch(
            self._model,
            info_of(self._model),
            None,
            choose_attention=lambda spec: hooks.attention(spec=spec),
            num_swap_blocks=self._num_swap_blocks,
        )
        return self.executor


class FreePoisoner(Poisoner):
    """Fills every slot again once its block is free."""

    def __init__(self) -> None:
        super().__init__()
        self._freed: set[int] = set()

    @hookimpl
    def blocks_freed(self, block_ids: Sequence[int]) -> None:
        self._freed.update(block_ids)

    @hookimpl
    @torch.inference_mode()
    def step_committed(self, step: Step) -> None:
        """Not before: what is freed while a step is planned may still be copied out in it."""
        rows = torch.tensor([block_id for block_id in self._freed if step.pool.is_free(block_id)], dtype=torch.int64)
        for tensor in self.backend.tensors():
            tensor[rows] = float("nan") if tensor.is_floating_point() else 255
        self._freed.clear()


class Ledger:
    """A plugin that knows for whom each indexed block was filled, and with which tokens; and counts what came to pass."""

    name = "ledger"

    def __init__(self, met: Counter[str]) -> None:
        self._met = met
        self._blocks: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self._swapped: set[str] = set()
        self._asked_by: Request | None = None
        self.wrong: list[str] = []
        """Matches that may not be."""

    @hookimpl
    def blocks_filled(self, request: Request, block_ids: Sequence[int]) -> None:
        """Of a request that shares: with all tokens up to the block's end, since keys and values depend on all of them."""
        if not request.shares:
            self.wrong.append(f"{request} leaves blocks")
        for block_id in block_ids:
            end = (request.block_table.index(block_id) + 1) * BLOCK
            self._blocks[block_id] = request.cache_salt, request.token_ids(0, end)

    @hookimpl
    def blocks_evicted(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._blocks.pop(block_id)

    @hookimpl
    def prefix_matched(self, request: Request, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            end = (request.block_table.index(block_id) + 1) * BLOCK
            if not request.shares or self._blocks.get(block_id) != (request.cache_salt, request.token_ids(0, end)):
                self.wrong.append(f"{request} with salt {request.cache_salt} got block {block_id}: {self._blocks.get(block_id)}")
        if block_ids:
            self._met["matched under a salt" if request.cache_salt else "matched"] += 1
            return
        first = request.token_ids(0, BLOCK)
        if any(tokens == first and salt != request.cache_salt for salt, tokens in self._blocks.values()):
            self._met["kept apart by a salt"] += 1

    @hookimpl(tryfirst=True)  # only listens
    def preempt(self, request: Request) -> None:
        self._asked_by = request

    @hookimpl
    def request_preempted(self, request: Request, mode: PreemptionMode) -> None:
        if mode is PreemptionMode.SWAP:
            self._swapped.add(request.id)
            self._met["swapped"] += 1
        else:
            self._swapped.discard(request.id)
            self._met["to be recomputed, in part" if request.num_computed else "to be recomputed"] += 1
        if self._asked_by is not None and self._asked_by.is_waiting and self._asked_by.priority > request.priority:
            self._met["preempted by a more urgent one"] += 1
        self._asked_by = None

    @hookimpl
    def request_resumed(self, request: Request) -> None:
        if request.id in self._swapped and request.num_computed:
            self._met["back from swap space"] += 1
        self._swapped.discard(request.id)


# --- the machine --------------------------------------------------------------------------------------------------------------


@dataclass
class Fate:
    """What may become of a request."""

    handle: Handle
    prompt: tuple[int, ...]
    num_checked: int = 0
    may_fail: bool = False
    cancelled: bool = False
    ended: bool = False


class TorchMachine(RuleBasedStateMachine):
    """The engine under a random life."""

    engine: Engine

    def __init__(self, case: str, truth: Reference, met: Counter[str]) -> None:
        super().__init__()
        self.case, self.truth, self.met = case, truth, met
        self.fates: list[Fate] = []

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        self.setup = setup = data.draw(setups(self.case), label="setup")
        model = TinyModel(self.truth, setup.num_swap_blocks)
        self.ledger = Ledger(self.met)
        plugins = [FreePoisoner(), self.ledger]
        sizes = {"num_blocks": setup.num_blocks, "swap_memory": setup.num_swap_blocks}
        self.engine = make_engine(model, *plugins, **sizes, registry=REGISTRY, **setup.slots)
        self.executor = model.executor
        self.form = self.engine.info.kv_format
        self.met[f"engine: {self.case}"] += 1

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.run_to_the_end()
            self.engine.close()

    # --- what callers do ------------------------------------------------------------------------------------------------------

    @rule(
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.sampled_from([1, 2, 9, 20]),
        n=st.sampled_from([1, 1, 1, 3]),
        priority=st.integers(0, 2),
        cache_salt=st.sampled_from([None, None, "a", "b"]),
        lasting=st.sampled_from([{}, {}, {}, {"reuse": False}, {"pin_s": 0.02}, {"pin_s": 60.0}]),
    )
    def submit(
        self, prompt: tuple[int, ...], max_tokens: int, n: int, priority: int, cache_salt: str | None, lasting: Mapping[str, Any]
    ) -> None:
        """Anything that the pool can hold."""
        max_tokens = min(max_tokens, self.setup.num_blocks * BLOCK + 1 - len(prompt))
        params = SamplingParams(max_tokens=max_tokens)
        handles = self.engine.submit_group(prompt, params, n, priority=priority, cache_salt=cache_salt, **lasting)
        self.fates += [Fate(handle, prompt) for handle in handles]

    @rule(
        prompts=st.lists(st.sampled_from([p for p in PROMPTS if len(p) > BLOCK]), min_size=2, max_size=4),
        priorities=st.sampled_from([(0, 0, 0, 0), (0, 1, 2, 2), (0, 2, 0, 2), (1, 0, 2, 1)]),
        num_steps=st.sampled_from([1, 3, 8]),
        failing=st.booleans(),
        cache_salt=st.sampled_from([None, None, "a"]),
        lasting=st.sampled_from([{}, {}, {"pin_s": 0.02}, {"reuse": False}]),
    )
    def crowd(
        self,
        prompts: Sequence[tuple[int, ...]],
        priorities: Sequence[int],
        num_steps: int,
        failing: bool,
        cache_salt: str | None,
        lasting: Mapping[str, Any],
    ) -> None:
        """Requests that do not fit together, one after the other: somebody gives way, often to a more urgent one."""
        for prompt, priority in zip(prompts, priorities, strict=False):
            self.submit(prompt, 20, 1, priority, cache_salt, lasting)
            self.executor.fail_next = self.executor.fail_next or failing
            self.step_on(num_steps)

    @precondition(lambda self: self.fates)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        fate = data.draw(st.sampled_from(self.fates[-6:]), label="whom")
        fate.cancelled = True
        fate.handle.cancel()

    # --- what happens ---------------------------------------------------------------------------------------------------------

    @rule(num_steps=st.sampled_from([1, 1, 5, 20]))
    def step_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    @rule(seconds=st.sampled_from([0.005, 0.1]))
    def let_time_pass(self, seconds: float) -> None:
        self.engine.clock.wait(self.engine.clock.now() + seconds)

    @precondition(lambda self: self.fates)
    @rule(data=st.data())
    def make_fail(self, data: st.DataObject) -> None:
        """A request whose computation fails from now on, and the whole pass with it."""
        fate = data.draw(st.sampled_from(self.fates[-6:]), label="whom")
        fate.may_fail = True
        self.executor.fail_on.add(fate.handle.id)

    @rule()
    def make_fail_once(self) -> None:
        """The next pass of several requests fails: nobody may suffer."""
        self.executor.fail_next = True

    @rule()
    def run_to_the_end(self) -> None:
        """No more than so many steps until all is done, and then nothing is left in the pool; pins expire."""
        live = [fate.handle.request for fate in self.fates if not fate.handle.finished]
        most = 200 + 60 * sum(request.prompt_length + 20 for request in live)
        drain_checked(self.engine, most, self.step)
        assert all(fate.ended for fate in self.fates)
        self.fates.clear()
        self.engine.clock.wait(self.engine.clock.now() + 100.0)
        self.step()
        assert self.engine.kv_cache.pool.num_pinned == 0

    # --- proof ----------------------------------------------------------------------------------------------------------------

    def step(self) -> float | None:
        pool = self.engine.kv_cache.pool
        num_pinned = pool.num_pinned
        until_s = self.engine.step()
        self.met["unpinned"] += pool.num_pinned < num_pinned
        self.engine.check_integrity()
        assert not self.ledger.wrong, self.ledger.wrong
        for fate in self.fates:
            if not fate.ended:
                self._check(fate)
        return until_s

    def _check(self, fate: Fate) -> None:
        """The tokens so far are right, and who ended had a reason."""
        request = fate.handle.request
        tokens = request.token_ids()
        for end in range(len(fate.prompt) + fate.num_checked, len(tokens)):
            right = self.truth.following(self.form, tokens[:end])
            assert tokens[end] in right, f"{request}: {tokens[end]} follows {tokens[:end]} where only {set(right)} may"
        fate.num_checked = request.num_output
        if not fate.handle.finished:
            return
        fate.ended = True
        done = fate.handle.completion()
        if done.finish_reason is FinishReason.LENGTH:
            assert request.num_output == request.params.max_tokens
        elif done.finish_reason is FinishReason.CANCELLED:
            assert fate.cancelled, request
        else:
            assert fate.may_fail, f"{request} failed: {done.error!r}"
            assert isinstance(done.error, ExecutionError), done.error


EVENTS = (
    "back from swap space",
    "kept apart by a salt",
    "matched",
    "matched under a salt",
    "preempted by a more urgent one",
    "swapped",
    "to be recomputed",
    "unpinned",
)
"""What has to come to pass in one case or another."""


@pytest.fixture(scope="module")
def truth() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def met() -> Counter[str]:
    return Counter()


@pytest.mark.timeout(0)  # a soak takes as long as it takes
@pytest.mark.parametrize("case", CASES)
def test_a_random_life(case: str, truth: Reference, met: Counter[str]) -> None:
    share = settings(max_examples=max(1, settings().max_examples // 20))
    run_state_machine_as_test(lambda: TorchMachine(case, truth, met), settings=share)


def test_everything_came_to_pass(met: Counter[str]) -> None:
    """Otherwise the lives above are too quiet to prove anything."""
    print(*(f"{times:6} {event}" for event, times in sorted(met.items())), sep="\n")
    if not all(met[f"engine: {case}"] for case in CASES):
        pytest.skip("only some of the cases were run")
    assert not [event for event in EVENTS if not met[event]]
