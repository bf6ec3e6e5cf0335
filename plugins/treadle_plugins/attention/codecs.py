"""Arithmetic of the `linear` scheme: rows of a head's K or V to codes of a few bits, and back.

All of it is float32, element by element or over one row, and rounds half to even: a row's codes follow from the row alone, bit
for bit, whatever is computed beside it. A kernel that does the same operations in the same order stores the same bytes.

    asymmetric   minimum = f16(min(row))   scale = f16((max(row) - minimum) / top)       code = round((x - minimum) / scale)
    symmetric    extreme = the element farthest from 0        scale = f16(-extreme / middle)   code = round(x / scale) + middle

with top = 2 ** bits - 1 and middle = 2 ** (bits - 1), codes cut to 0..top, and half-precision numbers cut to its finite range. A
symmetric scale is negative when the extreme is positive, so that the extreme always gets code 0: that way all codes are used.

With 4 bits or fewer a symmetric scale is then fitted: with steps c = code - middle, it becomes f16(sum(x * c) / sum(c * c)), the
one that makes the squared error least for these codes, and the codes are taken again. Sums are folded: the second half of a group
is added to the first, then again, until one number is left; of an odd number the last one is added to the first. A fitted scale
that is not finite (0 / 0, or an overflow) is not used.

Where a scale is 0 the code is 0, or `middle` when symmetric; a quotient that is NaN gives code 0. Groups with NaN or infinity get
such a scale or minimum and do not come back finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

FITTED_BITS = 4
"""Symmetric scales of so many bits or fewer are fitted."""
_LARGEST = torch.finfo(torch.float16).max


class Encoded(NamedTuple):
    """Rows as they are stored."""

    codes: torch.Tensor  # [..., row_bytes] uint8
    scales: torch.Tensor | None  # [..., groups] float16; None where scales are static
    minima: torch.Tensor | None  # [..., groups] float16; None where codes are symmetric or scales static


class Turn(NamedTuple):
    """How rows of some heads of one layer are turned before they are quantized, and what meets them."""

    rotation: int | None
    """Size of the Hadamard blocks."""
    factors: torch.Tensor | None  # [heads, head_dim] float32
    centers: torch.Tensor | None  # [heads, head_dim] float32

    @property
    def is_none(self) -> bool:
        """Whether rows stay as they are."""
        return self.rotation is None and self.factors is None

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [tokens, heads, head_dim] as they are quantized: balanced, then rotated."""
        if self.centers is not None:
            rows = rows.float() - self.centers
        if self.factors is not None:
            rows = rows.float() / self.factors
        return self._rotated(rows)

    def queries(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries [tokens, KV heads, queries of each, head_dim] as they meet stored keys."""
        return self._rotated(queries if self.factors is None else queries * self.factors[:, None])

    def outputs(self, outputs: torch.Tensor) -> torch.Tensor:
        """Sums of stored values [tokens, KV heads, queries of each, head_dim] as sums of values."""
        return self._rotated(outputs)

    def _rotated(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.rotation is None else hadamard(rows, self.rotation)


class Channels(NamedTuple):
    """Static scales of some heads of one layer."""

    scales: torch.Tensor  # [heads, head_dim] float32
    minima: torch.Tensor | None  # [heads, head_dim] float32; None where codes are symmetric


@dataclass(frozen=True)
class Codec:
    """How one row of `head_dim` elements becomes codes."""

    bits: int
    """8, 4 or 2."""
    head_dim: int
    group: int
    """Elements that share a scale."""
    symmetric: bool = True

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The code of 0 where codes are symmetric."""
        return 1 << (self.bits - 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's codes."""
        return self.head_dim * self.bits // 8

    @property
    def num_groups(self) -> int:
        """Scales of one row."""
        return self.head_dim // self.group

    def encode(self, rows: torch.Tensor) -> Encoded:
        """Quantize rows [..., head_dim], each group of a row by its own scale."""
        grouped = torch.unflatten(rows.float(), -1, (self.num_groups, self.group))
        low, high = grouped.amin(-1), grouped.amax(-1)
        if self.symmetric:
            extreme = torch.where(-low > high, low, high)
            scales, minima = self._fitted(grouped, _half(-extreme / self.middle)), None
            codes = self._codes(grouped, scales.float()[..., None], None)
        else:
            minima = _half(low)
            scales = _half((high - minima.float()) / self.top)
            codes = self._codes(grouped, scales.float()[..., None], minima.float()[..., None])
        return Encoded(self.pack(codes.flatten(-2)), scales, minima)

    def encode_static(self, rows: torch.Tensor, channels: Channels) -> Encoded:
        """Quantize rows [..., heads, head_dim] by scales of each head's channels. NaN gets the code of a zero scale."""
        return Encoded(self.pack(self._codes(rows.float(), *channels)), None, None)

    def decode(self, stored: Encoded) -> torch.Tensor:
        """Rows [..., head_dim] in float32."""
        assert stored.scales is not None, "rows without scales are decoded with those of their channels"
        grouped = torch.unflatten(self.unpack(stored.codes).float(), -1, (self.num_groups, self.group))
        minima = None if stored.minima is None else stored.minima.float()[..., None]
        return self._values(grouped, stored.scales.float()[..., None], minima).flatten(-2)

    def decode_static(self, stored: Encoded, channels: Channels) -> torch.Tensor:
        """Rows [..., heads, head_dim] in float32."""
        return self._values(self.unpack(stored.codes).float(), *channels)

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes [..., head_dim] as bytes [..., row_bytes]: byte `j` holds elements j, j + row_bytes, ..., low bits first."""
        parts = torch.unflatten(codes, -1, (8 // self.bits, self.row_bytes)).unbind(-2)
        packed = parts[0]
        for place, part in enumerate(parts[1:], start=1):
            packed = packed | (part << (place * self.bits))
        return packed

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The reverse."""
        return torch.cat([(packed >> shift) & self.top for shift in range(0, 8, self.bits)], dim=-1)

    def _fitted(self, grouped: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Scales [..., groups] with the least squared error for the codes that `scales` give."""
        if self.bits > FITTED_BITS:
            return scales
        steps = self._codes(grouped, scales.float()[..., None], None).float() - self.middle
        fitted = _folded(grouped * steps) / _folded(steps * steps)
        return torch.where(fitted.isfinite(), _half(fitted), scales)

    def _codes(self, rows: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None) -> torch.Tensor:
        steps = (rows / scales).round() + self.middle if minima is None else ((rows - minima) / scales).round()
        steps = torch.where(scales == 0, self.middle if minima is None else 0, steps)
        return steps.nan_to_num(0.0).clamp(0, self.top).to(torch.uint8)

    def _values(self, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None) -> torch.Tensor:
        return (codes - self.middle) * scales if minima is None else codes * scales + minima


def hadamard(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Rows [..., head_dim] rotated in blocks of `size`, a power of two, in float32. Doing it again undoes it.

    Butterflies over distances 1, 2, 4, ..., (a, b) -> (a + b, a - b), then a factor of 1 / sqrt(size). Sums of pairs, unlike a
    product with a matrix, give a row the same bits whatever stands beside it.
    """
    turned = rows.float()
    distance = 1
    while distance < size:
        first, second = torch.unflatten(turned, -1, (-1, 2, distance)).unbind(-2)
        turned = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        distance *= 2
    return turned * (1 / math.sqrt(size))


def _folded(numbers: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension, in an order that depends on its length alone."""
    while (length := numbers.shape[-1]) > 1:
        half = length // 2
        folded = numbers[..., :half] + numbers[..., half : 2 * half]
        if length % 2:
            folded[..., 0] += numbers[..., -1]
        numbers = folded
    return numbers[..., 0]


def _half(numbers: torch.Tensor) -> torch.Tensor:
    """In half precision; what is finite stays finite."""
    kept = torch.where(numbers.isfinite(), numbers.clamp(-_LARGEST, _LARGEST), numbers)
    return kept.half()
