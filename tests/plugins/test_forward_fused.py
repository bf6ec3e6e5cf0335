"""The fused forward pass computes what the model's own pass computes, and says what it could not fuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.tiny import (  # noqa: E402
    FAMILIES,
    VOCAB_SIZE,
    Driver,
    tiny_config,
    tiny_executor,
    tiny_model,
)
from treadle.contracts import KVFormat, PoolSpec  # noqa: E402  # after the skips
from treadle_plugins.execute.torch_executor.executor import TorchExecutor  # noqa: E402
from treadle_plugins.forward.fused.build import Weights, build  # noqa: E402
from treadle_plugins.forward.fused.kernels import TorchKernels  # noqa: E402
from treadle_plugins.forward.fused.linear import cannot_pack  # noqa: E402
from treadle_plugins.forward.spec import PackedForward  # noqa: E402

pytestmark = pytest.mark.skipif(cannot_pack(torch.float32) is not None, reason="no oneDNN in this torch")

PROMPTS = [[(7 * i + n) % VOCAB_SIZE for i in range(n)] for n in (1, 15, 16, 33)]
NUM_TOKENS = 10
needs_bf16 = pytest.mark.skipif(cannot_pack(torch.bfloat16) is not None, reason="this processor has no bfloat16")


class Recorded:
    """An executor's tokens, and the logits of each of its steps."""

    def __init__(self, model: Any, make_forward: Any = None, chunk: int | None = 9) -> None:
        self.executor: TorchExecutor = tiny_executor(model, make_forward=make_forward)
        self.logits: list[Any] = []
        computed = self.executor._forward

        def forward(works: Any, rows: Any) -> Any:
            self.logits.append(computed(works, rows))
            return self.logits[-1]

        driver = Driver(self.executor, 16)
        self.executor._forward = forward  # type: ignore[method-assign]
        running = [driver.add(str(len(tokens)), tokens) for tokens in PROMPTS]
        self.tokens = driver.generate(running, NUM_TOKENS, chunk)

    def difference(self, other: Recorded) -> float:
        """The largest, over all logits of steps in the same order."""
        pairs = list(zip(self.logits, other.logits, strict=True))
        return max(float((own - theirs).abs().max()) for own, theirs in pairs if len(own))


def compiled(model: Any, plain: PackedForward) -> PackedForward:
    return build(model, plain)


def reference(model: Any, plain: PackedForward) -> PackedForward:
    return build(model, plain, TorchKernels())


def onednn(model: Any, plain: PackedForward) -> PackedForward:
    return build(model, plain, weights=Weights.ONEDNN)


def exact(model: Any, plain: PackedForward) -> PackedForward:
    return build(model, plain, weights=Weights.EXACT)


VARIANTS: dict[str, dict[str, Any]] = {
    "llama, tied": {"tie_word_embeddings": True, "vocab_size": 320},
    "llama, tied, a vocabulary that fills no block": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "llama, an activation that is not fused": {"hidden_act": "sigmoid"},
    "llama, long rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "qwen2, one KV head": {"num_key_value_heads": 1},
    "gpt2, relu": {"activation_function": "relu"},
    "gpt2, scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "bloom, post": {"apply_residual_connection_post_layernorm": True},
    "bloom, odd heads": {"n_head": 3, "hidden_size": 48},
}


@pytest.mark.parametrize("make_forward", [compiled, reference, exact])
@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_same_logits_and_tokens_in_float32(name: str, make_forward: Any) -> None:
    model = tiny_model(tiny_config(name.split(",", maxsplit=1)[0], **VARIANTS.get(name, {})))
    plain = Recorded(copy.deepcopy(model))
    fused = Recorded(model, make_forward)
    assert fused.executor.describe()["forward"].startswith("fused")
    difference = fused.difference(plain)
    print(f"{name}: logits differ by at most {difference:.2g}")
    assert difference < 1e-4
    assert fused.tokens == plain.tokens


@needs_bf16
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make_forward", [compiled, onednn])
def test_bf16_is_no_worse_than_transformers(family: str, make_forward: Any) -> None:
    exact = tiny_model(tiny_config(family), torch.float32)
    prompt = torch.tensor([(11 * i + 5) % VOCAB_SIZE for i in range(200)])

    def logits(model: Any, make_forward: Any = None) -> Any:
        executor = tiny_executor(model, make_forward=make_forward)
        executor.open_pool(PoolSpec(16, KVFormat(), 16, 0))
        driver = Driver(executor, 16)
        sequence = driver.add("prompt", prompt.tolist())
        kept: list[Any] = []
        computed = executor._forward
        executor._forward = lambda *given: kept.append(computed(*given)) or kept[-1]  # type: ignore[method-assign,func-returns-value]
        for _ in range(len(prompt)):
            driver.step((sequence, 1))
            del sequence.tokens[len(prompt) :]
            if sequence.count == len(prompt):
                break
        return torch.cat([step for step in kept if len(step)])

    truth = logits(copy.deepcopy(exact))
    plain = (logits(copy.deepcopy(exact).bfloat16()) - truth).norm()
    fused = (logits(exact.bfloat16(), make_forward) - truth).norm()
    print(f"{family}: error in bfloat16 {float(fused):.3g}, transformers' own {float(plain):.3g}")
    assert fused <= 1.1 * plain
