"""TorchExecutor: one forward pass of a transformers model over a plan's packed tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from treadle.contracts import Clock, KVFormat, ModelInfo, PoolSize, PoolSpec, SyncExecutor
from treadle.errors import ConfigError, ExecutionError, ModelError, TreadleError
from treadle.plan import Outcome, StepPlan, Work
from treadle.text import Tokenizer
from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec
from treadle_plugins.execute.torch_executor import checks, families, interface
from treadle_plugins.execute.torch_executor.host_memory import asking_for, check_host
from treadle_plugins.execute.torch_executor.outcomes import ProcessLogits, conclude
from treadle_plugins.execute.torch_executor.packing import Limits, WorkRows, faults, lay_out_rows, pack
from treadle_plugins.execute.torch_executor.passes import PlainForward, PoolAttention, Survey, SurveyAttention
from treadle_plugins.execute.torch_executor.swap import SwapSpace
from treadle_plugins.forward.spec import PackedForward

ChooseAttention = Callable[[AttentionSpec], AttentionBackend | None]
"""A backend that can do what the spec asks for; None when there is none."""
MakeForward = Callable[[PreTrainedModel, PackedForward], "PackedForward | None"]
"""A forward pass for the model, given its own; None leaves that."""


class TorchExecutor(SyncExecutor):
    """Computes plans with a causal language model of transformers. Owns weights, KV, swap space, tokenizer, sampling.

    The model is taken over: its attention is replaced, and it must not be used elsewhere. Raises ModelError when its
    architecture cannot be served.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        info: ModelInfo,
        tokenizer: Tokenizer | None,
        *,
        choose_attention: ChooseAttention,
        clock: Clock,
        make_forward: MakeForward | None = None,
        process_logits: ProcessLogits | None = None,
    ) -> None:
        self._kind = type(model.eval()).__name__
        self._info, self._tokenizer, self._clock = info, tokenizer, clock
        self._choose_attention, self._process_logits = choose_attention, process_logits
        self._device = model.device
        self._context = interface.ForwardContext()
        self._backend: AttentionBackend | None = None
        self._swap: SwapSpace | None = None
        self._limits = Limits(info.vocab_size, info.max_length, num_blocks=0, block_size=1)
        interface.register()
        families.connect(model, self._context)
        interface.bind(model, self._context)
        checks.check_positions(model, info)
        self._pass: PackedForward | None = self._choose_forward(model, make_forward)
        self._hows = [self._context.facts[layer].how for layer in range(info.num_layers)]

    @property
    def model(self) -> ModelInfo:
        """What the core and the plugins need to know of the model."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None when the executor deals in token ids only."""
        return self._tokenizer

    @property
    def clock(self) -> Clock:
        """Where time comes from."""
        return self._clock

    @property
    def attention(self) -> AttentionBackend:
        """The backend that keeps the pool's K and V. Raises ExecutionError while no pool is open."""
        if self._backend is None:
            raise ExecutionError("the executor has no pool: open_pool was not called, or close was")
        return self._backend

    @torch.inference_mode()
    def open_pool(self, spec: PoolSpec) -> PoolSize:
        """Make room for KV on the model's device and for swapped blocks on the host; ConfigError when it cannot."""
        backend = self._backend_for(spec.block_size, spec.kv_format)
        block_bytes = backend.block_bytes()
        num_blocks = spec.memory_bytes // block_bytes if spec.num_blocks is None else spec.num_blocks
        if num_blocks < 1:
            raise ConfigError(
                f"no block fits the pool: one block of {spec.block_size} tokens takes {block_bytes} bytes, but "
                f"pool.memory is {spec.memory_bytes} and pool.num_blocks {spec.num_blocks}; raise one of them, or lower "
                "allocate.block_size"
            )
        self._backend = backend
        self._probe(backend, spec)
        size = PoolSize(num_blocks, spec.swap_bytes // block_bytes)
        self._allocate(backend, size, block_bytes, "pool.memory" if spec.num_blocks is None else "pool.num_blocks")
        self._limits = self._limits._replace(num_blocks=num_blocks, block_size=spec.block_size)
        return size

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Outcome:
        """Copy, compute and sample. A work that fails alone is named in the outcome's errors; others go on."""
        if self._swap is None:
            raise ExecutionError("a plan was run before open_pool made room for KV, or after close")
        begin = time.perf_counter()
        self._swap.copy_out(plan.swap_out)
        self._swap.copy_in(plan.swap_in)
        copy_s = time.perf_counter() - begin
        if not plan.works:
            return Outcome((), copy_s=copy_s)
        found = faults(plan.works, self._limits)
        rows = lay_out_rows(plan.works)
        logits = self._forward(plan.works, rows)
        outcome = conclude(
            plan.works,
            rows,
            logits,
            faults=found,
            process=self._process_logits,
            eos_token_ids=self._info.eos_token_ids,
        )
        return replace(outcome, copy_s=copy_s) if plan.swap_out or plan.swap_in else outcome

    def describe(self) -> dict[str, str]:
        """Facts for `treadle explain`."""
        facts = {
            "architecture": self._kind,
            "device": str(self._device),
            "precision": str(self._context.facts[0].dtype).removeprefix("torch."),
        }
        if self._pass is not None:
            facts |= self._pass.describe()
        if self._backend is not None:
            facts["attention"] = self._backend.name
        return facts

    def memory(self) -> dict[str, int]:
        """Bytes of the weights, buffers included, of the pool's K and V and of swap space."""
        parts = {"weights": 0, "kv_pool": 0, "swap_space": 0}
        if self._pass is not None:
            parts["weights"] = self._pass.weight_bytes()
        if self._backend is not None:
            parts["kv_pool"] = sum(t.numel() * t.element_size() for t in self._backend.tensors())
        if self._swap is not None:
            parts["swap_space"] = self._swap.num_bytes
        return parts

    def close(self) -> None:
        """Let go of the weights, the pool and the swap space."""
        self._swap = None
        self._pass = None
        self._backend = None

    def _forward(self, works: Sequence[Work], rows: Sequence[WorkRows]) -> torch.Tensor:
        """Logits [rows, vocabulary] in float32, at the positions that `rows` name."""
        if self._pass is None:
            raise ExecutionError("the executor is closed")
        batch = pack(works, rows, self._limits, self._device)
        self.attention.prepare(batch)
        attend = PoolAttention(self.attention, batch, self._hows)
        logits = self._pass(batch.token_ids, batch.positions, batch.logit_rows, attend)
        self._check_layers(attend.num_calls)
        return logits.float()

    def _check_layers(self, num_calls: int) -> None:
        if num_calls != self._info.num_layers:
            raise ModelError(
                f"{self._kind} attended {num_calls} times in a pass over {self._info.num_layers} layers: "
                "not every layer attends through transformers' interface"
            )

    @torch.inference_mode()
    def _choose_forward(self, model: PreTrainedModel, make_forward: MakeForward | None) -> PackedForward:
        """The model's own pass, or the one that `make_forward` answers with, if it computes the same."""
        plain = PlainForward(model, self._context)
        own = self._survey(plain)
        checks.check_facts(self._context.facts, self._info)
        self._context.learnt = True
        forward = None if make_forward is None else make_forward(model, plain)
        if forward is None:
            return plain
        checks.check_forward(forward, own, self._survey(forward), self._context.facts[0].dtype)
        return forward

    def _survey(self, forward: PackedForward) -> Survey:
        """Learn from a pass over a few tokens, each of which sees itself alone, how each layer attends."""
        numbers = torch.arange(checks.PROBE_TOKENS, device=self._device)
        attend = SurveyAttention()
        try:
            logits = forward(numbers % self._info.vocab_size, numbers, numbers, attend)
        except TreadleError:
            raise
        except Exception as error:
            raise ModelError(f"{self._kind} cannot compute packed tokens: {type(error).__name__}: {error}") from error
        self._check_layers(len(attend.seen))
        return Survey(logits, attend.seen)

    def _backend_for(self, block_size: int, kv_format: KVFormat) -> AttentionBackend:
        spec = checks.spec_of(self._context.facts, self._info, block_size, kv_format, self._device.type)
        backend = self._choose_attention(spec)
        if backend is None:
            raise ConfigError(f"no attention backend can do what this model and pool need: {spec}")
        return backend

    def _probe(self, backend: AttentionBackend, spec: PoolSpec) -> None:
        """Try the model on a few tokens in blocks of their own, before the pool is there."""
        if spec.kv_format.history_dependent:
            return
        num_blocks = checks.PROBE_SEQUENCES * -(-checks.PROBE_TOKENS // spec.block_size)
        with asking_for(f"the {num_blocks} blocks that the model is tried on", "allocate.block_size"):
            backend.allocate(num_blocks)
        self._limits = self._limits._replace(num_blocks=num_blocks, block_size=spec.block_size)
        dtype = self._context.facts[0].dtype
        try:
            checks.check_packing(lambda works: self._forward(works, lay_out_rows(works)), self._info, spec.block_size, dtype)
        except TreadleError:
            raise
        except Exception as error:
            raise ModelError(f"{self._kind} cannot compute over blocks of KV: {type(error).__name__}: {error}") from error

    def _allocate(self, backend: AttentionBackend, size: PoolSize, block_bytes: int, lower: str) -> None:
        pool_bytes, swap_bytes = size.num_blocks * block_bytes, size.num_swap_blocks * block_bytes
        check_host(pool_bytes if self._device.type == "cpu" else 0, swap_bytes, lower)
        with asking_for(f"a KV pool of {size.num_blocks} blocks, {pool_bytes} bytes, on {self._device}", lower):
            backend.allocate(size.num_blocks)
        with asking_for(f"swap space of {size.num_swap_blocks} blocks, {swap_bytes} bytes, in host memory", "pool.swap_memory"):
            self._swap = SwapSpace(backend.tensors(), size.num_swap_blocks)


def build(
    model: PreTrainedModel,
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    *,
    choose_attention: ChooseAttention,
    clock: Clock,
    prepare_model: Callable[[PreTrainedModel], None] | None = None,
    make_forward: MakeForward | None = None,
    process_logits: ProcessLogits | None = None,
) -> TorchExecutor:
    """An executor over a loaded model, which it takes over. `prepare_model` may change the model in place first."""
    if prepare_model is not None:
        prepare_model(model)
    return TorchExecutor(
        model,
        info,
        tokenizer,
        choose_attention=choose_attention,
        clock=clock,
        make_forward=make_forward,
        process_logits=process_logits,
    )
