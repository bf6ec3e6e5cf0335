"""Linear layers whose weights are packed for the processor, by oneDNN or by us, and those that must be called as they are.

The packing does not depend on the number of rows that oneDNN is told to expect (measured, see docs/log.md), so each
weight is packed once. What oneDNN can do at the end of a product, such as adding the residual, it does there, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from treadle_plugins.forward.fused.blocked import BlockedLinear, beats_onednn, blocked
from treadle_plugins.forward.fused.memory import give_back
from treadle_plugins.forward.fused.report import Report

_PACK = torch.ops.mkldnn._reorder_linear_weight.default
_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_LINEAR_WITH = torch.ops.mkldnn._linear_pointwise.binary


def cannot_pack(dtype: torch.dtype) -> str | None:
    """Why weights in `dtype` cannot be packed here; None when they can."""
    if not torch._C._has_mkldnn:
        return "this torch was built without oneDNN"
    if dtype == torch.float32:
        return None
    if dtype == torch.bfloat16:
        return None if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "this processor does not multiply bfloat16"
    return f"weights in {str(dtype).removeprefix('torch.')} are not packed"


class Activation(NamedTuple):
    """An activation under oneDNN's name, or only as a function."""

    function: Callable[[torch.Tensor], torch.Tensor]
    name: str | None = None
    algorithm: str = ""


_KNOWN: tuple[tuple[str, str, str], ...] = (
    (SiLUActivation.__name__, "swish", ""),
    (nn.SiLU.__name__, "swish", ""),
    (GELUTanh.__name__, "gelu", "tanh"),
    (NewGELUActivation.__name__, "gelu", "tanh"),
    ("BloomGelu", "gelu", "tanh"),
    ("GELUActivation", "gelu", "none"),
    (nn.ReLU.__name__, "relu", ""),
)


def activation_of(module: Any, report: Report) -> Activation:
    """`module` as oneDNN knows it, or as a function of its own."""
    for kind, name, algorithm in _KNOWN:
        if type(module).__name__ == kind and is_plain(module):
            return Activation(module, name, algorithm)
    report.plain[f"{type(module).__name__} (no activation that oneDNN fuses)"] += 1
    return Activation(module)


class Linear(Protocol):
    """A linear layer on rows [tokens, in], and what may follow it."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor: ...

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor: ...

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor: ...


class PackedLinear:
    """One packed weight [out, in] with an optional bias [out]; the original is no longer needed."""

    __slots__ = ("_bias", "_weight", "nbytes")
    by = "oneDNN"
    """What multiplies, for `treadle explain`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight: torch.Tensor = _PACK(weight.contiguous(), None)
        self._bias = None if bias is None else bias.clone()
        self.nbytes: int = torch.ops.mkldnn._nbytes(self._weight) + (0 if bias is None else bias.nbytes)
        """Of weight and bias."""

    @property
    def weight(self) -> torch.Tensor:
        """The packed weight, opaque to torch."""
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, out]."""
        out: torch.Tensor = _LINEAR(x, self._weight, self._bias, "none", [], "")
        return out

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[tokens, out] after `activation`."""
        if activation.name is None:
            return activation.function(self(x))
        out: torch.Tensor = _LINEAR(x, self._weight, self._bias, activation.name, [], activation.algorithm)
        return out

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[tokens, out], `residual` of that shape added."""
        out: torch.Tensor = _LINEAR_WITH(x, residual, self._weight, self._bias, "add")
        return out

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """[tokens, out], multiplied by `factor` of that shape."""
        out: torch.Tensor = _LINEAR_WITH(x, factor, self._weight, self._bias, "mul")
        return out


Packed = PackedLinear | BlockedLinear


def pack(weight: torch.Tensor, bias: torch.Tensor | None, report: Report) -> Packed:
    """By us where that is faster, else by oneDNN."""
    own = blocked(weight, bias) if report.own_products and beats_onednn() else None
    return own or PackedLinear(weight, bias)


class KeptLinear:
    """A weight [out, in] in its own order, multiplied by torch, which rounds as transformers does."""

    __slots__ = ("_bias", "_weight", "nbytes")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, out]."""
        return functional.linear(x, self._weight, self._bias)

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[tokens, out] after `activation`."""
        return activation.function(self(x))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[tokens, out], `residual` of that shape added."""
        return self(x).add_(residual)

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """[tokens, out], multiplied by `factor` of that shape."""
        return self(x).mul_(factor)


