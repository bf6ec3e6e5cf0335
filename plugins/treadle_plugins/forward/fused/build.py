"""The best forward pass that a model on the CPU can have."""

from __future__ import annotations

import enum

import torch
from transformers import PreTrainedModel

from treadle.logs import get_logger
from treadle_plugins.forward.fused import gpt, llama
from treadle_plugins.forward.fused.kernels import Kernels, kernels_for
from treadle_plugins.forward.fused.linear import cannot_pack
from treadle_plugins.forward.fused.modules import ReplacedForward, replace
from treadle_plugins.forward.fused.report import Report
from treadle_plugins.forward.spec import PackedForward

log = get_logger(__name__)


class Weights(enum.Enum):
    """When weights are packed."""

    PACKED = "packed"
    """Whenever the processor can use it."""
    ONEDNN = "onednn"
    """The same, but by oneDNN alone, for comparison."""
    EXACT = "exact"
    """Not in float32, where the packed products round up to twice as much as those of transformers."""


def build(
    model: PreTrainedModel, plain: PackedForward, kernels: Kernels | None = None, weights: Weights = Weights.PACKED
) -> PackedForward:
    """Take over the weights of `model`, one layer after another, and answer with a pass that uses them.

    What is not known is computed by `plain`, the model's own pass, with its linear layers packed; `describe` says what
    and why. `kernels` are compiled ones where there are any.
    """
    reason = cannot_pack(model.dtype)
    if reason is None and weights is Weights.EXACT and model.dtype == torch.float32:
        reason = "no weights, since packed products round more in float32 (execute.forward = 'fused' packs them)"
    forward = _build(model, plain, kernels or kernels_for(model.dtype), Report(reason, weights is not Weights.ONEDNN))
    log.info("forward_built", **{name.replace(" ", "_"): value for name, value in forward.describe().items()})
    return forward


def _build(model: PreTrainedModel, plain: PackedForward, kernels: Kernels, report: Report) -> PackedForward:
    if llama.unlike(model) is None:
        return llama.LlamaForward(model, kernels, report)
    if gpt.unlike(model) is None:
        return gpt.GPTForward(model, kernels, report)
    name = type(model).__name__
    known = name.removesuffix("ForCausalLM") in llama.FAMILIES
    report.plain[f"{name} ({llama.unlike(model) if known else gpt.unlike(model)})"] += 1
    if report.unpacked is not None:
        return ReplacedForward(plain, "transformers", report)
    replace(model, report)
    return ReplacedForward(plain, "transformers, linear layers packed", report)
