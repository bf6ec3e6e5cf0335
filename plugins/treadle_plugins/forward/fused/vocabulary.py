"""Embedding and LM head. Where the model ties them, one packed weight serves both.

oneDNN packs a weight [out, in] as    [out / block, in / pair, block, pair]
with pairs of 2 in bfloat16, 1 in float32, and blocks of 16 to 64. Which it chose is found out by comparing, and when no
guess holds, both keep the weight as it was.
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from treadle_plugins.forward.fused.blocked import BlockedLinear
from treadle_plugins.forward.fused.linear import (
    CalledLinear,
    Linear,
    Packed,
    PackedLinear,
    bias_of,
    give_up,
    is_linear,
    is_plain,
    linear_of,
    pack,
    stored,
    weight_of,
)
from treadle_plugins.forward.fused.report import Report

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


def vocabulary_of(embedding: nn.Module, head: nn.Module, report: Report) -> tuple[Embedding | PackedEmbedding, Linear]:
    """The embedding and the LM head, packed where they can be; no weight is kept twice."""
    if not tied(embedding, head):
        report.keeps(embedding)
        return Embedding(embedding), linear_of(head, "LM head", report)
    if is_linear(head) and report.unpacked is not None:
        return Embedding(embedding), stored(weight_of(head), bias_of(head), "LM head", report)
    if is_linear(head) and type(embedding) is nn.Embedding and is_plain(embedding):
        packed = pack(weight_of(head), bias_of(head), report)
        shared = _shared(packed, weight_of(head))
        if shared is not None:
            report.packs(packed, "LM head and embedding")
            give_up(head)
            give_up(embedding)
            return shared, packed
    report.calls(head, "LM head, which shares the embedding's weight")
    return Embedding(embedding), CalledLinear(head)


def tied(embedding: nn.Module, head: nn.Module) -> bool:
    """Whether both have the same weight."""
    return getattr(embedding, "weight", None) is getattr(head, "weight", head)


def _shared(packed: Packed, weight: torch.Tensor) -> PackedEmbedding | None:
    """An embedding that reads `packed` and answers exactly as `weight` would; None when its order is unknown."""
    if isinstance(packed, BlockedLinear):
        return PackedEmbedding(packed, packed.pieces)
    rows, columns = weight.shape
    row_bytes, num_bytes = columns * weight.dtype.itemsize, torch.ops.mkldnn._nbytes(packed.weight)
    if row_bytes % 4 or num_bytes % row_bytes or num_bytes // row_bytes < rows:
        return None
    for block in _BLOCKS:
        if num_bytes // row_bytes % block == 0:
            embedding = PackedEmbedding(packed, _pieces(packed, weight, block))
            if all(_equal(embedding, weight, first) for first in range(0, rows, _ROWS_AT_ONCE)):
                return embedding
    return None


def _pieces(packed: PackedLinear, weight: torch.Tensor, block: int) -> torch.Tensor:
    """What oneDNN packed, as a tensor, if it is in blocks of this size."""
    pair = 4 // weight.dtype.itemsize
    address = torch.ops.mkldnn.data_ptr(packed.weight)
    memory = (ctypes.c_char * torch.ops.mkldnn._nbytes(packed.weight)).from_address(address)
    return torch.frombuffer(memory, dtype=weight.dtype).view(-1, weight.shape[1] // pair, block, pair)


def _equal(embedding: PackedEmbedding, weight: torch.Tensor, first: int) -> bool:
    last = min(first + _ROWS_AT_ONCE, len(weight))
    return torch.equal(embedding(torch.arange(first, last)), weight[first:last])
