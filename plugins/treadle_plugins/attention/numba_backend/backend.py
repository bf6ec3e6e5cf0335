"""The backend `numba`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.layout import unreadable
from treadle_plugins.attention.numba_backend import jobs, pool
from treadle_plugins.attention.numba_backend.call import Call, Workspace, address_of, words
from treadle_plugins.attention.numba_backend.compiled import load
from treadle_plugins.attention.spec import AttentionSpec, LayerAttention
from treadle_plugins.attention.storage import open_sides
from treadle_plugins.kernels.cpu import host
from treadle_plugins.kernels.objects import default_cache_dir
from treadle_plugins.kernels.pages import advise_large_pages
from treadle_plugins.kernels.threads import Threads

_DTYPES = ("float32", "bfloat16", "float16")
_HEAD_DIMS = 16
_SMALL_WRITE = 65536
"""Bytes below which waking the other threads takes longer than the work."""


class NumbaAttention:
    """Attention by compiled kernels, on the threads of torch."""

    name = "cpu"

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
        return unreadable(spec) or pool.unsuited(spec)

    def __init__(self, spec: AttentionSpec, cache_dir: Path | None = None) -> None:
        """`cache_dir` keeps compiled kernels; None takes the user's cache folder."""
        self.spec = spec
        self._keys, self._values = open_sides(spec)
        self._shape = pool.shape_of(spec, self._keys, self._values, host())
        self._kernels = load(self._shape, cache_dir or default_cache_dir())
        self._threads = Threads()
        self.name = f"cpu ({self._threads.name}; {self._shape.cpu.summary}; {self._kernels.origin})"
        self._heads = np.zeros((spec.num_layers, spec.num_kv_heads, jobs.HEAD_WORDS), np.int64)
        self._head_addresses: list[int] = []
        self._workspace = Workspace(self._shape)
        self._calls: dict[LayerAttention, Call] = {}
        self._write_job = words(jobs.WRITE_WORDS)
        self._num_threads = 1

    def block_bytes(self) -> int:
        """Bytes that one block takes, over all layers."""
        return self._keys.block_bytes + self._values.block_bytes

    def allocate(self, num_blocks: int) -> None:
        """Make room for `num_blocks` blocks, with any content; gives up what was allocated before."""
        for side in (self._keys, self._values):
            side.allocate(num_blocks)
            for tensor in side.tensors():
                advise_large_pages(tensor)
        self._heads = pool.describe(self.spec, self._shape, self._keys, self._values)
        self._head_addresses = [int(heads.ctypes.data) for heads in self._heads]

    def tensors(self) -> Sequence[torch.Tensor]:
        """Keys and values as views, block first."""
        return [*self._keys.tensors(), *self._values.tensors()]

    def poison(self) -> None:
        """Fill all slots with NaN."""
        self._keys.poison()
        self._values.poison()

    def prepare(self, batch: PackedBatch) -> None:
        """Forget the last step's tasks; `attend` makes this step's, once for each way to attend."""
        assert all(tensor.is_contiguous() for tensor in (batch.slot_blocks, batch.slot_offsets, batch.tables))
        self._num_threads = self._threads.count
        for call in self._calls.values():
            call.forget()
        job = self._write_job
        job[jobs.BLOCKS], job[jobs.OFFSETS] = batch.slot_blocks.data_ptr(), batch.slot_offsets.data_ptr()
        job[jobs.WRITTEN_TOKENS], job[jobs.WRITTEN_HEADS] = batch.num_tokens, self.spec.num_kv_heads

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: PackedBatch) -> None:
        """Store `keys` and `values` [tokens, kv_heads, head_dim] in the slots that `batch` names."""
        keys, values = self._readable(keys), self._readable(values)
        job, item_bytes = self._write_job, self._shape.item_bytes
        job[jobs.THREADS] = job[jobs.NEXT] = 0
        job[jobs.HEADS] = self._head_addresses[layer]
        for source, rows in ((jobs.KEY_SOURCE, keys), (jobs.VALUE_SOURCE, values)):
            job[source + jobs.SOURCE] = rows.data_ptr()
            job[source + jobs.SOURCE_TOKEN_BYTES] = rows.stride(0) * item_bytes
            job[source + jobs.SOURCE_HEAD_BYTES] = rows.stride(1) * item_bytes
        small = batch.num_tokens * self.spec.num_kv_heads * self._shape.row_bytes < _SMALL_WRITE
        self._threads.run(self._kernels.write, address_of(job), 1 if small else self._num_threads)

    def attend(self, layer: int, queries: torch.Tensor, batch: PackedBatch, how: LayerAttention) -> torch.Tensor:
        """[tokens, heads, head_dim] for `queries` of that shape, each over its own sequence up to its own position."""
        call = self._calls.get(how)
        if call is None:
            call = self._calls[how] = Call(self.spec, how, self._workspace)
        call.ready(batch, self._num_threads)
        queries = self._readable(queries)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        job, item_bytes = call.job, self._shape.item_bytes
        job[jobs.THREADS] = job[jobs.NEXT] = 0
        job[jobs.QUERIES], job[jobs.OUT] = queries.data_ptr(), out.data_ptr()
        job[jobs.QUERY_TOKEN_BYTES] = queries.stride(0) * item_bytes
        job[jobs.QUERY_HEAD_BYTES] = queries.stride(1) * item_bytes
        job[jobs.HEADS] = self._head_addresses[layer]
        self._workspace.place_in(job)
        self._threads.run(self._kernels.attend, address_of(job), 1 if call.is_small else self._num_threads)
        return out

    def _readable(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` in the precision of the pool, with a row's elements side by side."""
        rows = rows if rows.dtype == self.spec.torch_dtype else rows.to(self.spec.torch_dtype)
        return rows if rows.stride(2) == 1 else rows.contiguous()
