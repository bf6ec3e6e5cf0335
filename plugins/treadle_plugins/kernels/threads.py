"""Runs a kernel on the threads that torch already has: a second pool would fight with torch's over the same cores."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import torch

from treadle.logs import get_logger
from treadle_plugins.kernels.objects import Kernel

log = get_logger(__name__)

_LIBRARIES = ("libgomp*", "libiomp5*", "libomp*")
_PARALLEL = "GOMP_parallel"


class Threads:
    """Torch's own OpenMP threads, where its runtime can be found; else the calling thread alone."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where torch keeps the libraries that it brings; None finds it."""
        self._parallel, self.runtime = _find(folder or Path(torch.__file__).parent / "lib")
        if self._parallel is None:
            log.warning("kernels_run_on_one_thread", reason=f"no OpenMP runtime that offers {_PARALLEL} is loaded")

    @property
    def count(self) -> int:
        """Threads that `run` uses: as many as torch now."""
        return 1 if self._parallel is None else torch.get_num_threads()

    @property
    def name(self) -> str:
        """For `treadle explain`, such as `libgomp, shared with torch`."""
        return "one thread: no OpenMP runtime" if self._parallel is None else f"{self.runtime}, shared with torch"

    def run(self, kernel: Kernel, job: int, count: int) -> None:
        """Call `kernel` with `job` on `count` threads at once; 1 is the calling thread alone.

        Any other count than `self.count` makes the runtime build another pool, which takes long.
        """
        if count == 1 or self._parallel is None:
            kernel.call(job)
        else:
            self._parallel(kernel.address, job, count, 0)


def _find(folder: Path) -> tuple[Any, str]:
    """The function that runs another on all threads, and the runtime that it belongs to: torch's own, else one in use."""
    brought = [file for pattern in _LIBRARIES for file in sorted(folder.glob(pattern))]
    for file in [*brought, *_in_use()]:
        found = _function(ctypes.CDLL(str(file)))
        if found is not None:
            return found, re.split(r"[.-]", file.name)[0]
    return None, ""


def _in_use() -> list[Path]:
    """OpenMP runtimes that this process has loaded, where the system tells."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")}
    return sorted(file for file in files if any(file.match(pattern) for pattern in _LIBRARIES))


def _function(library: Any) -> Any:
    found = getattr(library, _PARALLEL, None)
    if found is not None:
        found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found
