"""The cost model: time as stated, tokens that depend on nothing but the prompt and the seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from treadle import Engine, ModelInfo, Request, SamplingParams, hookimpl
from treadle.contracts import KVFormat, PoolSize, PoolSpec
from treadle.errors import ConfigError
from treadle.plan import BlockCopy, StepPlan, Work
from treadle.settings import load
from treadle_plugins.execute.simulated import SimulatedExecutor, SimulatedSettings

COSTS = {"step_ms": 10.0, "prefill_us": 100.0, "decode_us": 200.0, "context_us": 1.0}
GREEDY = SamplingParams()


def executor(**settings: Any) -> SimulatedExecutor:
    return SimulatedExecutor(SimulatedSettings(**{**COSTS, **settings}))


def seconds(simulated: SimulatedExecutor, *works: Work, **copies: Any) -> float:
    before_s = simulated.clock.now()
    simulated.run(StepPlan(1, works, **copies))
    return simulated.clock.now() - before_s


def test_a_pass_costs_what_the_formula_says() -> None:
    simulated = executor()
    prefill = Work("a", 0, (1,) * 30, (0, 1), None)
    decode = Work("b", 100, (1,), tuple(range(7)), GREEDY, num_output=5)
    assert seconds(simulated, prefill) == pytest.approx(0.010 + 30 * 100e-6)
    assert seconds(simulated, decode) == pytest.approx(0.010 + 200e-6 + 100 * 1e-6)
    assert seconds(simulated, prefill, decode) == pytest.approx(0.010 + 30 * 100e-6 + 200e-6 + 100 * 1e-6)


def test_copies_cost_their_bytes() -> None:
    simulated = executor(copy_gb_s=1.0)
    size = simulated.open_pool(PoolSpec(16, KVFormat(), 8, 0, 1 << 30))
    assert size.num_swap_blocks > 2
    block_bytes = 16 * KVFormat().bytes_per_token(simulated.model)
    copies = {"swap_out": (BlockCopy(0, 0),), "swap_in": (BlockCopy(1, 2),)}
    assert seconds(simulated, **copies) == pytest.approx(0.010 + 2 * block_bytes / 1e9)


def test_memory_holds_as_many_blocks_as_its_bytes() -> None:
    block_bytes = int(16 * KVFormat().bytes_per_token(executor().model))
    assert executor().open_pool(PoolSpec(16, KVFormat(), None, 5 * block_bytes + 1, 2 * block_bytes)) == PoolSize(5, 2)
    with pytest.raises(ConfigError, match=r"pool.memory=100 bytes holds no block"):
        executor().open_pool(PoolSpec(16, KVFormat(), None, 100))


def generate(prompts: Sequence[Sequence[int]], *plugins: object, **slots: Any) -> list[tuple[int, ...]]:
    values = {"execute": "simulated", "quantize": "none", "pool": {"num_blocks": 64}, **slots}
    with Engine(load(environment=False, values=values), plugins) as engine:
        done = list(engine.generate(prompts, SamplingParams(max_tokens=12, temperature=1.0, seed=3)))
        assert all(completion.error is None for completion in done)
        return [completion.token_ids for completion in done]


PROMPTS = [[number] * (40 * number) for number in range(1, 5)]


class Guess:
    """Drafts that are mostly wrong."""

    @hookimpl
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        return [[7, 8, 9][:limit] for limit in most]


@pytest.mark.parametrize(
    ("plugins", "slots"),
    [
        ((), {"budget": {"strategy": "decode_first", "max_tokens": 7}}),
        ((), {"budget": "whole_prompt"}),
        ((), {"prefix": "none"}),
        ((), {"admit": {"strategy": "continuous", "max_batch_size": 1}}),
        ((), {"pool": {"num_blocks": 5}, "preempt": "recompute"}),
        ((Guess(),), {}),
    ],
    ids=["chunks", "whole prompts", "no reuse", "one at a time", "preemption", "drafts"],
)
def test_tokens_are_the_same_whatever_the_policy(plugins: Sequence[object], slots: dict[str, Any]) -> None:
    assert generate(PROMPTS, *plugins, **slots) == generate(PROMPTS)


def test_seeds_and_prompts_make_a_difference() -> None:
    tokens = generate([[1, 2, 3], [1, 2, 4], [1, 2, 3]])
    assert tokens[0] == tokens[2] != tokens[1]


def test_it_says_what_it_is() -> None:
    simulated = executor(vocab_size=100)
    assert isinstance(simulated.model, ModelInfo)
    assert simulated.model.vocab_size == 100
    assert simulated.tokenizer is None
    assert "simulated" in simulated.describe()["executor"]
    simulated.close()
