"""One pass over a model's layers: attention over the pool, or, at start-up, a survey of how the layers attend."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from treadle.errors import ModelError
from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.spec import AttentionBackend, LayerAttention
from treadle_plugins.execute.torch_executor import families
from treadle_plugins.execute.torch_executor.interface import ForwardContext
from treadle_plugins.forward import logits
from treadle_plugins.forward.spec import Attend


class PoolAttention:
    """Attention of one step, over the pool. See Attend."""

    def __init__(self, backend: AttentionBackend, batch: PackedBatch, hows: Sequence[LayerAttention]) -> None:
        self._backend, self._batch, self._hows = backend, batch, hows
        self.num_calls = 0

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Store the keys and values, then attend."""
        self.num_calls += 1
        self._backend.write(layer, keys, values, self._batch)
        return self._backend.attend(layer, queries, self._batch, self._hows[layer])


class Attended(NamedTuple):
    """What one layer attended with, [tokens, heads, head_dim] each."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class SurveyAttention:
    """Every token sees itself alone. Keeps what each layer attended with. See Attend."""

    def __init__(self) -> None:
        self.seen: dict[int, Attended] = {}

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Each token's own value, for each of its heads."""
        if layer in self.seen:
            raise ModelError(f"layer {layer} attends twice in one pass: not supported")
        if keys.shape != values.shape or queries.shape[2] != keys.shape[2] or len(queries) != len(keys):
            shapes = f"queries {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
            raise ModelError(f"layer {layer} attends with {shapes}: one key and value of a query's size for each is needed")
        self.seen[layer] = Attended(queries.clone(), keys.clone(), values.clone())
        return values.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)


class Survey(NamedTuple):
    """What a pass over a few tokens showed."""

    logits: torch.Tensor
    attended: Mapping[int, Attended]


class PlainForward:
    """A model's own forward pass, as transformers has it. See PackedForward."""

    def __init__(self, model: PreTrainedModel, context: ForwardContext) -> None:
        """`model` is connected and bound to `context` already. Raises ModelError when it cannot be told positions."""
        self._model, self._context = model, context
        parameters = inspect.signature(model.forward).parameters
        self._passes_positions, self._passes_rows = "position_ids" in parameters, "logits_to_keep" in parameters
        if families.needs_positions(model) and not self._passes_positions:
            raise ModelError(f"{type(model).__name__} cannot be told the tokens' positions: packed tokens need them")

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits [rows, vocabulary] in float32, unless the head rounds them: see `describe`."""
        arguments: dict[str, object] = {"input_ids": token_ids[None], "use_cache": False, "return_dict": True}
        if self._passes_positions:
            arguments["position_ids"] = positions[None]
        if self._passes_rows:
            arguments["logits_to_keep"] = rows
        with self._context.computing(attend), logits.summing(self._model.get_output_embeddings()):
            answer: torch.Tensor = self._model(**arguments).logits[0]
        return answer if self._passes_rows else answer[rows]

    def describe(self) -> dict[str, str]:
        """Facts for `treadle explain`."""
        facts = {"forward": "transformers"}
        head = self._model.get_output_embeddings()
        if logits.rounds(head) and not logits.can_sum(head):
            facts["logits"] = f"rounded by {type(head).__name__}" if head is not None else "as the model rounds them"
        return facts

    def weight_bytes(self) -> int:
        """Of parameters and buffers."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())  # tied weights are stored once
