"""What every codec that brings its own attention backend must do; for tests, like `treadle.testing.suites`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from treadle.clocks import VirtualClock
from treadle.contracts import Executor, KVFormat, ModelInfo, PoolSize, PoolSpec
from treadle.plugin import missing_members
from treadle.testing.suites import ExecutorSuite
from treadle.testing.suites.executors import Driver
from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec
from treadle_plugins.execute.torch_executor.executor import build

BLOCK = 16
NUM_BLOCKS = 5


class CodecSuite(ExecutorSuite):
    """Results depend on a request's tokens alone, also when keys and values are stored by this codec. A tiny model computes.

    What is stored of a token follows from its own key and value: so chunks, neighbours, drafts, copies and other blocks make no
    difference. How well the codec keeps an answer is its author's to measure.
    """

    @pytest.fixture
    def strategy(self) -> Any:
        """The plugin under test, with the hooks `quantize` and `attention`. Override it."""
        pytest.fail(f"{type(self).__name__} must override the fixture `strategy`")

    @pytest.fixture
    def make_executor(self, strategy: Any) -> Callable[[], Executor]:
        """A tiny llama whose pool is in the codec's format."""

        def make() -> Executor:
            model = _tiny_llama()
            info = _info_of(model)
            executor = build(model, info, None, choose_attention=lambda spec: strategy.attention(spec=spec), clock=VirtualClock())
            formatted: Any = _Formatted(executor, strategy.quantize(model=info))
            return formatted  # type: ignore[no-any-return]  # it forwards what it does not have

        return make

    @pytest.fixture
    def spec(self, strategy: Any) -> AttentionSpec:
        """What the tiny model asks a backend for."""
        info = _info_of(_tiny_llama())
        form = strategy.quantize(model=info)
        return AttentionSpec("cpu", "float32", form, BLOCK, info.num_layers, 4, info.num_kv_heads, info.head_dim)

    def test_its_format_is_its_own(self, spec: AttentionSpec) -> None:
        """By its scheme, so that no other backend reads what it does not know."""
        form = spec.kv_format
        assert isinstance(form, KVFormat), f"quantize answers {form!r}"
        assert form.scheme != "linear", "give the format a scheme of its own, or leave its attention to the built-in backends"

    def test_other_formats_are_passed_on(self, strategy: Any, spec: AttentionSpec) -> None:
        """To whoever reads them."""
        assert strategy.attention(spec=replace(spec, kv_format=KVFormat())) is None

    def test_the_backend_is_one(self, strategy: Any, spec: AttentionSpec) -> None:
        """It has all members, and allocates nothing before it is told to."""
        backend = strategy.attention(spec=spec)
        assert not missing_members(AttentionBackend, backend), f"{backend!r} is no AttentionBackend"
        assert sum(tensor.numel() for tensor in backend.tensors()) == 0, "it holds memory before `allocate`"

    def test_what_it_says_of_its_memory_is_so(self, strategy: Any, spec: AttentionSpec) -> None:
        """Tensors begin with the block, and their bytes are those of the blocks."""
        backend = strategy.attention(spec=spec)
        backend.allocate(NUM_BLOCKS)
        tensors: list[torch.Tensor] = list(backend.tensors())
        assert all(len(tensor) == NUM_BLOCKS for tensor in tensors), [tuple(tensor.shape) for tensor in tensors]
        assert sum(tensor.nbytes for tensor in tensors) == NUM_BLOCKS * backend.block_bytes()

    def test_what_lies_in_unused_slots_never_reaches_a_result(self, make_executor: Callable[[], Executor]) -> None:
        """Not even NaN."""
        outputs = []
        for spoilt in (False, True):
            driver = Driver(make_executor())
            if spoilt:
                poisoned: Any = driver.executor
                with torch.inference_mode():  # as the executor allocates
                    poisoned.attention.poison()
            outputs.append(driver.generate(driver.add("some", self.prompt(driver.executor.model, BLOCK + 5))))
        assert outputs[0] == outputs[1]


def _tiny_llama() -> PreTrainedModel:
    """A random model whose best two logits lie apart: weights are larger than usual, so that every layer matters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0 if "head" in name or "emb" in name else 0.15)
    return model.eval()


def _info_of(model: PreTrainedModel) -> ModelInfo:
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    return ModelInfo(
        "llama", config.num_hidden_layers, config.num_key_value_heads, head_dim, config.vocab_size, 256, dtype_bytes=4
    )


class _Formatted:
    """An executor whose pool is in one format, whatever is asked for."""

    def __init__(self, executor: Executor, kv_format: KVFormat) -> None:
        self._executor = executor
        self._format = kv_format

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def open_pool(self, spec: PoolSpec) -> PoolSize:
        """In the codec's format."""
        return self._executor.open_pool(replace(spec, kv_format=self._format))
