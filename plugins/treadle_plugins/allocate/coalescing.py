"""allocate.coalescing: neighbouring free blocks are merged, and a request's blocks lie together where they can."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from treadle import BlockSettings, EngineInfo, Request, hookimpl
from treadle.logs import get_logger
from treadle_plugins.allocate.extents import Extents

log = get_logger(__name__)


class CoalescingSettings(BlockSettings):
    """Blocks, and how far ahead they are reserved."""

    run_blocks: int = Field(1, ge=1)
    """Blocks that a request gets at a time, if a run of that length is free: longer runs, fewer fragments, more reserve."""


class Coalescing:
    """Extend the request's last run, else take the shortest run that fits, else the longest ones."""

    Settings = CoalescingSettings

    def __init__(self, settings: CoalescingSettings) -> None:
        self._run_blocks = settings.run_blocks
        self._extents = Extents(0)
        self._worst = 0.0

    @property
    def fragmentation(self) -> float:
        """Share of the free blocks that lie outside the longest free run, 0 to 1."""
        return self._extents.fragmentation

    @hookimpl
    def engine_started(self, engine: EngineInfo) -> None:
        """One run of free blocks."""
        self._extents = Extents(engine.num_blocks)

    @hookimpl
    def allocate(self, request: Request, num_blocks: int) -> list[int] | None:
        """Neighbours where possible."""
        extents = self._extents
        if num_blocks > extents.num_free:
            return None
        wanted = max(num_blocks, min(self._run_blocks, extents.largest))
        if request.block_table:
            following = request.block_table[-1] + 1
            if extents.run_at(following) >= num_blocks:
                return list(range(following, following + min(wanted, extents.run_at(following))))
        start = extents.best_fit(wanted)
        return extents.longest_first(num_blocks) if start is None else list(range(start, start + wanted))

    @hookimpl
    def blocks_allocated(self, block_ids: Sequence[int]) -> None:
        """They are somebody's now, whoever chose them."""
        self._extents.remove(block_ids)

    @hookimpl
    def blocks_freed(self, block_ids: Sequence[int]) -> None:
        """They join their free neighbours."""
        self._extents.add([block_ids])
        self._worst = max(self._worst, self._extents.fragmentation)

    @hookimpl
    def engine_stopped(self) -> None:
        """Report how scattered free memory was."""
        log.info("fragmentation", now=round(self.fragmentation, 3), worst=round(self._worst, 3))
