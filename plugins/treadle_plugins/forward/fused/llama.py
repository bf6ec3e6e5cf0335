"""Llama, Qwen2 and Mistral: RMS norms, rotary positions, a gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from treadle_plugins.forward.fused.kernels import Kernels
from treadle_plugins.forward.fused.linear import activation_of, gated, is_plain, joined, linear_of
from treadle_plugins.forward.fused.norm import norm_of
from treadle_plugins.forward.fused.report import Report
from treadle_plugins.forward.fused.vocabulary import vocabulary_of
from treadle_plugins.forward.spec import Attend

FAMILIES = ("Llama", "Qwen2", "Mistral")


def unlike(model: PreTrainedModel) -> str | None:
    """Why `model` is none of FAMILIES as transformers has them; None when it is one."""
    kind = type(model).__name__
    family = kind.removesuffix("ForCausalLM")
    if family not in FAMILIES or not _is(model, kind, family):
        return f"{kind} is none of {', '.join(f'{name}ForCausalLM' for name in FAMILIES)}"
    decoder: Any = model.model
    parts = [(decoder, "Model"), (decoder.rotary_emb, "RotaryEmbedding")]
    for layer in decoder.layers:
        parts += [(layer, "DecoderLayer"), (layer.self_attn, "Attention"), (layer.mlp, "MLP")]
    for module, name in parts:
        if not _is(module, family + name, family):
            return f"its {name} is a {type(module).__name__} or has hooks"
    return None


def _is(module: nn.Module, name: str, family: str) -> bool:
    """Whether `module` is of transformers' own class `name`, untouched."""
    home = f"transformers.models.{family.lower()}."
    return type(module).__name__ == name and type(module).__module__.startswith(home) and is_plain(module)


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, family: str, kernels: Kernels, report: Report) -> None:
        attention, mlp, norm = layer.self_attn, layer.mlp, f"{family}RMSNorm"
        self._kernels = kernels
        self._head_dim = int(attention.head_dim)
        self._num_kv_heads = int(attention.config.num_key_value_heads)
        self._num_heads = self._num_kv_heads * int(attention.num_key_value_groups)
        self._norm_in = norm_of(layer.input_layernorm, norm, kernels, report)
        self._norm_mid = norm_of(layer.post_attention_layernorm, norm, kernels, report)
        self._qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj], "q+k+v", report)
        self._o = linear_of(attention.o_proj, "o", report)
        self._activation = activation_of(mlp.act_fn, report)
        self._gate = linear_of(mlp.gate_proj, "gate", report)
        self._up = linear_of(mlp.up_proj, "up", report)
        self._down = linear_of(mlp.down_proj, "down", report)

    def attended(
        self,
        x: torch.Tensor,
        buffer: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        layer: int,
        attend: Attend,
    ) -> torch.Tensor:
        """What attention gives to each token of `x` [tokens, hidden]: [tokens, heads * head_dim]."""
        qkv = self._qkv(self._norm_in(x, buffer))
        turned = self._num_heads + self._num_kv_heads
        self._kernels.rotate(qkv, *rotation, turned, self._head_dim)
        heads = qkv.view(len(x), -1, self._head_dim)
        queries, keys, values = heads.split_with_sizes((self._num_heads, self._num_kv_heads, self._num_kv_heads), 1)
        return attend(layer, queries, keys, values).reshape(len(x), -1)

    def rest(self, x: torch.Tensor, attended: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The layer's result [tokens, hidden] for what attention gave."""
        x = self._o.plus(attended, x)
        normed = self._norm_mid(x, buffer)
        return self._down.plus(gated(self._gate, self._up, self._activation, normed), x)


class LlamaForward:
    """A PackedForward. Takes the model's weights as it is made: the model cannot be called afterwards."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels, report: Report) -> None:
        decoder: Any = model.model
        self._family = type(model).__name__.removesuffix("ForCausalLM")
        self._report, self._kernel_name = report, kernels.name
        self._rotary = decoder.rotary_emb
        self._half = int(decoder.layers[0].self_attn.head_dim) // 2
        self._layers = [_Layer(layer, self._family, kernels, report) for layer in decoder.layers]
        self._norm = norm_of(decoder.norm, f"{self._family}RMSNorm", kernels, report)
        self._embedding, self._head = vocabulary_of(decoder.embed_tokens, model.lm_head, report)
        self._angles = torch.empty(0)

    def describe(self) -> dict[str, str]:
        """Facts for `treadle explain`."""
        return self._report.facts(f"fused {self._family} ({self._kernel_name} kernels)")

    def weight_bytes(self) -> int:
        """Of what was packed and what was not."""
        return self._report.weight_bytes

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits [rows, vocabulary]."""
        x = self._embedding(token_ids)
        rotation = self._rotation(positions)
        buffer = torch.empty_like(x)
        for number, layer in enumerate(self._layers):
            attended = layer.attended(x, buffer, rotation, number, attend)
            if number == len(self._layers) - 1:  # of what follows the last attention only these rows are needed
                x, attended = x[rows], attended[rows]
                buffer = torch.empty_like(x)
            x = layer.rest(x, attended, buffer)
        return self._head(self._norm(x, buffer))

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [tokens, head_dim / 2] in float32, as the model itself works them out."""
        cos, sin = self._rotary(self._angles, positions[None])
        return cos[0, :, : self._half].contiguous(), sin[0, :, : self._half].contiguous()
