"""From the pool's storage to what kernels are compiled for, and told of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from treadle_plugins.attention.layout import SideFormat, side_of_keys, side_of_values
from treadle_plugins.attention.numba_backend import jobs
from treadle_plugins.attention.numba_backend.shape import PARAMETERS, KernelShape, PackedForm, SideForm
from treadle_plugins.attention.spec import AttentionSpec
from treadle_plugins.attention.storage import SideStorage
from treadle_plugins.kernels.cpu import Cpu

_LANES = 16
"""Elements that share all there is to share: as many as the widest vector has lanes."""
_MOST_GROUPS = PARAMETERS // 4 - 1


def unsuited(spec: AttentionSpec) -> str | None:
    """Why kernels cannot take heads or groups of this size; None when they can."""
    if spec.head_dim % _LANES:
        return f"head size {spec.head_dim} is no multiple of {_LANES}"
    for label, side in (("keys", side_of_keys(spec.kv_format)), ("values", side_of_values(spec.kv_format))):
        group = side.group or spec.head_dim
        if side.bits is None or side.channels is not None:
            continue
        if group % _LANES:
            return f"{label}: groups of {group} are no multiple of {_LANES}"
        if spec.head_dim // group > _MOST_GROUPS:
            return f"{label}: {spec.head_dim // group} groups are more than {_MOST_GROUPS}"
    return None


def shape_of(spec: AttentionSpec, keys: SideStorage, values: SideStorage, cpu: Cpu) -> KernelShape:
    """What the kernels for a pool are compiled for."""
    form = spec.kv_format
    forms = (_form_of(spec, keys, side_of_keys(form)), _form_of(spec, values, side_of_values(form)))
    return KernelShape(spec.dtype, spec.head_dim, cpu, *forms)


def describe(spec: AttentionSpec, shape: KernelShape, keys: SideStorage, values: SideStorage) -> np.ndarray[Any, Any]:
    """[layers, kv_heads, HEAD_WORDS]: where each head lies, and what it is turned and scaled by."""
    words = np.zeros((spec.num_layers, spec.num_kv_heads, jobs.HEAD_WORDS), np.int64)
    for at, side, form in ((jobs.KEY_SIDE, keys, shape.keys), (jobs.VALUE_SIDE, values, shape.values)):
        for layer in range(spec.num_layers):
            own = words[layer, :, at : at + jobs.VALUE_SIDE]
            if side.whole_heads[layer]:
                _fill(own, side.whole_heads[layer], side.whole(layer), shape.row_bytes)
            if side.packed_heads[layer]:
                assert form.packed is not None, "packed heads have a form"
                _fill(own, side.packed_heads[layer], side.packed(layer), form.packed.row_bytes)
                _fill_channels(own, side, layer)
    return words


def _form_of(spec: AttentionSpec, side: SideStorage, given: SideFormat) -> SideForm:
    if side.layout is None:
        return SideForm()
    layout, codec = side.layout, side.layout.codec
    packed = PackedForm(
        bits=codec.bits,
        head_dim=spec.head_dim,
        group=spec.head_dim if layout.static else codec.group,
        symmetric=codec.symmetric,
        static=layout.static,
        row_bytes=codec.row_bytes,
        scales_at=layout.scales_at,
        minimum_after=layout.minima_at - layout.scales_at,
        rotation=spec.kv_format.rotation,
        balanced=given.balance is not None,
        centered=given.balance is not None and given.balance.centers is not None,
    )
    return SideForm(any(side.whole_heads), packed)


def _fill(words: np.ndarray[Any, Any], heads: Sequence[int], tensor: torch.Tensor, row_bytes: int) -> None:
    """Where heads lie in a tensor [block, head, ...]."""
    block_bytes, head_bytes = (tensor.stride(dim) * tensor.itemsize for dim in (0, 1))
    words[heads, jobs.ADDRESS] = tensor.data_ptr() + np.arange(len(heads)) * head_bytes
    words[heads, jobs.BLOCK_BYTES], words[heads, jobs.ROW_BYTES] = block_bytes, row_bytes
    words[heads, jobs.PACKED] = tensor.dtype == torch.uint8


def _fill_channels(words: np.ndarray[Any, Any], side: SideStorage, layer: int) -> None:
    for word, numbers in _channels(side, layer):
        if numbers is not None:
            words[side.packed_heads[layer], word] = numbers.data_ptr() + np.arange(len(numbers)) * 4 * numbers.shape[1]


def _channels(side: SideStorage, layer: int) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Numbers for each channel, [packed heads, head_dim] float32, which the storage keeps."""
    if side.channels is not None:
        yield jobs.SCALES, side.channels[layer].scales
        yield jobs.MINIMA, side.channels[layer].minima
    yield jobs.FACTORS, side.turns[layer].factors
    yield jobs.CENTERS, side.turns[layer].centers
