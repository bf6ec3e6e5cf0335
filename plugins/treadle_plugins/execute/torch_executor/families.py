"""Architectures whose attention does not go through transformers' interface."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention

from treadle.errors import ModelError
from treadle_plugins.attention.spec import LayerAttention
from treadle_plugins.execute.torch_executor.interface import IMPLEMENTATION, ForwardContext


def connect(model: PreTrainedModel, context: ForwardContext) -> None:
    """Make every layer of `model` attend through `context`. Raises ModelError when its architecture cannot."""
    if model.config.model_type == "bloom":
        _connect_bloom(model, context)
        return
    kind = type(model).__name__
    try:
        model.set_attn_implementation(IMPLEMENTATION)
    except ValueError as error:
        raise ModelError(f"{kind} cannot take another attention: {error}") from error
    if model.config._attn_implementation != IMPLEMENTATION:
        raise ModelError(f"{kind} does not use transformers' attention interface, nor does Treadle know how to replace it")


def needs_positions(model: PreTrainedModel) -> bool:
    """Whether the model must be told each token's position: BLOOM knows only distances, which attention sees."""
    return str(model.config.model_type) != "bloom"


class PackedBloomAttention(nn.Module):
    """BloomAttention over the pool: the same weights under the same names, ALiBi by the distance of query and key."""

    def __init__(self, original: BloomAttention, context: ForwardContext) -> None:
        super().__init__()
        self.query_key_value = original.query_key_value
        self.dense = original.dense
        self.layer_idx = int(original.layer_idx)
        self.num_heads = int(original.num_heads)
        self.head_dim = int(original.head_dim)
        self._context = context
        self._how = LayerAttention(float(original.inv_norm_factor), alibi_slopes=alibi_slopes(self.num_heads))

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        **unused: object,  # noqa: ARG002  # mask, cache and ALiBi of tokens x tokens, which BLOOM passes by keyword
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[1, tokens, hidden] for `hidden_states` of that shape, `residual` added; no attention weights."""
        fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
        queries, keys, values = fused.transpose(1, 2).unbind(dim=3)
        attended = self._context.attend(self.layer_idx, queries, keys, values, self._how)
        return residual + self.dense(attended.flatten(2)), None


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi's slope for each head: a geometric row; heads beyond a power of two take every other one of a finer row."""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / whole) for head in range(whole)]
    slopes += [2.0 ** (-4.0 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return tuple(slopes)


def _connect_bloom(model: PreTrainedModel, context: ForwardContext) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, BloomAttention):
                setattr(module, name, PackedBloomAttention(child, context))
    # BLOOM cannot be asked to: without this it builds a mask of tokens x tokens in every step
    model.config._attn_implementation_internal = IMPLEMENTATION
