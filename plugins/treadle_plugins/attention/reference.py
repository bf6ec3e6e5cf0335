"""For tests: what rows look like once they were stored, by the plainest means. No pool, no packing, one head after another."""

from __future__ import annotations

import torch

from treadle.contracts import KVFormat
from treadle_plugins.attention.codecs import Codec, hadamard
from treadle_plugins.attention.layout import SideFormat, side_of_keys, side_of_values


def requantized_keys(form: KVFormat, layer: int, keys: torch.Tensor) -> torch.Tensor:
    """Keys [tokens, kv_heads, head_dim] in float32 as attention sees them under `form`."""
    whole = [form.keeps_keys(layer, head) for head in range(keys.shape[1])]
    return _requantized(side_of_keys(form), form.rotation, layer, keys, whole)


def requantized_values(form: KVFormat, layer: int, values: torch.Tensor) -> torch.Tensor:
    """Values [tokens, kv_heads, head_dim] in float32 as attention sees them under `form`."""
    whole = [form.keeps_values(layer, head) for head in range(values.shape[1])]
    return _requantized(side_of_values(form), form.rotation, layer, values, whole)


def _requantized(side: SideFormat, rotation: int | None, layer: int, rows: torch.Tensor, whole: list[bool]) -> torch.Tensor:
    back = rows.float().clone()
    for head in (head for head, kept in enumerate(whole) if not kept):
        factors, centers = torch.ones(rows.shape[2]), torch.zeros(rows.shape[2])
        if side.balance is not None:
            factors = torch.tensor(side.balance.factors[layer][head])
            centers = torch.tensor(side.balance.centers[layer][head]) if side.balance.centers else centers
        turned = (rows[:, head].float() - centers) / factors
        turned = turned if rotation is None else hadamard(turned, rotation)
        turned = _rounded(side, layer, head, turned)
        turned = turned if rotation is None else hadamard(turned, rotation)
        back[:, head] = turned * factors + centers
    return back


def _rounded(side: SideFormat, layer: int, head: int, rows: torch.Tensor) -> torch.Tensor:
    assert side.bits is not None, "a side kept whole keeps every head"
    if side.channels is None:
        codec = Codec(side.bits, rows.shape[1], side.group or rows.shape[1], side.symmetric)
        return codec.decode(codec.encode(rows))
    scales = torch.tensor(side.channels.scales[layer][head])
    minima = side.channels.minima
    low = torch.tensor(minima[layer][head]) if minima else -scales * 2 ** (side.bits - 1)
    steps = torch.where(scales == 0, 0.0, (rows - low) / scales).round()
    return steps.clamp(0, 2**side.bits - 1) * scales + low
