"""plugin.portrait: where memory goes, sampled over time beside what is served; one JSON object a line.

    pool, in blocks     | used: tokens | wasted: rest of their blocks | reserved: not begun | cached | free (of it fragmented) |
    process, in bytes   | weights | kv_pool | swap_space | rest: at start-up | activations: grown since then, less the pool |

`treadle portrait FILE` draws it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from pydantic import Field

import treadle
from treadle import EngineInfo, Request, Step, StepReport, StrategySettings, hookimpl
from treadle.errors import ConfigError


class PortraitSettings(StrategySettings):
    """Where to write, and how often."""

    path: Path = Path("portrait.jsonl")
    """The file; it is overwritten."""
    every_s: float = Field(default=0.1, ge=0)
    """Seconds of the engine's clock between two samples; 0 samples every step."""


@dataclass(frozen=True)
class Sample:
    """One moment."""

    time_s: float
    """Since start-up, on the engine's clock."""
    step: int
    num_running: int
    num_waiting: int
    mean_length: float
    """Known tokens of a running request, on average."""
    num_tokens: int
    """Tokens computed since the last sample."""
    num_preempted: int
    """Preemptions since the last sample."""
    block_size: int
    blocks_total: int
    blocks_used: float
    """Blocks that running requests' tokens would fill; shared ones count once."""
    blocks_wasted: float
    """What is left empty in begun blocks."""
    blocks_reserved: int
    """Blocks held for tokens to come."""
    blocks_cached: int
    blocks_free: int
    blocks_fragmented: int
    """Free blocks outside the longest free run."""
    memory: Mapping[str, int]
    """Bytes by part."""


class Portrait:
    """Takes a sample at the end of a step."""

    Settings = PortraitSettings

    def __init__(self, settings: PortraitSettings) -> None:
        self._settings = settings
        self._file: IO[str] | None = None
        self._engine: EngineInfo | None = None
        self._began_s = 0.0
        self._due_s = 0.0
        self._rss_at_start = 0
        self._num_tokens = 0
        self._num_preempted = 0
        self._sample: Sample | None = None
        """Of the step that is being told, but for its tokens."""
        self._written: set[int] = set()
        """Blocks that were ever in use: a system gives memory of a pool to those alone."""

    @staticmethod
    def check_configuration(own: PortraitSettings, settings: treadle.Settings) -> None:  # noqa: ARG004  # nothing else matters
        """Refuse a folder that is not there. Whether the file can be written is known when it is opened."""
        folder = own.path.parent
        if not folder.is_dir():
            raise ConfigError(f"plugin.portrait.path={str(own.path)!r}: there is no folder {str(folder)!r}; name another file")

    @hookimpl
    def engine_started(self, engine: EngineInfo) -> None:
        """Open the file. Raises ConfigError when it cannot be written."""
        try:
            self._file = self._settings.path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"plugin.portrait.path={str(self._settings.path)!r} cannot be written: {error.strerror}; name another file"
            ) from error
        self._engine = engine
        self._began_s = self._due_s = engine.clock.now()
        self._rss_at_start = resident_bytes()

    @hookimpl
    def blocks_allocated(self, block_ids: Sequence[int]) -> None:
        """Remember them."""
        self._written.update(block_ids)

    @hookimpl
    def request_preempted(self) -> None:
        """Count it."""
        self._num_preempted += 1

    @hookimpl
    def step_committed(self, step: Step) -> None:
        """Look at requests and blocks as the step left them, when a sample is due."""
        now = step.clock.now()
        if self._file is not None and now >= self._due_s:
            self._due_s = now + self._settings.every_s
            self._sample = self._take_sample(step, now)

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        """Write the sample."""
        self._num_tokens += report.num_tokens
        if self._file is None or self._sample is None:
            return
        print(json.dumps(asdict(replace(self._sample, num_tokens=self._num_tokens))), file=self._file)
        self._sample = None
        self._num_tokens = 0

    @hookimpl
    def engine_stopped(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _take_sample(self, step: Step, now: float) -> Sample:
        assert self._engine is not None
        running, pool = step.running, step.pool
        num_preempted, self._num_preempted = self._num_preempted, 0
        begun, reserved = _begun_and_reserved(running, pool.block_size)
        filled = sum(begun.values()) / pool.block_size
        return Sample(
            time_s=now - self._began_s,
            step=step.number,
            num_running=step.num_running,
            num_waiting=step.num_waiting,
            mean_length=sum(request.num_tokens for request in running) / len(running) if running else 0.0,
            num_tokens=0,
            num_preempted=num_preempted,
            block_size=pool.block_size,
            blocks_total=pool.num_blocks,
            blocks_used=filled,
            blocks_wasted=len(begun) - filled,
            # blocks held by those that wait or have finished count as reserved: nobody computes with them now
            blocks_reserved=max(reserved, pool.num_used - len(begun)),
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free,
            blocks_fragmented=_fragmented([pool.is_free(block_id) for block_id in range(pool.num_blocks)]),
            memory=self._memory(self._engine, len(self._written) / pool.num_blocks),
        )

    def _memory(self, engine: EngineInfo, share_written: float) -> dict[str, int]:
        """Parts that the executor knows; what the process has grown by since start-up, but for the pool; and the rest of it."""
        parts = dict(engine.memory())
        resident = resident_bytes()
        written = int(parts.get("kv_pool", 0) * share_written)
        parts["activations"] = max(0, resident - self._rss_at_start - written)
        parts["rest"] = max(0, self._rss_at_start - parts.get("weights", 0))
        parts["resident"] = resident
        return parts


def _begun_and_reserved(running: tuple[Request, ...], block_size: int) -> tuple[dict[int, int], int]:
    """Tokens in each begun block, and how many blocks are held beyond."""
    begun: dict[int, int] = {}
    reserved = 0
    for request in running:
        num_begun = -(-request.num_computed // block_size)
        for place, block_id in enumerate(request.block_table[:num_begun]):
            begun[block_id] = min(block_size, request.num_computed - place * block_size)
        reserved += len(request.block_table) - num_begun
    return begun, reserved


def _fragmented(free: list[bool]) -> int:
    """Free blocks outside the longest run of free blocks."""
    longest = current = total = 0
    for is_free in free:
        current = current + 1 if is_free else 0
        total += is_free
        longest = max(longest, current)
    return total - longest


def resident_bytes() -> int:
    """Memory that the process holds, as the system counts it; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
