"""The kernels compiled with Numba. They take addresses: making an array of a tensor would cost more than the work.

They run on one thread: at 24 tokens they take microseconds, and at 512 a percent of what the matrix products take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from treadle.logs import get_logger

log = get_logger(__name__)

# NaN must come out as NaN, so of fast-math only what may reorder and fuse
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_I32 = ir.IntType(32)


_emitted: Any = intrinsic
"""Numba calls these with types instead of values: nothing that a type checker could follow."""
_inlined: Any = njit(fastmath=_FAST, inline="always")


def _pointer(kind: Any) -> Any:
    """An intrinsic that makes an address a pointer to `kind`."""

    def cast(_typing: Any, _address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), emit

    return _emitted(cast)


_as_bf16 = _pointer(types.uint16)  # the bits of bfloat16
_as_f32 = _pointer(types.float32)


def _as_it_is(_context: Any, _builder: Any, _signature: Any, arguments: Any) -> Any:
    return arguments[0]


def _widened(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    bits = builder.shl(builder.zext(arguments[0], _I32), _I32(16))
    return builder.bitcast(bits, ir.FloatType())


def _rounded(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
    bits = builder.bitcast(arguments[0], _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
    chosen = builder.select(is_nan, _I32(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(chosen, _I32(16)), ir.IntType(16))


def _wide_type(_typing: Any, value: Any) -> Any:
    """The stored `value` (float32, or the bits of bfloat16) as float32."""
    return types.float32(value), _as_it_is if value == types.float32 else _widened


_wide: Any = _emitted(_wide_type)


def _narrow_type(_typing: Any, _value: Any, like: Any) -> Any:
    """The float32 `value` as `like` is stored: rounded to the nearest, ties to even; NaN stays NaN."""
    return like(types.float32, like), _as_it_is if like == types.float32 else _rounded


_narrow: Any = _emitted(_narrow_type)


def _rms_norm_rows(x: Any, weight: Any, out: Any, eps: Any) -> None:
    tokens, size = x.shape
    for t in range(tokens):
        total = np.float32(0)
        for i in range(size):
            value = _wide(x[t, i])
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            out[t, i] = _narrow(_wide(x[t, i]) * factor * weight[i], out[t, i])


_rms_norm: Any = _inlined(_rms_norm_rows)


def _layer_norm_rows(x: Any, weight: Any, bias: Any, out: Any, eps: Any) -> None:
    tokens, size = x.shape
    for t in range(tokens):
        total = np.float32(0)
        for i in range(size):
            total += _wide(x[t, i])
        mean = total / np.float32(size)
        spread = np.float32(0)
        for i in range(size):
            value = _wide(x[t, i]) - mean
            spread += value * value
        factor = np.float32(1) / np.sqrt(spread / np.float32(size) + eps)
        for i in range(size):
            out[t, i] = _narrow((_wide(x[t, i]) - mean) * factor * weight[i] + bias[i], out[t, i])


_layer_norm: Any = _inlined(_layer_norm_rows)


def _rotate_rows(x: Any, cos: Any, sin: Any, heads: Any) -> None:
    tokens, half = cos.shape
    for t in range(tokens):
        for h in range(heads):
            base = h * 2 * half
            for i in range(half):
                first = _wide(x[t, base + i])
                second = _wide(x[t, base + half + i])
                x[t, base + i] = _narrow(first * cos[t, i] - second * sin[t, i], x[t, base + i])
                x[t, base + half + i] = _narrow(second * cos[t, i] + first * sin[t, i], x[t, base + i])


_rotate: Any = _inlined(_rotate_rows)


def _rms_norm_bf16(x: Any, weight: Any, out: Any, tokens: Any, size: Any, eps: Any) -> None:
    shape = (tokens, size)
    _rms_norm(carray(_as_bf16(x), shape), carray(_as_f32(weight), (size,)), carray(_as_bf16(out), shape), eps)


def _rms_norm_f32(x: Any, weight: Any, out: Any, tokens: Any, size: Any, eps: Any) -> None:
    shape = (tokens, size)
    _rms_norm(carray(_as_f32(x), shape), carray(_as_f32(weight), (size,)), carray(_as_f32(out), shape), eps)


def _layer_norm_bf16(x: Any, weight: Any, bias: Any, out: Any, tokens: Any, size: Any, eps: Any) -> None:
    shape, w, b = (tokens, size), carray(_as_f32(weight), (size,)), carray(_as_f32(bias), (size,))
    _layer_norm(carray(_as_bf16(x), shape), w, b, carray(_as_bf16(out), shape), eps)


def _layer_norm_f32(x: Any, weight: Any, bias: Any, out: Any, tokens: Any, size: Any, eps: Any) -> None:
    shape, w, b = (tokens, size), carray(_as_f32(weight), (size,)), carray(_as_f32(bias), (size,))
    _layer_norm(carray(_as_f32(x), shape), w, b, carray(_as_f32(out), shape), eps)


def _rotate_bf16(x: Any, cos: Any, sin: Any, tokens: Any, stride: Any, heads: Any, half: Any) -> None:
    shape = (tokens, half)
    _rotate(carray(_as_bf16(x), (tokens, stride)), carray(_as_f32(cos), shape), carray(_as_f32(sin), shape), heads)


def _rotate_f32(x: Any, cos: Any, sin: Any, tokens: Any, stride: Any, heads: Any, half: Any) -> None:
    shape = (tokens, half)
    _rotate(carray(_as_f32(x), (tokens, stride)), carray(_as_f32(cos), shape), carray(_as_f32(sin), shape), heads)


def _compile(function: Callable[..., None], num_integers: int, with_eps: bool) -> Callable[..., None]:
    """Compile for addresses and sizes, and keep the result on disk where there is a place for it."""
    arguments = [types.int64] * num_integers + [types.float32] * with_eps
    signature = types.void(*arguments)
    try:
        compiled: Callable[..., None] = njit(signature, fastmath=_FAST, nogil=True, cache=True)(function)
    except RuntimeError as error:  # numba found no directory that it may write to
        log.warning("kernels_not_kept", function=function.__name__, reason=str(error))
        compiled = njit(signature, fastmath=_FAST, nogil=True)(function)
    return compiled


class CompiledKernels:
    """For rows that are contiguous. Compiled, or read from the disk, when made."""

    name = "numba"
    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, dtype: torch.dtype) -> None:
        started = time.perf_counter()
        bf16 = dtype == torch.bfloat16
        self._rms_norm = _compile(_rms_norm_bf16 if bf16 else _rms_norm_f32, 5, with_eps=True)
        self._layer_norm = _compile(_layer_norm_bf16 if bf16 else _layer_norm_f32, 6, with_eps=True)
        self._rotate = _compile(_rotate_bf16 if bf16 else _rotate_f32, 7, with_eps=False)
        log.info("forward_kernels_compiled", seconds=round(time.perf_counter() - started, 2))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """See Kernels."""
        tokens, size = x.shape
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), tokens, size, eps)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """See Kernels."""
        tokens, size = x.shape
        self._layer_norm(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr(), tokens, size, eps)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int, head_dim: int) -> None:
        """See Kernels."""
        tokens, stride = x.shape
        self._rotate(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, stride, num_heads, head_dim // 2)
