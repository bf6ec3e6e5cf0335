"""Memory that cannot be had is an error at start-up which says how much was asked for and which setting to lower."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.errors import ConfigError

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux says what a container may use."""


@contextmanager
def asking_for(what: str, lower: str) -> Iterator[None]:
    """Within the block `what` is allocated; `lower` names the setting that makes it smaller."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's own out-of-memory error is a RuntimeError
        reason = next(iter(str(error).splitlines()), "no reason given")
        raise ConfigError(f"no room for {what}: {type(error).__name__}: {reason}; lower {lower}") from error


def check_host(pool_bytes: int, swap_bytes: int, lower: str) -> None:
    """Refuse more than the machine has: Linux would promise it, and kill the process when it is written to."""
    most = host_memory()
    if most is not None and pool_bytes + swap_bytes > most:
        raise ConfigError(
            f"no room for {pool_bytes} bytes of KV pool and {swap_bytes} bytes of swap space in host memory: this machine has "
            f"{most} bytes; lower {lower} or pool.swap_memory"
        )


def host_memory() -> int | None:
    """Bytes of memory that the machine, or the container on it, has at most; None where the system does not tell."""
    told = [_physical(), *map(_number_in, _LIMITS)]
    return min((number for number in told if number is not None and number > 0), default=None)


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _number_in(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None