def gated(gate: Linear, up: Linear, activation: Activation, x: torch.Tensor) -> torch.Tensor:
    """`activation` of `gate` times `up`, both of `x`; in one go where that can be."""
    if activation.name == "swish" and isinstance(up, BlockedLinear) and up.may_be_gated_by(gate):
        return up.gated(x, gate)
    return up.times(x, gate.activated(x, activation))


class CalledLinear:
    """A module that is no ordinary linear layer (quantized, adapted, hooked): called with [1, tokens, in], as it is."""

    __slots__ = ("_module",)

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, out]."""
        out: torch.Tensor = self._module(x[None])[0]
        return out

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[tokens, out] after `activation`."""
        return activation.function(self(x))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[tokens, out], `residual` of that shape added."""
        return self(x) + residual

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """[tokens, out], multiplied by `factor` of that shape."""
        return self(x) * factor


def is_plain(module: nn.Module) -> bool:
    """Whether `module` does what its class says: no hooks, no forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return not hooks and "forward" not in vars(module)


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a linear layer that can be packed."""
    return type(module) in (nn.Linear, Conv1D) and is_plain(module)


def linear_of(module: nn.Module, name: str, report: Report) -> Linear:
    """`module` with its weight taken over and packed; as it is when it is no ordinary linear layer."""
    if not is_linear(module):
        report.calls(module, name)
        return CalledLinear(module)
    return _take([module], name, report)


def joined(modules: Sequence[nn.Module], name: str, report: Report) -> Linear:
    """The linear layers `modules` as one, their outputs side by side; apart when one of them is no ordinary one."""
    if all(is_linear(module) for module in modules):
        return _take(modules, name, report)
    return SideBySide([linear_of(module, f"{name}.{number}", report) for number, module in enumerate(modules)])


class SideBySide(CalledLinear):
    """Several layers on the same rows, computed one after another."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Linear]) -> None:
        super().__init__(nn.Identity())
        self._parts = tuple(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, all outputs]."""
        return torch.cat([part(x) for part in self._parts], dim=1)


def weight_of(module: nn.Module) -> torch.Tensor:
    """[out, in] of an ordinary linear layer."""
    weight = module.get_parameter("weight").detach()
    return weight.t() if type(module) is Conv1D else weight


def bias_of(module: nn.Module) -> torch.Tensor | None:
    """[out], or None."""
    bias: torch.Tensor | None = module._parameters.get("bias")
    return None if bias is None else bias.detach()


def give_up(module: nn.Module) -> None:
    """Let go of the module's own weights: it cannot be called any more."""
    for name in module._parameters:
        module._parameters[name] = None
    give_back()


def stored(weight: torch.Tensor, bias: torch.Tensor | None, name: str, report: Report) -> Packed | KeptLinear:
    """Packed, unless the report says that weights are not, and put on record."""
    if report.unpacked is not None:
        kept = KeptLinear(weight, bias)
        report.holds(kept)
        return kept
    packed = pack(weight, bias, report)
    report.packs(packed, name)
    return packed


def _take(modules: Sequence[nn.Module], name: str, report: Report) -> Linear:
    weights, biases = [weight_of(module) for module in modules], [bias_of(module) for module in modules]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = None
    if any(part is not None for part in biases):
        parts = [part if part is not None else own.new_zeros(len(own)) for part, own in zip(biases, weights, strict=True)]
        bias = torch.cat(parts)
    linear = stored(weight, bias, name, report)
    for module in modules:
        give_up(module)
    return linear
