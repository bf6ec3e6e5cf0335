"""Logits as sums in float32, also of weights in 16 bits.

The best logits of a step lie around 20 to 30, where bfloat16 has steps of 0.125: rounded to it, two tokens that are 0.09 apart
tie, and which of them is taken is chance. So the LM head's product is the one that is never rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional

_PIECE_BYTES = 1 << 21
"""Of a weight, in float32: so much is widened at once and read again while it is still in a cache."""


def float32_sums(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., out] in float32 for `x` [..., in] and `weight` [out, in]; no copy of the whole weight is made."""
    if weight.dtype == torch.float32:
        return functional.linear(x.float(), weight, bias)
    rows = x.reshape(-1, x.shape[-1]).float()
    out = rows.new_empty(len(rows), len(weight))
    at_once = max(1, _PIECE_BYTES // (4 * weight.shape[1]))
    for piece, part in zip(torch.split(weight, at_once), torch.split(out, at_once, dim=1), strict=True):
        torch.mm(rows, piece.float().t(), out=part)
    if bias is not None:
        out += bias.float()
    return out.view(*x.shape[:-1], len(weight))


def rounds(head: nn.Module | None) -> bool:
    """Whether what `head` answers is rounded to fewer bits than float32, or cannot be known."""
    if head is None:
        return True
    dtypes = {parameter.dtype for parameter in head.parameters()}
    return not dtypes <= {torch.float32, torch.float64}


def can_sum(head: nn.Module | None) -> bool:
    """Whether `head` is a linear layer that computes as its class says, so that `summing` changes its rounding alone."""
    return type(head) is nn.Linear and "forward" not in vars(head)


@contextmanager
def summing(head: nn.Module | None) -> Iterator[None]:
    """Within the block `head` answers with sums in float32, if it can; hooks on it are called as before."""
    if not (isinstance(head, nn.Linear) and can_sum(head) and rounds(head)):
        yield
        return
    vars(head)["forward"] = partial(float32_sums, weight=head.weight, bias=head.bias)
    try:
        yield
    finally:
        del vars(head)["forward"]
