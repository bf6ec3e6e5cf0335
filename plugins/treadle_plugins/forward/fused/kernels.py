"""What lies between the matrix products: norms and rotation, in torch (the reference) or compiled."""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch.nn import functional


class Kernels(Protocol):
    """Operations on rows [tokens, size] in float32 or bfloat16, computed in float32."""

    @property
    def name(self) -> str:
        """Name for `treadle explain`."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """`out` = `x` over the root of the mean of its squares, times `weight` [size] in float32."""
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """`out` = `x` less its mean, over its deviation, times `weight`, plus `bias` [size], both in float32."""
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int, head_dim: int) -> None:
        """Turn the first `num_heads` heads of each row in place: element `i` with `i + head_dim / 2`.

        `cos` and `sin` are [tokens, head_dim / 2] in float32, contiguous.
        """
        ...


class TorchKernels:
    """The reference."""

    name = "torch"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """See Kernels."""
        out.copy_(functional.rms_norm(x.float(), (x.shape[1],), weight, eps))

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """See Kernels."""
        out.copy_(functional.layer_norm(x.float(), (x.shape[1],), weight, bias, eps))

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int, head_dim: int) -> None:
        """See Kernels."""
        heads = x[:, : num_heads * head_dim].view(len(x), num_heads, 2, head_dim // 2)
        first, second = heads.float().unbind(dim=2)
        cos, sin = cos[:, None], sin[:, None]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=2)
        heads.copy_(turned)


def kernels_for(dtype: torch.dtype) -> Kernels:
    """Compiled kernels where numba is installed and knows `dtype`."""
    if importlib.util.find_spec("numba") is None:
        return TorchKernels()
    from treadle_plugins.forward.fused.compiled import CompiledKernels

    return CompiledKernels(dtype) if dtype in CompiledKernels.dtypes else TorchKernels()
