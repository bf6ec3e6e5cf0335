"""Norms over rows, into a buffer that all layers of a pass share."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from treadle_plugins.forward.fused.kernels import Kernels
from treadle_plugins.forward.fused.linear import is_plain
from treadle_plugins.forward.fused.report import Report


class Norm(Protocol):
    """A norm."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] for `x` of that shape, which is contiguous; perhaps in `out`, perhaps not."""
        ...


class RMSNorm:
    """Fused; keeps a float32 copy of the weight."""

    def __init__(self, module: nn.Module, eps: float, kernels: Kernels) -> None:
        self._weight, self._eps, self._kernels = module.get_parameter("weight").detach().float().clone(), eps, kernels

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See Norm."""
        self._kernels.rms_norm(x, self._weight, self._eps, out)
        return out


class LayerNorm:
    """Fused; keeps float32 copies of weight and bias."""

    def __init__(self, module: nn.LayerNorm, kernels: Kernels) -> None:
        self._weight, self._eps, self._kernels = module.weight.detach().float().clone(), module.eps, kernels
        bias = torch.zeros_like(self._weight) if module.bias is None else module.bias.detach()
        self._bias = bias.float().clone()

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See Norm."""
        self._kernels.layer_norm(x, self._weight, self._bias, self._eps, out)
        return out


class CalledNorm:
    """Any other module, called with [1, tokens, hidden]."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  # see Norm
        """See Norm."""
        normed: torch.Tensor = self._module(x[None])[0]
        return normed


def norm_of(module: Any, kind: str, kernels: Kernels, report: Report) -> Norm:
    """`module` fused when it is a plain LayerNorm, or of the class `kind`, which is an RMS norm."""
    if is_plain(module):
        if type(module).__name__ == kind:
            report.keeps(module)
            return RMSNorm(module, float(module.variance_epsilon), kernels)
        if type(module) is nn.LayerNorm:
            report.keeps(module)
            return LayerNorm(module, kernels)
    report.calls(module, "norm")
    return CalledNorm(module)
