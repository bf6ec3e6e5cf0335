"""execute.simulated: no model, but what a pass would cost, on a clock of its own; for trying a policy on a million requests.

    seconds of a pass = step_ms + prefill_us * prefill tokens + decode_us * decode tokens + context_us * tokens of KV read

Tokens are made up, but always the same for a prompt and a seed.
"""

from __future__ import annotations

from pydantic import Field

from treadle import Executor, ModelInfo, StrategySettings, SyncExecutor, hookimpl
from treadle.clocks import VirtualClock
from treadle.contracts import PoolSize, PoolSpec
from treadle.errors import ConfigError
from treadle.plan import BlockCopy, Outcome, StepPlan


class SimulatedSettings(StrategySettings):
    """The model that is imagined, and what it costs. The costs are those of SmolLM2-135M in bf16 on two slow cores."""

    num_layers: int = Field(30, ge=1)
    """Layers."""
    num_kv_heads: int = Field(3, ge=1)
    """KV heads of a layer."""
    head_dim: int = Field(64, ge=1)
    """Elements of a head."""
    vocab_size: int = Field(49152, ge=2)
    """Tokens of the vocabulary."""
    max_length: int = Field(8192, ge=2)
    """Longest sequence."""
    step_ms: float = Field(12.0, ge=0)
    """What a pass costs whatever is in it: reading the weights."""
    prefill_us: float = Field(400.0, ge=0)
    """A token of prefill."""
    decode_us: float = Field(600.0, ge=0)
    """A token of decode."""
    context_us: float = Field(2.0, ge=0)
    """A token of KV that a decode reads."""
    copy_gb_s: float = Field(10.0, gt=0)
    """Speed of copies to and from swap space."""


class Simulated:
    """The strategy."""

    Settings = SimulatedSettings

    def __init__(self, settings: SimulatedSettings) -> None:
        self._settings = settings

    @hookimpl
    def execute(self) -> Executor:
        """A simulated executor."""
        return SimulatedExecutor(self._settings)


class SimulatedExecutor(SyncExecutor):
    """Adds up costs instead of computing."""

    tokenizer = None

    def __init__(self, settings: SimulatedSettings) -> None:
        self._settings = settings
        self.model = ModelInfo(
            "simulated",
            settings.num_layers,
            settings.num_kv_heads,
            settings.head_dim,
            settings.vocab_size,
            settings.max_length,
            fingerprint="simulated",
        )
        self.clock = VirtualClock()
        self._block_bytes = 0.0
        self._pool_bytes = 0.0

    def open_pool(self, spec: PoolSpec) -> PoolSize:
        """As many blocks as the memory would hold."""
        self._block_bytes = spec.block_size * spec.kv_format.bytes_per_token(self.model)
        num_blocks = spec.num_blocks or int(spec.memory_bytes // self._block_bytes)
        if num_blocks < 1:
            raise ConfigError(
                f"pool.memory={spec.memory_bytes} bytes holds no block of {self._block_bytes:.0f} bytes; raise it, or lower "
                "allocate.block_size"
            )
        self._pool_bytes = num_blocks * self._block_bytes
        return PoolSize(num_blocks, int(spec.swap_bytes // self._block_bytes))

    def run(self, plan: StepPlan) -> Outcome:
        """Move the clock, make up tokens."""
        costs = self._settings
        num_prefill = num_decode = num_read = 0
        tokens: list[tuple[int, ...]] = []
        vocab_size = costs.vocab_size
        for work in plan.works:
            if len(work.tokens) == 1:
                num_decode += 1
                num_read += work.start
            else:
                num_prefill += len(work.tokens)
            if work.sampling is None:
                tokens.append(())
            else:
                known = len(work.tokens) - work.num_drafted
                seed = work.sampling.seed or 0
                tokens.append(((work.tokens[known - 1] * 31 + (work.start + known) * 7919 + seed) % vocab_size,))
        micros = costs.prefill_us * num_prefill + costs.decode_us * num_decode + costs.context_us * num_read
        seconds = costs.step_ms / 1e3 + micros / 1e6 + self._copy_s(plan.swap_out) + self._copy_s(plan.swap_in)
        self.clock.wait(self.clock.now() + seconds)
        return Outcome(tuple(tokens))

    def describe(self) -> dict[str, str]:
        """Say that nothing is computed."""
        return {"executor": "simulated: no model, made-up tokens, a virtual clock"}

    def memory(self) -> dict[str, int]:
        """What the pool would take."""
        return {"kv_pool": int(self._pool_bytes)}

    def close(self) -> None:
        """Nothing to give back."""

    def _copy_s(self, copies: tuple[BlockCopy, ...]) -> float:
        return len(copies) * self._block_bytes / self._settings.copy_gb_s / 1e9
