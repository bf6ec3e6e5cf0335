"""Between transformers' attention interface and an attention backend.

transformers calls one registered function for every layer. Which pass it belongs to stands on the attention module
itself, in a ForwardContext: not every model hands keyword arguments down to its attention (BLOOM does not), and nothing
global is needed this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from treadle.errors import ExecutionError, ModelError
from treadle_plugins.attention.spec import LayerAttention
from treadle_plugins.forward.spec import Attend

IMPLEMENTATION = "treadle"
"""Name under which the functions below are registered with transformers."""
_CONTEXT = "treadle_context"
_WINDOW = "treadle_window"
_HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings", "dropout", "hidden_states"})
"""Arguments that models pass to their attention and that do not change what a query sees in inference."""


class LayerFacts(NamedTuple):
    """What one layer's attention looks like, read off a pass."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    how: LayerAttention


@dataclass
class ForwardContext:
    """The pass that is being computed. One per executor; every module of its model refers to it."""

    facts: dict[int, LayerFacts] = field(default_factory=dict)
    """How each layer attends, learnt from the first pass."""
    learnt: bool = False
    """The first pass is over: a layer that attends in another way than before is refused."""
    _current: Attend | None = None

    @contextmanager
    def computing(self, attend: Attend) -> Iterator[None]:
        """Within the block, modules of the model attend through `attend`."""
        self._current = attend
        try:
            yield
        finally:
            self._current = None

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, how: LayerAttention
    ) -> torch.Tensor:
        """[1, tokens, heads, head_dim] for queries, keys and values [1, heads, tokens, head_dim]."""
        facts = LayerFacts(queries.shape[1], keys.shape[1], keys.shape[3], keys.dtype, how)
        if self._current is None:
            raise ExecutionError("the model was called outside of a pass: its attention belongs to the executor")
        if self.learnt and facts != self.facts[layer]:
            raise ModelError(f"layer {layer} attends as {facts}, but at start-up as {self.facts[layer]}: not supported")
        self.facts[layer] = facts
        rows = (part[0].transpose(0, 1) for part in (queries, keys, values))
        return self._current(layer, *rows)[None]


def register() -> None:
    """Make `treadle` known to transformers as an attention implementation. Doing it again changes nothing."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


def bind(model: nn.Module, context: ForwardContext) -> None:
    """Let every module of `model` find `context`."""
    for module in model.modules():
        setattr(module, _CONTEXT, context)


def _attention(  # transformers passes the first five by position
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: heads before tokens in, tokens before heads out; no weights."""
    name = type(module).__name__
    context, layer = getattr(module, _CONTEXT, None), getattr(module, "layer_idx", None)
    if not isinstance(context, ForwardContext) or not isinstance(layer, int):
        raise ModelError(f"{name} attends without a layer index, or was added after the model was bound: not supported")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModelError(f"{name} looks ahead: only causal attention is supported")
    for argument, given in others.items():
        if given is not None and given is not False and argument not in _HARMLESS:
            raise ModelError(f"{name} attends with {argument!r}, which is not supported")
    window = _window(name, attention_mask, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return context.attend(layer, query, key, value, LayerAttention(scale, window, softcap)), None


def _window(name: str, mask: torch.Tensor | None, window: int | None) -> int | None:
    """The layer's window: the model states it in the mask that it asked for, most also in an argument."""
    masked: int | None = None
    if mask is not None:
        masked = getattr(mask, _WINDOW, None)
        if masked is None:
            raise ModelError(f"{name} attends with a mask of its own, of shape {tuple(mask.shape)}: not supported")
    if window is not None and window != masked:
        raise ModelError(f"{name} attends with window {window} and a mask for window {masked}: not supported")
    return masked


def _mask(
    q_length: int,
    kv_length: int,
    config: object,
    local_size: int | None = None,
    use_vmap: bool = False,
    **others: object,
) -> torch.Tensor | None:
    """transformers' mask function: None for causal; for a window a tensor without data that carries its size."""
    name = type(config).__name__
    if "allow_is_bidirectional_skip" in others:
        raise ModelError(f"{name} asks for attention that looks ahead: only causal attention is supported")
    if use_vmap:
        raise ModelError(f"{name} asks for a mask of its own: not supported")
    if local_size is None:
        return None
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if local_size != window or local_size == chunk:
        raise ModelError(f"{name} asks for attention in chunks of {local_size} tokens: not supported")
    mask = torch.empty((1, 1, q_length, kv_length), device="meta")
    setattr(mask, _WINDOW, int(local_size))
    return mask
