"""Logits are sums in float32 on every path: near 25 a step of bfloat16 is 0.125, and two tokens 0.09 apart would tie."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.tiny import VOCAB_SIZE, tiny_config, tiny_model  # noqa: E402
from treadle_plugins.execute.torch_executor import families, interface  # noqa: E402  # after the skips
from treadle_plugins.execute.torch_executor.passes import PlainForward  # noqa: E402
from treadle_plugins.forward.fused import blocked, linear  # noqa: E402
from treadle_plugins.forward.fused.build import Weights, build  # noqa: E402
from treadle_plugins.forward.fused.linear import cannot_pack  # noqa: E402
from treadle_plugins.forward.logits import float32_sums, summing  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: tiny_config("llama"),
    "llama, tied": lambda: tiny_config("llama", tie_word_embeddings=True),
    "llama, tied, whole blocks": lambda: tiny_config("llama", tie_word_embeddings=True, vocab_size=320),
    "qwen2": lambda: tiny_config("qwen2"),
    "gpt2, tied": lambda: tiny_config("gpt2", tie_word_embeddings=True),
    "gpt2, odd vocabulary": lambda: tiny_config("gpt2", vocab_size=VOCAB_SIZE + 3),
    "bloom": lambda: tiny_config("bloom"),
    "unknown": lambda: transformers.Qwen3Config(**SIZES),
    "unknown, tied": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
}
PATHS = {"plain": None, "fused": Weights.PACKED, "fused, tiles": Weights.PACKED, "fused, no kernel": Weights.PACKED,
         "onednn": Weights.ONEDNN, "exact": Weights.EXACT}  # fmt: skip
IDS = torch.arange(20, 44)
FIRST, SECOND = 2, 7
"""Tokens that the prompt does not hold."""


def alone(layer: int, queries: Any, keys: Any, values: Any) -> Any:
    return values.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)


def computed(model: Any, path: str) -> tuple[Any, Any]:
    """What the LM head was given and what it answered, on that path. `model` is taken over."""
    seen: list[Any] = []
    context = interface.ForwardContext()
    interface.register()
    families.connect(model, context)
    interface.bind(model, context)
    forward: Any = PlainForward(model, context)
    weights = PATHS[path]
    if weights is not None:
        forward = build(model, forward, weights=weights)
    if hasattr(forward, "_head"):
        head = forward._head
        forward._head = lambda x: seen.append(x) or head(x)
    else:
        model.get_output_embeddings().register_forward_pre_hook(lambda module, given: seen.append(given[0][0]))
    positions = torch.arange(len(IDS))
    with torch.inference_mode():
        logits = forward(IDS, positions, positions, alone)
    return seen[-1], logits


@pytest.fixture(params=list(PATHS))
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A path, forced: a processor with tiles multiplies by oneDNN, one without our kernel has nothing else."""
    if request.param == "fused, tiles":
        monkeypatch.setattr(linear, "beats_onednn", lambda: False)
    if request.param == "fused, no kernel":
        monkeypatch.setattr(blocked, "host_products", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_sums_in_float32_of_what_the_head_is_given(name: str, dtype: Any, path: str) -> None:
    if dtype == torch.bfloat16 and path not in ("plain", "exact") and cannot_pack(dtype) is not None:
        pytest.skip("this processor does not multiply bfloat16")
    model: Any = tiny_model(MODELS[name](), dtype)
    hidden, _ = computed(copy.deepcopy(model), path)
    assert hidden.dtype == dtype
    weight = model.get_output_embeddings().weight.data
    place_apart(weight, hidden[-1])
    given = weight.double().clone()
    hidden, logits = computed(model, path)
    right = hidden.double() @ given.t()
    assert logits.dtype == torch.float32
    error = float((logits.double() - right).abs().max())
    gap, real_gap = (float(numbers[-1, SECOND] - numbers[-1, FIRST]) for numbers in (logits, right))
    print(f"{name}, {path}: error {error:.2g} at up to {float(right.abs().max()):.0f}; gap {gap:.4f}, in float64 {real_gap:.4f}")
    assert error < 1e-5 * float(right.abs().max())  # a step of bfloat16 is 780 times as much, one of float16 98 times
    assert 0.05 < real_gap < 0.13
    assert abs(gap - real_gap) < 1e-4


def place_apart(weight: Any, hidden: Any) -> None:
    """Let two tokens have 25 and 25.09 as logits, after what `hidden` says, and any other far less."""
    wide = hidden.double()
    weight[FIRST] = (25 * wide / (wide @ wide)).to(weight.dtype)
    weight[SECOND] = weight[FIRST]
    for channel in wide.abs().argsort().tolist():
        moved = weight[FIRST, channel].double() + 0.09 / wide[channel]
        difference = float((moved.to(weight.dtype).double() - weight[FIRST, channel].double()) * wide[channel])
        if abs(difference - 0.09) < 0.02:
            weight[SECOND, channel] = moved.to(weight.dtype)
            return
    raise AssertionError("no channel tells the two apart")


def test_a_head_with_hooks_is_told_not_to_round() -> None:
    model: Any = tiny_model(tiny_config("llama"), torch.bfloat16)
    model.lm_head.register_forward_hook(lambda module, given, out: 2 * out)
    weight = model.lm_head.weight.detach().double()
    hidden, logits = computed(model, "fused")
    right = 2 * hidden.double() @ weight.t()
    assert logits.dtype == torch.float32
    assert float((logits.double() - right).abs().max()) < 1e-5 * float(right.abs().max())


def test_a_head_that_cannot_be_told_is_named() -> None:
    model: Any = tiny_model(tiny_config("llama"), torch.bfloat16)
    plain = PlainForward(model, interface.ForwardContext())
    assert "logits" not in plain.describe()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert plain.describe()["logits"] == "rounded by Sequential"


def test_the_head_is_as_it_was_afterwards() -> None:
    head = torch.nn.Linear(8, 5).bfloat16().requires_grad_(False)
    x = torch.randn(2, 3, 8).bfloat16()
    with summing(head):
        assert head(x).dtype == torch.float32
    assert head(x).dtype == torch.bfloat16
    assert "forward" not in vars(head)


def test_sums_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = torch.randn(37, 16).bfloat16(), torch.randn(37).bfloat16(), torch.randn(2, 3, 16).bfloat16()
    right = x.double() @ weight.double().t() + bias.double()
    for piece_bytes in (1, 640, 1 << 20):
        monkeypatch.setattr("treadle_plugins.forward.logits._PIECE_BYTES", piece_bytes)
        torch.testing.assert_close(float32_sums(x, weight, bias).double(), right, rtol=1e-6, atol=1e-5)
    assert float32_sums(x[:, :0], weight, bias).shape == (2, 0, 37)
