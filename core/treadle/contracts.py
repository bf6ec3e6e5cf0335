"""Protocols that plugins implement, and the small answers that hooks return."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from treadle.plan import Outcome, StepPlan

if TYPE_CHECKING:
    from treadle.request import Request


# --- answers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accept:
    """Queue the request as it is."""


@dataclass(frozen=True)
class Trim:
    """Queue the request with its prompt cut to its last `max_prompt_tokens` tokens."""

    max_prompt_tokens: int


@dataclass(frozen=True)
class Refuse:
    """Turn the request away. `retry_after_s`: seconds until a new attempt may succeed; None when it never will."""

    reason: str
    retry_after_s: float | None = None


class Admission(enum.Enum):
    """What `admit` says about one waiting request."""

    START = "start"
    """Start it in this step, if tokens and blocks are there."""
    SKIP = "skip"
    """Leave it waiting and look at the next one."""
    STOP = "stop"
    """Look at no further waiting request in this step."""


@dataclass(frozen=True)
class Open:
    """Up to `most` waiting requests may start in this step; None means any number, 0 none until something ends."""

    most: int | None = None


@dataclass(frozen=True)
class NotBefore:
    """No waiting request starts before the clock reads `time_s`; the engine steps again then at the latest."""

    time_s: float


class PreemptionMode(enum.Enum):
    """What becomes of a victim's KV."""

    RECOMPUTE = "recompute"
    """Its blocks are given up; full ones stay indexed for it to match when it resumes."""
    SWAP = "swap"
    """Blocks of its own are copied to swap space, shared ones keep their reference; it resumes where it was."""


@dataclass(frozen=True)
class Preemption:
    """Send `victim` back to the waiting requests."""

    victim: Request
    mode: PreemptionMode = PreemptionMode.RECOMPUTE


@runtime_checkable
class Budget(Protocol):
    """The tokens of one step. Made by the `budget` hook, asked by the core for one request after another."""

    @property
    def may_shrink(self) -> bool:
        """Whether the core may compute fewer tokens of a prefill than `take` granted, for want of blocks."""
        ...

    def take(self, request: Request, wanted: int) -> int:
        """Grant 0 to `wanted` tokens to `request` in this step."""
        ...


@dataclass(frozen=True)
class Load:
    """How busy the engine is when a request arrives."""

    num_waiting: int
    waiting_tokens: int
    """Prompt tokens of all waiting requests."""
    num_running: int
    used_fraction: float
    """Share of the pool's blocks that running requests hold, 0 to 1."""


# --- the executor's side --------------------------------------------------------------------------------------------------


@runtime_checkable
class Clock(Protocol):
    """Where time comes from. Never goes backwards."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        ...

    def wait(self, until_s: float) -> bool:
        """For a virtual clock: jump to `until_s` and return True. A real clock returns False: the caller waits instead."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Between text and token ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands: special tokens that the model expects at the start are added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`; special tokens are left out, bytes that are no whole character yet come out as U+FFFD."""
        ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Token ids of a conversation ready for the assistant's answer; None when the model has no chat template."""
        ...


@dataclass(frozen=True)
class ModelInfo:
    """What the core and the plugins need to know of a model."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    """Most tokens of prompt and output together."""
    eos_token_ids: frozenset[int] = frozenset()
    dtype_bytes: int = 2
    """Bytes of one element of KV that is kept whole."""
    fingerprint: str = ""
    """Differs where KV computed by one model must not serve another: weights, adapter, precision."""


@dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored in the pool. The default keeps both whole, in the model's precision."""

    key_bits: int | None = None
    """None keeps keys whole."""
    value_bits: int | None = None
    granularity: str = "token_head"
    """What shares one scale: `token_head` (each token of each head) or `head_channel` (static, from a calibration)."""
    group: int | None = None
    """Elements that share a scale within a head; None means the whole head."""
    symmetric: bool = True
    rotation: int | None = None
    """Size of the Hadamard blocks by which keys and values are rotated before they are stored; None means none."""
    whole_heads: frozenset[tuple[int, int]] = frozenset()
    """(layer, KV head) pairs kept whole."""
    whole_layers: frozenset[int] = frozenset()
    scale_bytes: int = 2
    history_dependent: bool = False
    """A stored token depends on tokens stored before: refused together with prefix reuse, chunked prefill and recompute."""

    @property
    def name(self) -> str:
        """Short name, such as `k4v8`; `whole` when nothing is quantized."""
        if self.key_bits is None and self.value_bits is None:
            return "whole"
        return f"k{self.key_bits or 'w'}v{self.value_bits or 'w'}" + (f"h{self.rotation}" if self.rotation else "")

    def bytes_per_token(self, model: ModelInfo) -> float:
        """Bytes that one token's KV takes in the pool, scales included, over all layers."""
        whole = 2 * model.head_dim * model.dtype_bytes
        packed = self._packed_bytes(model, self.key_bits) + self._packed_bytes(model, self.value_bits)
        kept = {(layer, head) for layer in self.whole_layers for head in range(model.num_kv_heads)} | self.whole_heads
        return whole * len(kept) + packed * (model.num_layers * model.num_kv_heads - len(kept))

    def _packed_bytes(self, model: ModelInfo, bits: int | None) -> float:
        if bits is None:
            return model.head_dim * model.dtype_bytes
        scales = -(-model.head_dim // (self.group or model.head_dim)) if self.granularity == "token_head" else 0
        return model.head_dim * bits / 8 + scales * self.scale_bytes * (1 if self.symmetric else 2)


@dataclass(frozen=True)
class PoolSpec:
    """The pool that an executor is to make room for."""

    block_size: int
    kv_format: KVFormat
    num_blocks: int | None
    """Blocks of the pool; None means as many as `memory_bytes` hold."""
    memory_bytes: int
    swap_bytes: int = 0
    """Host memory for blocks that are swapped out."""


@dataclass(frozen=True)
class PoolSize:
    """The pool that an executor made room for."""

    num_blocks: int
    num_swap_blocks: int = 0


@runtime_checkable
class Executor(Protocol):
    """Computes plans. Owns weights, KV tensors, swap space, tokenizer and sampling."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None when the executor deals in token ids only."""
        ...

    @property
    def clock(self) -> Clock: ...

    def open_pool(self, spec: PoolSpec) -> PoolSize:
        """Make room for KV. Called once, before the first `run`. Raises ConfigError when it cannot."""
        ...

    def run(self, plan: StepPlan) -> Outcome:
        """Copy, compute and sample. May raise: then nothing that the plan was to write is relied on."""
        ...

    def describe(self) -> dict[str, str]:
        """Facts for `treadle explain`, such as device, precision and attention backend."""
        ...

    def close(self) -> None:
        """Give everything back; called once."""
        ...


@dataclass(frozen=True)
class EngineInfo:
    """What a plugin may know of the engine that it is part of; told once, by `engine_started`."""

    model: ModelInfo
    kv_format: KVFormat
    block_size: int
    num_blocks: int
    num_swap_blocks: int
    clock: Clock


@dataclass(frozen=True)
class StepReport:
    """What a step did and how the pool stands after it; told by `step_finished`."""

    step: int
    started_s: float
    ended_s: float
    num_works: int
    num_tokens: int
    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int
    finished: tuple[Request, ...] = field(default=())
