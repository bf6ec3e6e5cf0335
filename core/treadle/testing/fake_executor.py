"""A fake executor: no model, but a pool of real keys and values that it reads and writes as an attention would.

The KV of a token is the token itself and its position. The next token is a checksum of all that is read through the block table,
so that a wrong block, a stale block or a missing write shows as a wrong token or an error. It needs the standard library only.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from treadle.clocks import VirtualClock
from treadle.contracts import Clock, ModelInfo, PoolSize, PoolSpec, SyncExecutor
from treadle.hookspecs import hookimpl
from treadle.plan import BlockCopy, Outcome, StepPlan, Work
from treadle.sampling_params import SamplingParams
from treadle.text import Tokenizer

Blocks = list[list[tuple[int, int] | None]]
"""By block and slot: the token and its position."""


class FakeExecutor(SyncExecutor):
    """A deterministic executor for tests. It is a plugin too: hand it to the engine among `plugins`."""

    name = "fake_executor"

    def __init__(
        self,
        *,
        vocab_size: int = 997,
        max_length: int = 4096,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        step_s: float = 0.001,
        num_swap_blocks: int = 0,
    ) -> None:
        self.model = ModelInfo("fake", 1, 1, 1, vocab_size, max_length, frozenset(eos_token_ids), fingerprint="fake")
        self.tokenizer = tokenizer
        self.clock: Clock = VirtualClock()
        self.plans: list[StepPlan] = []
        """Every plan that was run."""
        self.fail_on: set[str] = set()
        """Ids of requests whose presence makes a pass fail."""
        self.closed = False
        self._step_s = step_s
        self.num_swap_blocks = num_swap_blocks
        self._size = 0
        self._kv: Blocks = []
        self._swapped: Blocks = []

    @hookimpl
    def execute(self) -> FakeExecutor:
        """Be the executor."""
        return self

    def open_pool(self, spec: PoolSpec) -> PoolSize:
        """Empty blocks; 64 of them when the settings give no number."""
        num_blocks = spec.num_blocks or 64
        self._size = spec.block_size
        self._kv = [[None] * self._size for _ in range(num_blocks)]
        self._swapped = [[None] * self._size for _ in range(self.num_swap_blocks)]
        return PoolSize(num_blocks, self.num_swap_blocks)

    def run(self, plan: StepPlan) -> Outcome:
        """Copy, write everyone's KV, then read and sample."""
        self.plans.append(plan)
        self.clock.wait(self.clock.now() + self._step_s)
        self._copy(plan.swap_out, self._kv, self._swapped)
        self._copy(plan.swap_in, self._swapped, self._kv)
        for work in plan.works:
            self._write(work)
        failing = [work.request_id for work in plan.works if work.request_id in self.fail_on]
        if failing:
            raise RuntimeError(f"cannot compute {failing}")
        return Outcome(tuple(self._sample(work) for work in plan.works))

    def describe(self) -> dict[str, str]:
        """Say that it is a fake."""
        return {"executor": "fake, for tests"}

    def memory(self) -> dict[str, int]:
        """Nothing worth counting."""
        return {}

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def _copy(self, copies: Sequence[BlockCopy], sources: Blocks, targets: Blocks) -> None:
        for source, target in copies:
            targets[target] = list(sources[source])

    def _write(self, work: Work) -> None:
        for place, token in enumerate(work.tokens):
            position = work.start + place
            self._kv[work.block_table[position // self._size]][position % self._size] = (token, position)

    def _read(self, work: Work, num_tokens: int) -> list[int]:
        tokens = []
        for position in range(num_tokens):
            entry = self._kv[work.block_table[position // self._size]][position % self._size]
            assert entry is not None, f"{work.request_id} reads position {position}, which was never written"
            token, written_at = entry
            assert written_at == position, f"{work.request_id} reads position {position}, written as {written_at}"
            tokens.append(token)
        return tokens

    def _sample(self, work: Work) -> tuple[int, ...]:
        if work.sampling is None:
            return ()
        end = work.start + len(work.tokens)
        context = self._read(work, end)
        brought: list[int] = []
        for place in range(work.num_drafted + 1):
            known = end - work.num_drafted + place
            brought.append(next_token(context[:known], work.sampling, self.model, work.num_output + place))
            if known == end or context[known] != brought[-1]:
                break
        return tuple(brought)


def next_token(context: Sequence[int], params: SamplingParams, model: ModelInfo, num_output: int) -> int:
    """The token that follows `context`."""
    seed = 0 if params.greedy else (params.seed or 0)
    token = zlib.crc32(array("q", context).tobytes(), seed & 0xFFFFFFFF) % model.vocab_size
    banned = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos_token_ids))
    while num_output < params.min_tokens and token in banned:
        token = (token + 1) % model.vocab_size
    return token


def expected_tokens(prompt: Sequence[int], params: SamplingParams, model: ModelInfo, most: int = 4096) -> tuple[int, ...]:
    """What the fake generates for a prompt, computed without any pool: the truth that an engine's tokens are compared with."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.eos_token_ids))
    tokens = list(prompt)
    limit = min(params.max_tokens or most, model.max_length - len(prompt))
    for num_output in range(limit):
        tokens.append(next_token(tokens, params, model, num_output))
        if tokens[-1] in stops and num_output >= params.min_tokens:
            break
    return tuple(tokens[len(prompt) :])
