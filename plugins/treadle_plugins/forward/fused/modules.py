"""For architectures that no fused pass knows: transformers' own pass, its linear layers replaced by packed ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from treadle_plugins.forward.fused.linear import bias_of, give_up, is_linear, pack, weight_of
from treadle_plugins.forward.fused.report import Report
from treadle_plugins.forward.fused.vocabulary import PackedEmbedding, packed_vocabulary
from treadle_plugins.forward.spec import Attend, PackedForward


class PackedModule(nn.Module):
    """Stands where a linear layer stood. It has no `weight`."""

    def __init__(self, packed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out] for [..., in]."""
        out = self._packed(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[1])


class ReplacedForward:
    """A PackedForward: that of the model, over the modules that it has now."""

    def __init__(self, plain: PackedForward, title: str, report: Report) -> None:
        self._plain, self._title, self._report = plain, title, report

    def describe(self) -> dict[str, str]:
        """Facts for `treadle explain`."""
        return self._report.facts(self._title)

    def weight_bytes(self) -> int:
        """Of what was packed and what was not."""
        return self._plain.weight_bytes() + self._report.packed_bytes

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits [rows, vocabulary]."""
        return self._plain(token_ids, positions, rows, attend)


class PackedEmbeddingModule(nn.Module):
    """Stands where an embedding stood whose weight the LM head shares. It has no `weight`."""

    def __init__(self, rows: PackedEmbedding) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[..., hidden] for [...]."""
        out = self._rows(token_ids.flatten())
        return out.view(*token_ids.shape, out.shape[1])


def replace(model: PreTrainedModel, report: Report) -> None:
    """Put packed layers in the place of the linear layers of `model`; a weight that two modules share stays as it is,
    unless they are the embedding and the LM head. An LM head that would round when packed stays too."""
    _replace_vocabulary(model, report)
    shared, head = _shared_weights(model), model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not is_linear(child):
                continue
            if id(child.weight) in shared:
                report.plain[f"{name} (shares its weight)"] += 1
                continue
            if child is head:
                report.plain[f"{name} (not packed, summed in float32)"] += 1
                continue
            packed = pack(weight_of(child), bias_of(child), report)
            report.packs(packed, name)
            give_up(child)
            setattr(parent, name, PackedModule(packed))
    for module in model.modules():
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)) and not is_linear(module):
            report.plain[type(module).__name__] += 1


def _replace_vocabulary(model: PreTrainedModel, report: Report) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        return
    names = {id(module): name for name, module in model.named_modules()}
    packed = packed_vocabulary(embedding, head, report)
    if packed is None:
        return
    model.set_submodule(names[id(head)], PackedModule(packed.head))
    if isinstance(packed.embedding, PackedEmbedding):
        model.set_submodule(names[id(embedding)], PackedEmbeddingModule(packed.embedding))


def _shared_weights(model: PreTrainedModel) -> set[int]:
    """Ids of weights that more than one module holds."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared
