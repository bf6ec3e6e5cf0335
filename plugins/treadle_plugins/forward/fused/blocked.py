"""Linear layers over weights in blocks, multiplied by a kernel of our own: see products.py."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch

from treadle_plugins.forward.fused import products

if TYPE_CHECKING:
    from treadle_plugins.forward.fused.linear import Activation

_CHUNK = 96
"""Rows that are packed at once: few enough to stay in the second-level cache beside a block of weights."""
_ITEMS = 8
"""Pieces for each thread: few enough to be worth taking, and enough that all end together."""
_PLANS = 512
_LINE = 64


class _Plan(NamedTuple):
    """How so many rows are cut, for weights of one shape."""

    words: tuple[int, int, int]
    """NUM_ITEMS, ITEMS and TILES of a job."""
    items: ctypes.Array[ctypes.c_int64]
    tiles: ctypes.Array[ctypes.c_int64]
    scratch_bytes: int
    """Of each thread."""


class _Workspace(threading.local):
    """Memory that kernels work in: one for each thread that calls them."""

    def __init__(self) -> None:
        self._num_bytes, self._address = 0, 0

    def address(self, num_bytes: int) -> int:
        """Of at least so many bytes, on a line of its own."""
        if self._num_bytes < num_bytes:
            self._memory = torch.empty(num_bytes + _LINE, dtype=torch.uint8)
            self._num_bytes, self._address = num_bytes, -(-self._memory.data_ptr() // _LINE) * _LINE
        return self._address


class Products:
    """The compiled kernel, and the threads on which it runs."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        """`cache_dir` keeps the compiled kernel; None takes the user's cache folder."""
        from treadle_plugins.forward.fused import product_kernel
        from treadle_plugins.kernels import objects
        from treadle_plugins.kernels.cpu import host
        from treadle_plugins.kernels.threads import Threads

        cpu, here = host(), Path(__file__).parent
        key = objects.digest(cpu, [here / "products.py", here / "product_kernel.py"])
        compile_ = functools.partial(product_kernel.compile_for, cpu)
        code = objects.load("products", key, cpu, compile_, cache_dir or objects.default_cache_dir())
        self._loaded = objects.Loaded(code.content, cpu)
        self._kernel = self._loaded.kernel(products.SYMBOL)
        self.threads = Threads()
        self.name = f"own kernel ({cpu.summary}; {code.origin})"
        """For `treadle explain`."""
        self._workspace = _Workspace()

    def run(self, job: ctypes.Array[ctypes.c_int64], rows: int, out_features: int, in_features: int) -> None:
        """Run a job that says all but how it is cut and where its threads work."""
        count = self.threads.count
        plan = _plan(rows, out_features, in_features, count)
        job[products.THREADS] = job[products.NEXT] = 0
        job[products.NUM_ITEMS], job[products.ITEMS], job[products.TILES] = plan.words
        job[products.SCRATCH] = self._workspace.address(count * plan.scratch_bytes)
        job[products.SCRATCH_BYTES] = plan.scratch_bytes
        self.threads.run(self._kernel, ctypes.addressof(job), count)


@functools.lru_cache(maxsize=_PLANS)
def _plan(rows: int, out_features: int, in_features: int, num_threads: int) -> _Plan:
    """Chunks of rows times ranges of blocks: a few pieces for each thread, those of one chunk behind one another."""
    num_blocks, num_chunks = out_features // products.BLOCK, -(-rows // _CHUNK)
    ranges = max(1, min(num_blocks, -(-_ITEMS * num_threads // num_chunks)))
    tiles: list[int] = []
    items: list[int] = []
    most_packed = 0
    for chunk in range(num_chunks):
        first_tile, packed = len(tiles) // products.TILE_WORDS, 0
        row, last = chunk * rows // num_chunks, (chunk + 1) * rows // num_chunks
        num_tiles = -(-(last - row) // products.SIZES[-1])
        for left in range(num_tiles, 0, -1):
            size = next(size for size in products.SIZES if size * left >= last - row)
            count = min(size, last - row)
            tiles += [row, count, products.SIZES.index(size), packed]
            packed += size * in_features * 2
            row += count
        for place in range(ranges):
            items += [first_tile, num_tiles, place * num_blocks // ranges, (place + 1) * num_blocks // ranges]
        most_packed = max(most_packed, packed)
    all_items, all_tiles = (ctypes.c_int64 * len(items))(*items), (ctypes.c_int64 * len(tiles))(*tiles)
    words = len(items) // products.ITEM_WORDS, ctypes.addressof(all_items), ctypes.addressof(all_tiles)
    scratch = -(-(products.PACKED + most_packed) // _LINE) * _LINE + 2 * _LINE  # lines between two threads
    return _Plan(words, all_items, all_tiles, scratch)


@functools.cache
def host_products() -> Products | None:
    """The kernel for this processor; None where it has no products of pairs, or where there is no compiler."""
    if importlib.util.find_spec("llvmlite") is None or importlib.util.find_spec("numba") is None:
        return None
    from treadle_plugins.kernels.cpu import host

    return Products() if host().has_bf16_dot else None


@functools.cache
def beats_onednn() -> bool:
    """Whether the kernel multiplies faster than oneDNN does: not where the processor has tiles (AMX), which it does not use."""
    from treadle_plugins.kernels.cpu import host

    return not host().has_tiles


def blocked(weight: torch.Tensor, bias: torch.Tensor | None) -> BlockedLinear | None:
    """A layer over `weight` [out, in] in blocks; None where it is not one for the kernel."""
    if weight.dtype != torch.bfloat16 or weight.shape[0] % products.BLOCK or weight.shape[1] % products.INPUTS:
        return None
    kernel = host_products()
    return None if kernel is None else BlockedLinear(weight, bias, kernel)


class BlockedLinear:
    """One weight in blocks with an optional bias [out]; the original is no longer needed."""

    __slots__ = ("_bias", "_in", "_job", "_out", "_products", "nbytes", "pieces")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernel: Products) -> None:
        from treadle_plugins.kernels.pages import advise_large_pages

        self._products = kernel
        self._out, self._in = weight.shape
        shape = (self._out // products.BLOCK, products.BLOCK, self._in // 2, 2)
        self.pieces = torch.empty(shape[0], shape[2], shape[1], 2, dtype=weight.dtype)
        """[out / 16, in / 2, 16, 2]."""
        advise_large_pages(self.pieces)
        self.pieces.copy_(weight.reshape(shape).transpose(1, 2))
        self._bias = None if bias is None else bias.float()
        self.nbytes: int = self.pieces.nbytes + (0 if self._bias is None else self._bias.nbytes)
        """Of weight and bias."""
        self._job = (ctypes.c_int64 * products.JOB_WORDS)()
        self._job[products.PAIRS], self._job[products.WEIGHTS] = self._in // 2, self.pieces.data_ptr()
        self._job[products.BIAS] = 0 if self._bias is None else self._bias.data_ptr()

    @property
    def by(self) -> str:
        """What multiplies, for `treadle explain`."""
        return self._products.name

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, out]."""
        return self._run(x, products.KIND_PLAIN)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, out] in float32, as they were summed up: for logits."""
        return self._run(x, products.KIND_SUMS, dtype=torch.float32)

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """[tokens, out] after `activation`."""
        if activation.name == "swish":
            return self._run(x, products.KIND_SWISH)
        return activation.function(self(x))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[tokens, out], `residual` of that shape added."""
        return self._run(x, products.KIND_PLUS, residual)

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """[tokens, out], multiplied by `factor` of that shape."""
        return self._run(x, products.KIND_TIMES, factor)

    def gated(self, x: torch.Tensor, gate: BlockedLinear) -> torch.Tensor:
        """[tokens, out], multiplied by the swish of `gate(x)`; `gate` is one by which this may be gated."""
        self._job[products.GATES] = gate.pieces.data_ptr()
        return self._run(x, products.KIND_GATED)

    def may_be_gated_by(self, gate: object) -> TypeGuard[BlockedLinear]:
        """Whether `gate` is of the same shape, and has no bias."""
        if not isinstance(gate, BlockedLinear):
            return False
        return gate._bias is None and gate.pieces.shape == self.pieces.shape

    def _run(
        self, x: torch.Tensor, kind: int, other: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        job = self._job
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.size(0)  # len(x) takes longer, and this is called a hundred times a step
        out = torch.empty((rows, self._out), dtype=dtype)
        if not rows:
            return out
        job[products.ROWS], job[products.ROW_BYTES] = x.data_ptr(), 2 * x.stride(0)
        job[products.OUT], job[products.OUT_ROW_BYTES] = out.data_ptr(), dtype.itemsize * self._out
        if other is not None:
            if other.stride(1) != 1:
                other = other.contiguous()
            job[products.OTHER], job[products.OTHER_ROW_BYTES] = other.data_ptr(), 2 * other.stride(0)
        job[products.KIND] = kind
        self._products.run(job, rows, self._out, self._in)
        return out
