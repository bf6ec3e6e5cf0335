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


@intrinsic  # type: ignore[untyped-decorator]  # numba is not typed
def _as_bf16(typing_context: Any, address: Any) -> Any:  # noqa: ARG001  # numba's signature
    """An address as a pointer to the bits of bfloat16."""
    kind = types.CPointer(types.uint16)
    return kind(types.int64), lambda context, b, sig, args: b.inttoptr(args[0], context.get_value_type(kind))


@intrinsic  # type: ignore[untyped-decorator]
def _as_f32(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    """An address as a pointer to float32."""
    kind = types.CPointer(types.float32)
    return kind(types.int64), lambda context, b, sig, args: b.inttoptr(args[0], context.get_value_type(kind))


@intrinsic  # type: ignore[untyped-decorator]
def _wide(typing_context: Any, value: Any) -> Any:  # noqa: ARG001
    """The stored `value` (float32, or the bits of bfloat16) as float32."""
    if value == types.float32:
        return types.float32(value), lambda context, b, sig, args: args[0]

    def widen(context: Any, b: Any, sig: Any, args: Any) -> Any:  # noqa: ARG001
        bits = b.shl(b.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return b.bitcast(bits, ir.FloatType())

    return types.float32(types.uint16), widen


@intrinsic  # type: ignore[untyped-decorator]
def _narrow(typing_context: Any, value: Any, like: Any) -> Any:  # noqa: ARG001
    """The float32 `value` as `like` is stored, rounded to the nearest even; NaN stays NaN."""
    if like == types.float32:
        return types.float32(types.float32, like), lambda context, b, sig, args: args[0]

    def round_to_bf16(context: Any, b: Any, sig: Any, args: Any) -> Any:  # noqa: ARG001
        i32 = ir.IntType(32)
        bits = b.bitcast(args[0], i32)
        odd = b.and_(b.lshr(bits, i32(16)), i32(1))
        rounded = b.add(bits, b.add(odd, i32(0x7FFF)))
        chosen = b.select(b.fcmp_unordered("uno", args[0], args[0]), i32(0x7FC00000), rounded)
        return b.trunc(b.lshr(chosen, i32(16)), ir.IntType(16))

    return types.uint16(types.float32, like), round_to_bf16


@njit(fastmath=_FAST, inline="always")  # type: ignore[untyped-decorator]
def _rms_norm(x: Any, weight: Any, out: Any, eps: Any) -> None:
    tokens, size = x.shape
    for t in range(tokens):
        total = np.float32(0)
        for i in range(size):
            value = _wide(x[t, i])
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
        for i in range(size):
            out[t, i] = _narrow(_wide(x[t, i]) * factor * weight[i], out[t, i])


@njit(fastmath=_FAST, inline="always")  # type: ignore[untyped-decorator]
def _layer_norm(x: Any, weight: Any, bias: Any, out: Any, eps: Any) -> None:
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


@njit(fastmath=_FAST, inline="always")  # type: ignore[untyped-decorator]
def _rotate(x: Any, cos: Any, sin: Any, heads: Any) -> None:
    tokens, half = cos.shape
    for t in range(tokens):
        for h in range(heads):
            base = h * 2 * half
            for i in range(half):
                first = _wide(x[t, base + i])
                second = _wide(x[t, base + half + i])
                x[t, base + i] = _narrow(first * cos[t, i] - second * sin[t, i], x[t, base + i])
                x[t, base + half + i] = _narrow(second * cos[t, i] + first * sin[t, i], x[t, base + i])


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

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """See Kernels."""
        tokens, size = x.shape
        self._layer_norm(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr(), tokens, size, eps)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int, head_dim: int) -> None:
        """See Kernels."""
        tokens, stride = x.shape
        self._rotate(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, stride, num_heads, head_dim // 2)
