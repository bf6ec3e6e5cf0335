"""GPT-2 and BLOOM: layer norms, one weight for queries, keys and values, a plain MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from treadle_plugins.forward.fused.kernels import Kernels
from treadle_plugins.forward.fused.linear import (
    CalledLinear,
    Linear,
    activation_of,
    bias_of,
    give_up,
    is_linear,
    is_plain,
    linear_of,
    stored,
    weight_of,
)
from treadle_plugins.forward.fused.norm import norm_of
from treadle_plugins.forward.fused.report import Report
from treadle_plugins.forward.fused.vocabulary import vocabulary_of
from treadle_plugins.forward.spec import Attend

_PARTS = {
    "GPT2LMHeadModel": ("gpt2", "GPT2Model", "GPT2Block", "attn", ("GPT2Attention",), "GPT2MLP"),
    # the torch executor puts an attention of its own into BLOOM, with the same weights under the same names
    "BloomForCausalLM": (
        "bloom",
        "BloomModel",
        "BloomBlock",
        "self_attention",
        ("BloomAttention", "PackedBloomAttention"),
        "BloomMLP",
    ),
}


def unlike(model: PreTrainedModel) -> str | None:
    """Why `model` is neither GPT-2 nor BLOOM as transformers has them; None when it is one."""
    kind = type(model).__name__
    if kind not in _PARTS or not is_plain(model):
        return f"{kind} is none of {', '.join(_PARTS)}"
    home, body, block, attention, attentions, mlp = _PARTS[kind]
    core: Any = model.transformer
    parts: list[tuple[nn.Module, tuple[str, ...]]] = [(core, (body,))]
    for layer in core.h:
        parts += [(layer, (block,)), (getattr(layer, attention), attentions), (layer.mlp, (mlp,))]
    for module, names in parts:
        if type(module).__name__ not in names or not is_plain(module):
            return f"a {names[0]} is a {type(module).__name__} or has hooks"
    config = model.config
    if getattr(config, "add_cross_attention", False):
        return "it has cross attention"
    if home == "bloom" and config.slow_but_exact and config.pretraining_tp > 1:
        return "it is set to slow_but_exact"
    return None


class _Layer:
    """One block."""

    def __init__(self, parts: tuple[Any, ...], qkv: Linear, heads: int, kernels: Kernels, report: Report) -> None:
        norm_in, norm_mid, out, up, act, down = parts
        self._num_heads, self._qkv = heads, qkv
        self._norm_in = norm_of(norm_in, "", kernels, report)
        self._norm_mid = norm_of(norm_mid, "", kernels, report)
        self._out = linear_of(out, "out", report)
        self._activation = activation_of(act, report)
        self._up, self._down = linear_of(up, "up", report), linear_of(down, "down", report)

    def attended(self, normed: torch.Tensor, layer: int, attend: Attend) -> torch.Tensor:
        """What attention gives to each token: [tokens, hidden]."""
        heads = self._qkv(normed).view(len(normed), 3 * self._num_heads, -1)
        return attend(layer, *heads.chunk(3, dim=1)).reshape(len(normed), -1)

    def normed(self, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """`x` as attention takes it."""
        return self._norm_in(x, buffer)

    def rest(self, residual: torch.Tensor, attended: torch.Tensor, buffer: torch.Tensor, post: bool) -> torch.Tensor:
        """The block's result [tokens, hidden]; `post`: what the MLP takes is also what is added to it."""
        x = self._out.plus(attended, residual)
        normed = self._norm_mid(x, buffer)
        return self._down.plus(self._up.activated(normed, self._activation), normed if post else x)


class GPTForward:
    """A PackedForward. Takes the model's weights as it is made: the model cannot be called afterwards."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels, report: Report) -> None:
        core: Any = model.transformer
        self._kind, self._report, self._kernel_name = type(model).__name__, report, kernels.name
        layer_of = _gpt2_layer if self._kind == "GPT2LMHeadModel" else _bloom_layer
        self._layers = [layer_of(layer, kernels, report) for layer in core.h]
        self._norm = norm_of(core.ln_f, "", kernels, report)
        self._positions: nn.Module | None = getattr(core, "wpe", None)
        if self._positions is not None:
            report.keeps(self._positions)
        first = getattr(core, "word_embeddings_layernorm", None)
        self._first_norm = None if first is None else norm_of(first, "", kernels, report)
        words = core.wte if first is None else core.word_embeddings
        self._embedding, self._head = vocabulary_of(words, model.lm_head, report)
        self._post = bool(getattr(model.config, "apply_residual_connection_post_layernorm", False))

    def describe(self) -> dict[str, str]:
        """Facts for `treadle explain`."""
        return self._report.facts(f"fused {self._kind} ({self._kernel_name} kernels)")

    def weight_bytes(self) -> int:
        """Of what was packed and what was not."""
        return self._report.weight_bytes

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits [rows, vocabulary]."""
        x = self._embedded(token_ids, positions)
        buffer = torch.empty_like(x)
        for number, layer in enumerate(self._layers):
            normed = layer.normed(x, buffer)
            attended = layer.attended(normed, number, attend)
            residual = normed if self._post else x
            if number == len(self._layers) - 1:  # of what follows the last attention only these rows are needed
                residual, attended = residual[rows], attended[rows]
                buffer = torch.empty_like(residual)
            x = layer.rest(residual, attended, buffer, self._post)
        return self._head(self._norm(x, buffer))

    def _embedded(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self._embedding(token_ids)
        if self._positions is not None:
            x = x + self._positions(positions)
        return x if self._first_norm is None else self._first_norm(x, torch.empty_like(x))


def _gpt2_layer(layer: Any, kernels: Kernels, report: Report) -> _Layer:
    attention, mlp = layer.attn, layer.mlp
    parts = (layer.ln_1, layer.ln_2, attention.c_proj, mlp.c_fc, mlp.act, mlp.c_proj)
    qkv = linear_of(attention.c_attn, "q+k+v", report)
    return _Layer(parts, qkv, int(attention.num_heads), kernels, report)


def _bloom_layer(layer: Any, kernels: Kernels, report: Report) -> _Layer:
    attention, mlp = layer.self_attention, layer.mlp
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    parts = (*norms, attention.dense, mlp.dense_h_to_4h, mlp.gelu_impl, mlp.dense_4h_to_h)
    qkv = _bloom_qkv(attention.query_key_value, int(attention.num_heads), report)
    return _Layer(parts, qkv, int(attention.num_heads), kernels, report)


def _bloom_qkv(module: nn.Module, num_heads: int, report: Report) -> Linear:
    """BLOOM's weight, in which each head's query, key and value lie together, in the order of all others."""
    if not is_linear(module):
        report.calls(module, "q+k+v")
        return CalledQKV(module, num_heads)
    weight, bias = weight_of(module), bias_of(module)
    order = torch.arange(len(weight)).view(num_heads, 3, -1).transpose(0, 1).flatten()
    linear = stored(weight[order], None if bias is None else bias[order], "q+k+v", report)
    give_up(module)
    return linear


class CalledQKV(CalledLinear):
    """A module with BLOOM's order of outputs, called as it is."""

    __slots__ = ("_num_heads",)

    def __init__(self, module: nn.Module, num_heads: int) -> None:
        super().__init__(module)
        self._num_heads = num_heads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, 3 * hidden]: all queries, all keys, all values."""
        return super().__call__(x).view(len(x), self._num_heads, 3, -1).transpose(1, 2).flatten(1)
