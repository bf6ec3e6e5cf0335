"""Large pages for the pool: blocks lie scattered, and with small pages each costs several look-ups of its address."""

from __future__ import annotations

import ctypes
import sys

import torch

_LARGE_PAGE = 2 << 20
_ADVICE = 14
"""MADV_HUGEPAGE of Linux."""


def advise_large_pages(tensor: torch.Tensor) -> bool:
    """Ask the system to back a tensor that was not written yet by large pages; whether it takes the advice."""
    if not sys.platform.startswith("linux"):
        return False
    storage = tensor.untyped_storage()
    begin = -(-storage.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    end = (storage.data_ptr() + storage.nbytes()) // _LARGE_PAGE * _LARGE_PAGE
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return end > begin and advise(begin, end - begin, _ADVICE) == 0
