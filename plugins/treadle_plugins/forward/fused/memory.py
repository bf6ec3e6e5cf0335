"""Memory of weights that were given up."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Return freed memory to the system where the C library would keep it (glibc): weights are freed layer by layer.

    Without this a process that packs 269 MB of weights ends up 220 MB larger.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
