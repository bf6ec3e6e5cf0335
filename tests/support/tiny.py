"""For tests of the executor, of attention backends and of kernels: tiny models, and a driver for plans made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from treadle.contracts import KVFormat, ModelInfo, PoolSpec
from treadle.plan import BlockCopy, Outcome, StepPlan, Work
from treadle.sampling_params import SamplingParams
from treadle_plugins.attention.spec import AttentionBackendType, choose
from treadle_plugins.attention.torch_backend import TorchAttention
from treadle_plugins.execute.torch_executor.executor import MakeForward, TorchExecutor, build
from treadle_plugins.execute.torch_executor.outcomes import ProcessLogits

FAMILIES = ("llama", "qwen2", "mistral", "gpt2", "bloom")
VOCAB_SIZE = 300
WINDOW = 12
"""Window of the tiny mistral, in tokens."""

_GPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA: dict[str, Any] = _GPT | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def tiny_config(family: str, **changes: Any) -> Any:
    """Configuration of a model with three layers and four heads of 16, two KV heads where the family allows it."""
    if family == "gpt2":
        return transformers.GPT2Config(**(_GPT | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256} | changes))
    if family == "bloom":
        return transformers.BloomConfig(**(_GPT | {"hidden_size": 64, "n_layer": 3, "n_head": 4} | changes))
    kinds = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "mistral": transformers.MistralConfig,
    }
    window = {"sliding_window": WINDOW} if family == "mistral" else {}
    return kinds[family](**(_LLAMA | window | changes))


def tiny_model(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model whose best two logits lie apart: weights are larger than usual, so that every layer matters."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0 if "head" in name or "emb" in name or "wte" in name else 0.15)
            elif "bias" in name:
                parameter.normal_(std=0.1)
    return model.to(dtype).eval()


def info_of(model: PreTrainedModel, max_length: int = 256) -> ModelInfo:
    """What the core is told of a tiny model."""
    config = model.config
    heads = config.num_attention_heads
    return ModelInfo(
        name=config.model_type,
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", heads),
        head_dim=config.hidden_size // heads,
        vocab_size=config.vocab_size,
        max_length=max_length,
        dtype_bytes=model.dtype.itemsize,
    )


class StillClock:
    """A clock that stands."""

    def now(self) -> float:
        """Always 0."""
        return 0.0

    def wait(self, until_s: float) -> bool:  # the protocol names it
        """Never jumps."""
        return False


def tiny_executor(
    model: PreTrainedModel,
    backends: Sequence[AttentionBackendType] = (TorchAttention,),
    process_logits: ProcessLogits | None = None,
    max_length: int = 256,
    make_forward: MakeForward | None = None,
) -> TorchExecutor:
    """An executor without a tokenizer; its pool is not open yet."""
    info = info_of(model, max_length)
    return build(
        model,
        info,
        None,
        choose_attention=lambda spec: choose(backends, spec),
        clock=StillClock(),
        make_forward=make_forward,
        process_logits=process_logits,
    )


@dataclass
class Running:
    """A request as the driver keeps it."""

    name: str
    tokens: list[int]
    sampling: SamplingParams
    num_prompt: int
    count: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """Tokens that were sampled."""
        return self.tokens[self.num_prompt :]

    @property
    def missing(self) -> int:
        """Known tokens whose KV is not in the pool."""
        return len(self.tokens) - self.count


class Driver:
    """Feeds an executor plans made by hand. Blocks are handed out in a scattered order, over a poisoned pool."""

    def __init__(self, executor: TorchExecutor, block_size: int = 16, num_blocks: int = 64, swap_bytes: int = 0) -> None:
        self.executor = executor
        self.block_size = block_size
        self.size = executor.open_pool(PoolSpec(block_size, KVFormat(), num_blocks, 0, swap_bytes))
        executor.attention.poison()
        self.free = list(range(num_blocks))
        random.Random(num_blocks).shuffle(self.free)  # noqa: S311  # only has to look scattered
        self.steps = 0

    def add(self, name: str, prompt: Sequence[int], sampling: SamplingParams | None = None) -> Running:
        """A new request; nothing is computed yet."""
        return Running(name, list(prompt), sampling or SamplingParams(), len(prompt))

    def share(self, owner: Running, reader: Running, num_blocks: int) -> None:
        """Let `reader` start with `owner`'s first blocks, which are computed or will be in the same plan."""
        self._grow(owner, num_blocks * self.block_size)
        reader.table = owner.table[:num_blocks]
        reader.count = num_blocks * self.block_size

    def work(self, sequence: Running, num_tokens: int | None = None, drafted: Sequence[int] = ()) -> Work:
        """The next `num_tokens` known tokens (all by default), then drafted ones."""
        most = sequence.missing if num_tokens is None else num_tokens
        tokens = sequence.tokens[sequence.count : sequence.count + most] + list(drafted)
        self._grow(sequence, sequence.count + len(tokens))
        end = sequence.count + most
        work = Work(
            sequence.name,
            sequence.count,
            tuple(tokens),
            tuple(sequence.table),
            sequence.sampling if end == len(sequence.tokens) else None,
            len(drafted),
            len(sequence.output),
        )
        wanted = sequence.sampling.prompt_logprobs
        if wanted is None or sequence.count >= sequence.num_prompt:
            return work
        following = sequence.tokens[end] if end < sequence.num_prompt else None
        return work._replace(prompt_logprobs=wanted, following=following)

    def run(self, *works: Work, swap_out: Sequence[BlockCopy] = (), swap_in: Sequence[BlockCopy] = ()) -> Outcome:
        """One pass."""
        self.steps += 1
        return self.executor.run(StepPlan(self.steps, works, tuple(swap_out), tuple(swap_in)))

    def step(self, *parts: tuple[Running, int | None]) -> Outcome:
        """One pass over the next so many tokens of each sequence; appends what was sampled."""
        works = [self.work(sequence, num_tokens) for sequence, num_tokens in parts]
        outcome = self.run(*works)
        if outcome.errors:
            raise RuntimeError(f"works failed: {dict(outcome.errors)}")
        for (sequence, _), work, tokens in zip(parts, works, outcome.tokens, strict=True):
            sequence.count += len(work.tokens)
            sequence.tokens += tokens
        return outcome

    def generate(self, sequences: Sequence[Running], num_tokens: int, chunk: int | None = None) -> list[list[int]]:
        """Run all together until each has `num_tokens` outputs; prefill goes at most `chunk` tokens of each a step."""
        while any(len(sequence.output) < num_tokens for sequence in sequences):
            going = [sequence for sequence in sequences if len(sequence.output) < num_tokens]
            self.step(*((sequence, min(sequence.missing, chunk or sequence.missing)) for sequence in going))
        return [sequence.output for sequence in sequences]

    def _grow(self, sequence: Running, num_tokens: int) -> None:
        while len(sequence.table) * self.block_size < num_tokens:
            sequence.table.append(self.free.pop())
