"""What a fused pass does not know, it leaves as it is, and says so; what computes something else is refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402  # after the skips

from support.tiny import (  # noqa: E402
    VOCAB_SIZE,
    Driver,
    tiny_config,
    tiny_executor,
    tiny_model,
)
from treadle.errors import ModelError  # noqa: E402
from treadle_plugins.forward.fused.build import build  # noqa: E402
from treadle_plugins.forward.fused.linear import cannot_pack  # noqa: E402
from treadle_plugins.forward.spec import PackedForward  # noqa: E402

pytestmark = pytest.mark.skipif(cannot_pack(torch.float32) is not None, reason="no oneDNN in this torch")

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PROMPT = [3 * i % VOCAB_SIZE for i in range(21)]


def generated(model: Any, make_forward: Any = None) -> tuple[list[int], Mapping[str, str]]:
    executor = tiny_executor(model, make_forward=make_forward)
    driver = Driver(executor, 16)
    tokens = driver.generate([driver.add("prompt", PROMPT)], 12, 8)[0]
    return tokens, executor.describe()


class Odd(nn.Module):
    """A linear layer that a stranger made."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.original = original

    def forward(self, x: Any) -> Any:
        assert x.dim() == 3
        return -self.original(-x)


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_a_replaced_layer_is_called_as_it_is(name: str) -> None:
    model = tiny_model(tiny_config("llama"))
    block = model.model.layers[1]
    owner = block.self_attn if name in ("q_proj", "o_proj") else block.mlp
    setattr(owner, name, Odd(getattr(owner, name)))
    expected, _ = generated(copy.deepcopy(model))
    tokens, facts = generated(model, build)
    assert tokens == expected
    assert facts["forward"].startswith("fused Llama")
    assert "Odd, called as it is" in facts["forward plain"]


def test_a_replaced_attention_weight_of_bloom_is_called_as_it_is() -> None:
    model = tiny_model(tiny_config("bloom"))
    attention = model.transformer.h[2].self_attention
    attention.query_key_value = Odd(attention.query_key_value)
    expected, _ = generated(copy.deepcopy(model))
    tokens, facts = generated(model, build)
    assert tokens == expected
    assert "Odd, called as it is" in facts["forward plain"]


def test_hooks_are_honoured() -> None:
    model = tiny_model(tiny_config("llama"))
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, given, out: 2 * out)
    model.model.layers[1].input_layernorm.register_forward_hook(lambda module, given, out: 0.5 * out)
    expected, _ = generated(copy.deepcopy(model))
    tokens, facts = generated(model, build)
    assert tokens == expected
    assert facts["forward"].startswith("fused Llama")
    assert "up (Linear, called as it is)" in facts["forward plain"]
    assert "norm (LlamaRMSNorm, called as it is)" in facts["forward plain"]


def test_a_hooked_block_makes_the_pass_that_of_transformers() -> None:
    model = tiny_model(tiny_config("llama"))
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: 2 * out)
    expected, _ = generated(copy.deepcopy(model))
    tokens, facts = generated(model, build)
    assert tokens == expected
    assert facts["forward"] == "transformers, linear layers packed"
    assert "its MLP is a LlamaMLP or has hooks" in facts["forward plain"]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Gemma2Config", {}),
        ("Qwen3Config", {}),
        ("Qwen3Config", {"tie_word_embeddings": True, "vocab_size": 320}),
        ("Phi3Config", {}),
        ("StableLmConfig", {}),
        ("OlmoConfig", {}),
        ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_unknown_architectures_are_packed_layer_by_layer(kind: str, changes: dict[str, Any]) -> None:
    model = tiny_model(getattr(transformers, kind)(**(SIZES | changes)))
    expected, _ = generated(copy.deepcopy(model))
    tokens, facts = generated(model, build)
    assert tokens == expected
    assert facts["forward"] == "transformers, linear layers packed"
    assert type(model).__name__ in facts["forward plain"]
    assert "3 x" in facts["forward packed"]
    if "tie_word_embeddings" in changes:
        assert "1 x LM head and embedding" in facts["forward packed"]
    if kind == "MixtralConfig":
        assert "MixtralExperts" in facts["forward plain"]


def test_a_shared_weight_that_cannot_be_packed_once_stays_as_it_is() -> None:
    model = tiny_model(tiny_config("llama", tie_word_embeddings=True))
    model.model.embed_tokens.register_forward_hook(lambda module, given, out: 2 * out)
    expected, _ = generated(copy.deepcopy(model))
    tokens, facts = generated(model, build)
    assert tokens == expected
    assert "LM head (not packed, summed in float32)" in facts["forward plain"]


@pytest.mark.parametrize("kind", ["LlamaConfig", "GemmaConfig"])
def test_half_precision_is_not_packed(kind: str) -> None:
    model = tiny_model(getattr(transformers, kind)(**SIZES), torch.float16)
    expected, _ = generated(copy.deepcopy(model))
    tokens, facts = generated(model, build)
    assert tokens == expected
    assert facts["forward"] == ("fused Llama (torch kernels)" if kind == "LlamaConfig" else "transformers")
    assert facts["forward packed"] == "weights in float16 are not packed"


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
@pytest.mark.parametrize("tied", [True, False])
def test_no_second_copy_of_the_weights(family: str, tied: bool) -> None:
    """Not even in the forward pass: what it says that it keeps is what the model had."""
    model = tiny_model(tiny_config(family, vocab_size=320, tie_word_embeddings=tied))
    _, facts = generated(model, build)
    left = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    embeddings = {"model.embed_tokens.weight", "transformer.wte.weight", "transformer.word_embeddings.weight"}
    assert left <= ({"transformer.wpe.weight"} if tied else embeddings | {"transformer.wpe.weight"})
    assert ("LM head and embedding" in facts["forward packed"]) is tied


class Wrapped:
    """A forward pass of a stranger, which changes what it was given."""

    def __init__(self, plain: PackedForward, change: str) -> None:
        self._plain, self._change = plain, change

    def describe(self) -> Mapping[str, str]:
        return {"forward": "wrapped"}

    def weight_bytes(self) -> int:
        return self._plain.weight_bytes()

    def __call__(self, token_ids: Any, positions: Any, rows: Any, attend: Any) -> Any:
        def changed(layer: int, queries: Any, keys: Any, values: Any) -> Any:
            if self._change == "keys" and layer == 1:
                keys = 1.5 * keys
            if self._change == "skips" and layer == 2:
                return values.repeat_interleave(2, dim=1)
            return attend(layer, queries, keys, values)

        logits = self._plain(token_ids, positions, rows, changed)
        return -logits if self._change == "logits" else logits


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("keys", "'wrapped' computes other keys of layer 1"),
        ("logits", "'wrapped' computes other logits"),
        ("skips", "attended 2 times in a pass over 3 layers"),
    ],
)
def test_a_pass_that_computes_something_else_is_refused(change: str, problem: str) -> None:
    model = tiny_model(tiny_config("llama"))
    with pytest.raises(ModelError, match=problem):
        tiny_executor(model, make_forward=lambda model, plain: Wrapped(plain, change))


def test_a_strangers_pass_is_used() -> None:
    model = tiny_model(tiny_config("llama"))
    expected, _ = generated(copy.deepcopy(model))
    tokens, facts = generated(model, lambda model, plain: Wrapped(plain, "nothing"))
    assert (tokens, facts["forward"]) == (expected, "wrapped")
