"""The words of a job of attention: those that a step's layers share are worked out once."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.numba_backend import jobs, plan
from treadle_plugins.attention.numba_backend.shape import LINE, KernelShape, Scratch
from treadle_plugins.attention.spec import AttentionSpec, LayerAttention

Words = Any
"""An array of int64 that C can read: ctypes' own, whose elements are set faster than numpy's."""
_LOG2E = 1.4426950408889634
_EVERYTHING = 1 << 60
"""A window that no context fills."""
_SMALL_COST = 20_000
"""Tokens times rows below which waking the other threads takes longer than the work."""


class Workspace:
    """Memory that kernels work in, for one call at a time. It grows: `place_in` a job just before the call."""

    def __init__(self, shape: KernelShape) -> None:
        self._scratch_bytes = Scratch(shape).num_bytes
        self._state_bytes = shape.state_bytes
        self._scratch, self._states = np.empty(0, np.uint8), np.empty(0, np.uint8)
        self._counters = np.zeros(0, np.int64)
        self._addresses = (0, 0, 0)

    def grow(self, num_threads: int, num_states: int, num_counters: int) -> None:
        """Make room for so many threads, states of parts, and counters, which are 0 outside of a call."""
        scratch_bytes, states_bytes = num_threads * self._scratch_bytes + LINE, num_states * self._state_bytes + LINE
        if len(self._scratch) < scratch_bytes:
            self._scratch = np.zeros(scratch_bytes, np.uint8)
        if len(self._states) < states_bytes:
            self._states = np.empty(2 * states_bytes, np.uint8)
        if len(self._counters) < num_counters:
            self._counters = np.zeros(2 * num_counters, np.int64)
        self._addresses = _aligned(self._scratch), _aligned(self._states), int(self._counters.ctypes.data)

    def place_in(self, job: Words) -> None:
        """Tell a job where it works."""
        job[jobs.SCRATCH], job[jobs.PARTS], job[jobs.COUNTERS] = self._addresses


class Call:
    """A job of attention for layers that attend alike."""

    def __init__(self, spec: AttentionSpec, how: LayerAttention, workspace: Workspace) -> None:
        self.job = words(jobs.ATTEND_WORDS)
        self.is_small = True
        """The job is done before other threads would be awake."""
        self._spec, self._how, self._workspace = spec, how, workspace
        self._heads = plan.Heads(spec.num_heads, spec.num_kv_heads)
        self._plan: plan.Plan | None = None
        slopes = how.alibi_slopes or (0.0,) * spec.num_heads
        self._slopes = np.array(slopes, np.float32) * np.float32(_LOG2E)
        self._fill()

    def forget(self) -> None:
        """The step is over."""
        self._plan = None

    def ready(self, batch: PackedBatch, num_threads: int) -> None:
        """Fill in what all layers of the step share, unless that is done."""
        if self._plan is not None:
            return
        made = self._plan = plan.make(
            batch, self._heads, self._how.window, num_threads, has_slopes=self._how.alibi_slopes is not None
        )
        job = self.job
        job[jobs.NUM_TASKS], job[jobs.TASKS] = len(made.tasks), made.tasks.ctypes.data
        job[jobs.SETS], job[jobs.PLACES] = made.sets.ctypes.data, made.places.ctypes.data
        self._workspace.grow(num_threads, made.num_states, len(made.sets))
        job[jobs.TABLES] = batch.tables.data_ptr()
        self.is_small = made.cost < _SMALL_COST

    def _fill(self) -> None:
        spec, how, job = self._spec, self._how, self.job
        job[jobs.BLOCK_SIZE], job[jobs.NUM_HEADS] = spec.block_size, spec.num_heads
        job[jobs.WINDOW] = _EVERYTHING if how.window is None else how.window
        job[jobs.SLOPES] = self._slopes.ctypes.data
        job[jobs.SCALE] = _bits(how.scale * _LOG2E)
        job[jobs.CAP] = 0 if how.soft_cap is None else 1
        if how.soft_cap is not None:
            job[jobs.CAP_IN], job[jobs.CAP_OUT] = _bits(how.scale / how.soft_cap), _bits(how.soft_cap / how.scale)


def words(count: int) -> Words:
    """So many words of 0."""
    return (ctypes.c_int64 * count)()


def address_of(array: Words) -> int:
    """Where the words lie."""
    return ctypes.addressof(array)


def _bits(number: float) -> int:
    """A float32 as the lower half of a word."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


def _aligned(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    return -(-int(memory.ctypes.data) // LINE) * LINE
