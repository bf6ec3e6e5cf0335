"""Protocols that plugins implement, and the small answers that hooks return."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from treadle.plan import Outcome, StepPlan
from treadle.request import Request
from treadle.text import Tokenizer

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
    NO_ROOM = "no_room"
    """The same, for want of blocks alone: where urgent requests preempt, it may have those of less urgent ones."""


@dataclass(frozen=True)
class Match:
    """What a waiting request would reuse if it started now, and what its start would take. Nothing is taken yet."""

    block_ids: tuple[int, ...] = ()
    """Indexed blocks that hold its next tokens, as the core has verified."""
    num_tokens: int = 0
    """Tokens in them."""
    num_blocks_needed: int = 0
    """Blocks that all its known tokens would take from `pool.num_available`: new ones, those to swap in, and those of the match
    that are cached now."""


@dataclass(frozen=True)
class Open:
    """Up to `most` waiting requests may start in this step; None means any number, 0 none until something ends."""

    most: int | None = None
    full: bool = False
    """With `most=0`: whether it is a place alone that is lacking, so that a more urgent request may take one by preemption. A
    promise: once a running request has given up its place, the gate opens in this same step."""


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
    num_blocks: int | None = None
    """Take only this many blocks, from the end of its table; None takes all. It keeps the others while it waits, and gives them
    up too when somebody cannot go on without."""


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
    """Differs where KV computed by one model must not serve another: weights, precision."""
    adapters: frozenset[str] = frozenset()
    """Names of the adapters that requests may ask for."""


SCALE_BYTES = 2
"""Bytes of one scale or minimum that is stored beside the codes: half precision."""


@dataclass(frozen=True)
class StaticChannels:
    """Scales that a calibration found once and for all, one for each channel of each head: [layer][head][channel]."""

    scales: tuple[tuple[tuple[float, ...], ...], ...]
    """Value of one step of the code."""
    minima: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    """Value of code 0; None for symmetric codes."""


@dataclass(frozen=True)
class KeyBalance:
    """What a calibration found to make keys easy to quantize, for each channel of each head: [layer][head][channel].

    `(key - center) / factor` is stored and meets `query * factor`: a query's product with the centre is the same for all keys, so
    softmax does not see it.
    """

    factors: tuple[tuple[tuple[float, ...], ...], ...]
    centers: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    """None where there are none; only without them may scores be capped, as some models do."""


@dataclass(frozen=True)
class KVFormat:
    """How keys and values are stored in the pool: pure data, which attention backends match against what they read.

    The default keeps both whole, in the model's precision. Quantized elements are codes of a few bits, and a code stands for
    `minimum + code * scale` (asymmetric) or `(code - 2 ** (bits - 1)) * scale` (symmetric). Scales are stored for each token and
    head, or for each group of channels within it; or they are static, one for each channel of each head.
    """

    key_bits: int | None = None
    """None keeps keys whole."""
    value_bits: int | None = None
    """None keeps values whole."""
    key_group: int | None = None
    """Channels of a key that share a scale; None means the whole head."""
    value_group: int | None = None
    """The same of a value."""
    key_symmetric: bool = True
    """Whether keys have a scale only, or a minimum too."""
    value_symmetric: bool = True
    """The same of values."""
    key_channels: StaticChannels | None = field(default=None, hash=False, repr=False)
    """Static scales of keys; then none are stored, and `key_group` and `key_symmetric` say nothing."""
    value_channels: StaticChannels | None = field(default=None, hash=False, repr=False)
    """The same of values."""
    key_balance: KeyBalance | None = field(default=None, hash=False, repr=False)
    """Makes channels of keys alike before they are rotated and quantized."""
    rotation: int | None = None
    """Size of the Hadamard blocks by which what is quantized is rotated first; None means none."""
    whole_heads: frozenset[tuple[int, int]] = frozenset()
    """(layer, KV head) pairs whose keys and values are kept whole."""
    whole_keys: frozenset[tuple[int, int]] = frozenset()
    """(layer, KV head) pairs whose keys alone are kept whole."""
    whole_layers: frozenset[int] = frozenset()
    """Layers kept whole."""
    scheme: str = "linear"
    """Arithmetic and layout of the codes. A codec that works otherwise takes a name of its own, and brings a backend."""
    history_dependent: bool = False
    """A stored token depends on tokens stored before: refused together with prefix reuse, chunked prefill and recompute."""

    @property
    def name(self) -> str:
        """Short name such as `k4v8h64`; `whole` when nothing is quantized."""
        if self.scheme == "linear" and self.key_bits is None and self.value_bits is None:
            return "whole"
        key = _side_name(self.key_bits, self.key_group, self.key_symmetric, self.key_channels)
        key += "b" if self.key_balance else ""
        value = _side_name(self.value_bits, self.value_group, self.value_symmetric, self.value_channels)
        scheme = "" if self.scheme == "linear" else f"{self.scheme}:"
        return f"{scheme}k{key}v{value}" + (f"h{self.rotation}" if self.rotation else "")

    def keeps_keys(self, layer: int, head: int) -> bool:
        """Whether the keys of a head are kept whole."""
        return self.key_bits is None or self._keeps(layer, head) or (layer, head) in self.whole_keys

    def keeps_values(self, layer: int, head: int) -> bool:
        """Whether the values of a head are kept whole."""
        return self.value_bits is None or self._keeps(layer, head)

    def bytes_per_token(self, model: ModelInfo) -> float:
        """Bytes that one token's KV takes in the pool, scales included, over all layers."""
        whole = model.head_dim * model.dtype_bytes
        key = _packed_bytes(model, self.key_bits, self.key_group, self.key_symmetric, self.key_channels)
        value = _packed_bytes(model, self.value_bits, self.value_group, self.value_symmetric, self.value_channels)
        heads = [(layer, head) for layer in range(model.num_layers) for head in range(model.num_kv_heads)]
        keys = sum(whole if self.keeps_keys(*head) else key for head in heads)
        return keys + sum(whole if self.keeps_values(*head) else value for head in heads)

    def _keeps(self, layer: int, head: int) -> bool:
        return layer in self.whole_layers or (layer, head) in self.whole_heads


