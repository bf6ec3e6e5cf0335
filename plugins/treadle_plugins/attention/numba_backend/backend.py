"""The backend `numba`."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.layout import unreadable
from treadle_plugins.attention.numba_backend import jobs, plan
from treadle_plugins.attention.numba_backend.compiled import default_cache_dir, load
from treadle_plugins.attention.numba_backend.cpu import host
from treadle_plugins.attention.numba_backend.shape import KernelShape, Scratch
from treadle_plugins.attention.numba_backend.threads import Threads
from treadle_plugins.attention.spec import AttentionSpec, LayerAttention
from treadle_plugins.attention.storage import SideStorage, open_sides

_DTYPES = ("float32", "bfloat16", "float16")
_HEAD_DIMS = 16
_SMALL_COST = 4096
"""Tokens times rows below which waking the other threads takes longer than the work."""
_SMALL_WRITE = 65536
"""Bytes, likewise."""
_LOG2E = 1.4426950408889634
_EVERYTHING = 1 << 60
"""A window that no context fills."""


class NumbaAttention:
    """Attention by compiled kernels, on the threads of torch."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """None when it can do what `spec` asks for, else the reason why it cannot."""
        if spec.device != "cpu":
            return f"device {spec.device!r} is not 'cpu'"
        if spec.dtype not in _DTYPES:
            return f"precision {spec.dtype!r} is none of {', '.join(_DTYPES)}"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly"
        if spec.head_dim % _HEAD_DIMS:
            return f"head size {spec.head_dim} is no multiple of {_HEAD_DIMS}"
        if spec.kv_format.name != "whole":
            return f"KV format {spec.kv_format.name!r} is not 'whole'"
        return unreadable(spec)

    def __init__(self, spec: AttentionSpec, cache_dir: Path | None = None) -> None:
        """`cache_dir` keeps compiled kernels; None takes the user's cache folder."""
        self.spec = spec
        self._cache_dir = cache_dir or default_cache_dir()
        self._shape = KernelShape(spec.dtype, spec.head_dim, spec.queries_per_kv_head, host())
        self._kernels = load(self._shape, self._cache_dir)
        self._threads = Threads()
        self._keys, self._values = open_sides(spec)
        self._layers: dict[tuple[int, LayerAttention], np.ndarray] = {}
