"""Embedding and LM head. Where the model ties them, one packed weight serves both. Logits are never rounded to 16 bits.

oneDNN packs a weight [out, in] in float32 as    [out / block, in, block]
with blocks of 16 to 64. Which it chose is found out by comparing, and when no guess holds, both keep the weight as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from treadle_plugins.forward.fused import products
from treadle_plugins.forward.fused.blocked import BlockedLinear, blocked
from treadle_plugins.forward.fused.linear import Packed, PackedLinear, bias_of, give_up, is_linear, is_plain, weight_of
from treadle_plugins.forward.fused.report import Report
from treadle_plugins.forward.logits import float32_sums, summing

_BLOCKS = (64, 48, 32, 16)
_ROWS_AT_ONCE = 4096


class Embedding:
    """Rows of a weight [vocabulary, hidden] that lies in memory as it is."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] for [tokens]."""
        rows: torch.Tensor = self._module(token_ids[None])[0]
        return rows


class PackedEmbedding:
    """Rows of a packed weight, gathered piece by piece."""

    def __init__(self, packed: Packed, pieces: torch.Tensor) -> None:
        """`pieces` are [vocabulary / block, hidden / pair, block, pair]."""
        self._packed = packed  # owns the memory that `pieces` shows
        self._pieces, self._block = pieces, pieces.shape[2]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] for [tokens]."""
        pieces = self._pieces[token_ids // self._block, :, token_ids % self._block]  # [tokens, hidden / pair, pair]
        return pieces.flatten(1)


class SummedHead:
    """An LM head's weight [vocabulary, hidden] in its own order; the embedding may share it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        """Of weight and bias."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary] in float32."""
        return float32_sums(x, self._weight, self._bias)


class BlockedHead:
    """A packed LM head; blocks are whole, so its last outputs may stand for no token."""

    def __init__(self, packed: BlockedLinear, num_tokens: int) -> None:
        self._packed, self._num_tokens = packed, num_tokens

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary] in float32."""
        return self._packed.sums(x)[:, : self._num_tokens]


class CalledHead:
    """A module that is no ordinary linear layer: called with [1, tokens, hidden], and told not to round if it can be."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary]."""
        with summing(self._module):
            out: torch.Tensor = self._module(x[None])[0]
        return out


Head = Callable[[torch.Tensor], torch.Tensor]
"""[tokens, vocabulary] in float32 for [tokens, hidden]."""


class Vocabulary(NamedTuple):
    """Both ends of a model."""

    embedding: Embedding | PackedEmbedding
    head: Head


def vocabulary_of(embedding: nn.Module, head: nn.Module, report: Report) -> Vocabulary:
    """The embedding and the LM head, packed where they can be; no weight is kept twice."""
    packed = packed_vocabulary(embedding, head, report)
    if packed is not None:
        return packed
    shared = tied(embedding, head)
    if not shared:
        report.keeps(embedding)
    if not is_linear(head):
        report.calls(head, "LM head")
        return Vocabulary(Embedding(embedding), CalledHead(head))
    own = SummedHead(weight_of(head), bias_of(head))
    report.holds(own)
    if report.unpacked is None:
        report.plain["LM head (not packed, summed in float32)"] += 1
    if not shared:
        give_up(head)
    return Vocabulary(Embedding(embedding), own)


def packed_vocabulary(embedding: nn.Module, head: nn.Module, report: Report) -> Vocabulary | None:
    """The same where the head can be packed and yet answers in float32; else None, and nothing is taken over."""
    shared = tied(embedding, head)
    if report.unpacked is not None or not is_linear(head):
        return None
    if shared and not (type(embedding) is nn.Embedding and is_plain(embedding)):
        return None
    num_tokens = len(weight_of(head))
    packed = _pack(weight_of(head), bias_of(head), report)
    rows = _shared(packed, weight_of(head)) if shared and packed is not None else Embedding(embedding)
    if packed is None or rows is None:
        return None
    report.packs(packed, "LM head and embedding" if shared else "LM head")
    give_up(head)
    if shared:
        give_up(embedding)
    else:
        report.keeps(embedding)
    return Vocabulary(rows, BlockedHead(packed, num_tokens) if isinstance(packed, BlockedLinear) else packed)


def _pack(weight: torch.Tensor, bias: torch.Tensor | None, report: Report) -> Packed | None:
    """Ours wherever it runs: oneDNN rounds to what it multiplies, so float32 alone is left to it."""
    if weight.dtype == torch.float32:
        return PackedLinear(weight, bias)
    if not report.own_products:
        return None
    missing = -len(weight) % products.BLOCK
    if missing:
        weight = functional.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else functional.pad(bias, (0, missing))
    return blocked(weight, bias)


def tied(embedding: nn.Module, head: nn.Module) -> bool:
    """Whether both have the same weight."""
    return getattr(embedding, "weight", None) is getattr(head, "weight", head)


def _shared(packed: Packed, weight: torch.Tensor) -> PackedEmbedding | None:
    """An embedding that reads `packed` and answers exactly as `weight` would; None when its order is unknown."""
    if isinstance(packed, BlockedLinear):
        return PackedEmbedding(packed, packed.pieces)
    rows, columns = weight.shape
    row_bytes, num_bytes = columns * weight.dtype.itemsize, torch.ops.mkldnn._nbytes(packed.weight)
    if num_bytes % row_bytes or num_bytes // row_bytes < rows:
        return None
    for block in _BLOCKS:
        if num_bytes // row_bytes % block == 0:
            embedding = PackedEmbedding(packed, _pieces(packed, weight, block))
            if all(_equal(embedding, weight, first) for first in range(0, rows, _ROWS_AT_ONCE)):
                return embedding
    return None


def _pieces(packed: PackedLinear, weight: torch.Tensor, block: int) -> torch.Tensor:
    """What oneDNN packed, as a tensor, if it is in blocks of this size."""
    address = torch.ops.mkldnn.data_ptr(packed.weight)
    memory = (ctypes.c_char * torch.ops.mkldnn._nbytes(packed.weight)).from_address(address)
    return torch.frombuffer(memory, dtype=weight.dtype).view(-1, weight.shape[1], block, 1)


def _equal(embedding: PackedEmbedding, weight: torch.Tensor, first: int) -> bool:
    last = min(first + _ROWS_AT_ONCE, len(weight))
    return torch.equal(embedding(torch.arange(first, last)), weight[first:last])
