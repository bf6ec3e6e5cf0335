"""The machine: how fast it is just now, who else uses it, and how much memory a tree of processes holds. Linux only."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
COPY_BYTES = 128 << 20
MIB = 1 << 20


def facts() -> dict[str, Any]:
    """What this machine is."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE
    return {"processor": model, "cpus": os.cpu_count(), "memory_gib": round(memory / (1 << 30), 1), "system": platform.platform()}


class Yardstick:
    """A copy and a loop of fixed size, whose speed says in which state a shared machine is."""

    def __init__(self) -> None:
        self._source = bytearray(b"\1") * COPY_BYTES
        self._target = bytearray(COPY_BYTES)

    def measure(self) -> dict[str, float]:
        """GB/s read and written by a copy on one core, milliseconds of a Python loop (best of 3), and the load average."""
        copy_s = min(_timed(self._copy) for _ in range(3))
        loop_s = min(_timed(lambda: sum(range(1_000_000))) for _ in range(3))
        return {"copy_gb_s": 2 * COPY_BYTES / copy_s / 1e9, "loop_ms": loop_s * 1e3, "load_1min": os.getloadavg()[0]}

    def _copy(self) -> None:
        memoryview(self._target)[:] = self._source


def _timed(call: Any) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


@dataclass
class Usage:
    """What a tree of processes took while it was watched, and what the rest of the machine took."""

    peak_rss_bytes: int = 0
    """Largest sum of resident memory of all processes in the tree, sampled."""
    cpu_s: float = 0.0
    others_cpu_s: float = 0.0
    """Of all processes outside the tree."""
    stolen_s: float = 0.0
    """CPU time that the host gave to other guests."""


@contextmanager
def watching(pid: int, every_s: float = 0.05) -> Iterator[Usage]:
    """Watch the tree of process `pid` until the block ends; the yielded usage is complete then."""
    usage = Usage()
    ended = threading.Event()
    sampler = threading.Thread(target=_sample, args=(pid, usage, every_s, ended), daemon=True)
    own_s, (busy_s, stolen_s) = cpu_seconds(pid), _machine_seconds()
    sampler.start()
    try:
        yield usage
    finally:
        ended.set()
        sampler.join()
        after_s, after_stolen_s = _machine_seconds()
        usage.cpu_s = cpu_seconds(pid) - own_s
        usage.stolen_s = after_stolen_s - stolen_s
        usage.others_cpu_s = max(0.0, after_s - busy_s - usage.cpu_s)


def _sample(pid: int, usage: Usage, every_s: float, ended: threading.Event) -> None:
    count = 0
    pids: list[int] = []
    while True:
        if count % 20 == 0:
            pids = tree(pid)
        count += 1
        usage.peak_rss_bytes = max(usage.peak_rss_bytes, sum(map(_rss_bytes, pids)))
        if ended.wait(every_s):
            return


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        fields = _stat(int(entry)) if entry.isdigit() else None
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [pid]
    for known in found:  # grows while it is walked
        found += children.get(known, [])
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time that the tree of process `pid` has taken so far, with that of children that have ended."""
    fields = [_stat(member) for member in tree(pid)]
    return sum(sum(map(int, each[11:15])) / TICKS for each in fields if each)


def peak_rss_since_start(pid: int) -> int:
    """Bytes: the largest resident memory that process `pid` itself ever had, as the kernel counted it."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _stat(pid: int) -> list[str] | None:
    """Fields behind the name in /proc/PID/stat, from the state on; None when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _rss_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * PAGE
    except OSError:
        return 0


def _machine_seconds() -> tuple[float, float]:
    """(busy, stolen) CPU seconds of the whole machine since it started."""
    counts = [int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _waiting, irq, softirq, stolen = counts
    return (user + nice + system + irq + softirq) / TICKS, stolen / TICKS