def _side_name(bits: int | None, group: int | None, symmetric: bool, channels: StaticChannels | None) -> str:
    if bits is None:
        return "w"
    if channels is not None:
        return f"{bits}c"
    return str(bits) + (f"g{group}" if group else "") + ("" if symmetric else "a")


def _packed_bytes(
    model: ModelInfo, bits: int | None, group: int | None, symmetric: bool, channels: StaticChannels | None
) -> float:
    """Bytes of one token of one head that is quantized."""
    scales = 0 if channels is not None else -(-model.head_dim // (group or model.head_dim)) * (1 if symmetric else 2)
    return model.head_dim * (bits or 0) / 8 + scales * SCALE_BYTES


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
    """Computes plans. Owns weights, KV tensors, swap space, tokenizer and sampling.

    A pass is launched, then collected. An executor that computes within one call derives from SyncExecutor and has a `run`.
    """

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None when the executor deals in token ids only."""
        ...

    @property
    def clock(self) -> Clock: ...

    def open_pool(self, spec: PoolSpec) -> PoolSize:
        """Make room for KV. Called once, before the first `launch`. Raises ConfigError when it cannot."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether `launch` returns before the pass is done: then what the step before brought is told meanwhile."""
        ...

    def launch(self, plan: StepPlan) -> None:
        """Begin to copy, compute and sample. May raise: then nothing that the plan was to write is relied on."""
        ...

    def collect(self) -> Outcome:
        """Wait for the pass that was launched last, and say what it brought. May raise, as `launch`."""
        ...

    def describe(self) -> dict[str, str]:
        """Facts for `treadle explain`, such as device, precision and attention backend."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes by part, as far as the executor knows them: `weights`, `kv_pool`, `swap_space`."""
        ...

    def close(self) -> None:
        """Give everything back; called once."""
        ...


class SyncExecutor:
    """Base of executors that compute a pass in one call, `run`."""

    overlaps = False
    _launched: StepPlan | None = None

    def run(self, plan: StepPlan) -> Outcome:
        """Copy, compute and sample. May raise: then nothing that the plan was to write is relied on."""
        raise NotImplementedError

    def launch(self, plan: StepPlan) -> None:
        """Keep the plan for `collect`."""
        self._launched = plan

    def collect(self) -> Outcome:
        """Run it."""
        plan, self._launched = self._launched, None
        assert plan is not None, "collect() without launch()"
        return self.run(plan)


@dataclass(frozen=True)
class EngineInfo:
    """What a plugin may know of the engine that it is part of; told once, by `engine_started`."""

    model: ModelInfo
    kv_format: KVFormat
    block_size: int
    num_blocks: int
    num_swap_blocks: int
    clock: Clock
    memory: Callable[[], Mapping[str, int]] = dict
    """Bytes by part, see Executor.memory."""


@dataclass(frozen=True)
class StepReport:
    """What a step did and how the pool stood after it: frozen, since it may be told while the next pass runs."""

    step: int
    started_s: float
    ended_s: float
    num_works: int
    num_tokens: int
    num_prefill_tokens: int
    num_swapped: int
    """Blocks copied to and from swap space."""
    copy_s: float
    """Seconds that the executor spent on those copies."""
    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int
    finished: tuple[Request, ...] = field(default=())
