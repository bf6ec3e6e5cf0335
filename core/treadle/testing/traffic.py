"""Traffic for tests of policies: requests that share prefixes, differ in length and urgency, and arrive over time."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.contracts import ModelInfo, PreemptionMode
from treadle.engine import Engine
from treadle.handles import Completion, Handle
from treadle.hookspecs import hookimpl
from treadle.plan import FinishReason
from treadle.sampling_params import SamplingParams
from treadle.testing.fake_executor import expected_tokens


@dataclass(frozen=True)
class Arrival:
    """A request to come."""

    at_s: float
    """Clock time of its submission."""
    prompt: tuple[int, ...]
    params: SamplingParams
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `Engine.submit`."""


class Tally:
    """A plugin that counts what was told: how often memory was short, and what a policy did about it."""

    name = "tally"

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """By event: `preempted`, `swapped`, `resumed` requests; `evicted`, `reused`, `matched` blocks; `steps`."""

    def __getitem__(self, event: str) -> int:
        return self.counts[event]

    @hookimpl
    def request_preempted(self, mode: PreemptionMode) -> None:
        """One more victim."""
        self.counts["preempted"] += 1
        self.counts["swapped"] += mode is PreemptionMode.SWAP

    @hookimpl
    def request_resumed(self) -> None:
        """One victim back."""
        self.counts["resumed"] += 1

    @hookimpl
    def blocks_evicted(self, block_ids: Sequence[int]) -> None:
        """Blocks that were forgotten."""
        self.counts["evicted"] += len(block_ids)

    @hookimpl
    def blocks_reused(self, block_ids: Sequence[int]) -> None:
        """Cached blocks that found a user."""
        self.counts["reused"] += len(block_ids)

    @hookimpl
    def prefix_matched(self, block_ids: Sequence[int]) -> None:
        """Blocks that were not computed again."""
        self.counts["matched"] += len(block_ids)

    @hookimpl
    def step_finished(self) -> None:
        """One more step."""
        self.counts["steps"] += 1


def shared_prefix_traffic(
    num_requests: int = 30,
    *,
    seed: int = 0,
    block_size: int = 16,
    most_prompt: int = 56,
    most_output: int = 48,
    spacing_s: float = 0.003,
    num_priorities: int = 3,
) -> list[Arrival]:
    """Requests whose prompts start with one of three prefixes of up to two blocks.

    Lengths at and around whole blocks come often. Some sample, some have a salt of their own, one asks for prompt logprobs.
    """
    rng = random.Random(seed)  # noqa: S311  # has to be repeatable, not secret
    prefixes = [[rng.randrange(900) for _ in range(2 * block_size)] for _ in range(3)]
    edges = [n for blocks in (1, 2, 3) for n in (blocks * block_size - 1, blocks * block_size, blocks * block_size + 1)]
    arrivals = []
    at_s = 0.0
    for number in range(num_requests):
        at_s += rng.choice([0.0, 0.0, spacing_s, 3 * spacing_s])
        length = min(rng.choice([*edges, rng.randint(1, most_prompt)]), most_prompt)
        prompt = rng.choice(prefixes)[:length]
        prompt = prompt + [rng.randrange(900) for _ in range(length - len(prompt))]
        params = SamplingParams(
            max_tokens=rng.choice([rng.randint(1, most_output), rng.randint(most_output // 2, most_output)]),
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=number,
            stop_token_ids=(rng.randrange(900),),
            prompt_logprobs=1 if number == num_requests // 2 else None,
        )
        options = {"priority": rng.randrange(num_priorities), "cache_salt": "own" if rng.random() < 0.1 else None}
        arrivals.append(Arrival(at_s, tuple(prompt), params, options))
    return arrivals


def serve(engine: Engine, arrivals: Sequence[Arrival], most_steps: int = 20_000) -> list[Handle]:
    """Submit each arrival when its time has come and step until all is done; the books are proved after each step.

    Needs a virtual clock. Raises AssertionError when that takes more than `most_steps` steps, or when blocks are left over.
    """
    coming = deque(sorted(arrivals, key=lambda arrival: arrival.at_s))
    handles = []
    for _ in range(most_steps):
        while coming and coming[0].at_s <= engine.clock.now():
            arrival = coming.popleft()
            handles.append(engine.submit(arrival.prompt, arrival.params, **arrival.options))
        if not engine.busy:
            if not coming:
                break
            engine.clock.wait(coming[0].at_s)
            continue
        until_s = engine.step()
        engine.check_integrity()
        if until_s is not None:
            engine.clock.wait(min(until_s, coming[0].at_s) if coming else until_s)
    assert not engine.busy, f"still busy after {most_steps} steps: {engine.queues.running} {engine.queues.waiting}"
    pool = engine.kv_cache.pool
    assert pool.num_used == 0, f"{pool.num_used} blocks are used by nobody"
    assert pool.num_free + pool.num_cached == pool.num_blocks, f"{pool.num_free} free, {pool.num_cached} cached blocks"
    return handles


def right_tokens(handle: Handle, model: ModelInfo, num_places: int) -> tuple[int, ...]:
    """What the fake executor must have generated for a request in a pool of `num_places` tokens, computed without any pool."""
    request = handle.request
    prompt = request.token_ids(0, request.prompt_length)
    # the last token is never computed, so it needs no place
    return expected_tokens(prompt, request.params, model, num_places + 1 - len(prompt))


def assert_right(engine: Engine, handles: Sequence[Handle]) -> list[Completion]:
    """Each of these requests ended by itself with the right tokens; returns their completions. Needs the fake executor."""
    num_places = engine.kv_cache.pool.num_blocks * engine.kv_cache.pool.block_size
    completions = []
    for handle in handles:
        assert handle.finished, f"{handle.request!r} has not ended"
        completion = handle.completion()
        assert completion.error is None, f"{handle.request!r}: {completion.error!r}"
        ended = completion.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert ended, f"{handle.request!r} ended by {completion.finish_reason}"
        expected = right_tokens(handle, engine.info.model, num_places)
        assert completion.token_ids == expected, f"{handle.request!r}: {completion.token_ids} is not {expected}"
        completions.append(completion)
    return completions
