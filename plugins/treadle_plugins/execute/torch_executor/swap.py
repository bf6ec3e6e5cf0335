"""Blocks in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from treadle.errors import ExecutionError
from treadle.plan import BlockCopy


class SwapSpace:
    """Room for `num_blocks` whole blocks in host memory, bit for bit as they lie in the pool."""

    def __init__(self, pool: Sequence[torch.Tensor], num_blocks: int) -> None:
        """`pool` are the backend's tensors, block id first."""
        self.num_blocks = num_blocks
        self._pool = pool
        self._host = [
            torch.empty((num_blocks, *part.shape[1:]), dtype=part.dtype, pin_memory=part.is_cuda and num_blocks > 0)
            for part in pool
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(part.numel() * part.element_size() for part in self._host)

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """From blocks of the pool to blocks of swap space."""
        with _named("out to host memory", copies):
            _copy(self._pool, self._host, copies)

    def copy_in(self, copies: Sequence[BlockCopy]) -> None:
        """From blocks of swap space to blocks of the pool."""
        with _named("back from host memory", copies):
            _copy(self._host, self._pool, copies)


@contextmanager
def _named(way: str, copies: Sequence[BlockCopy]) -> Iterator[None]:
    """What torch raises says nothing of copies, and a pass has other parts that may fail."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise ExecutionError(f"copying {len(copies)} blocks {way} failed: {type(error).__name__}: {error}") from error


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], copies: Sequence[BlockCopy]) -> None:
    if not copies:
        return
    from_ids = _checked("source", [copy.source for copy in copies], sources)
    to_ids = _checked("target", [copy.target for copy in copies], targets)
    for source, target in zip(sources, targets, strict=True):
        blocks = source[torch.tensor(from_ids, device=source.device)]
        target[torch.tensor(to_ids, device=target.device)] = blocks.to(target.device)


def _checked(end: str, ids: list[int], tensors: Sequence[torch.Tensor]) -> list[int]:
    most = tensors[0].shape[0] - 1
    if min(ids) < 0 or max(ids) > most:
        raise ExecutionError(f"swap copies name {end} blocks {ids}, but only blocks 0..{most} exist there")
    return ids
