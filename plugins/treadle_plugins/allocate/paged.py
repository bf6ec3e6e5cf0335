"""allocate.paged: any free block will do.

The method is that of vLLM's PagedAttention (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from treadle import BlockSettings, EngineInfo, hookimpl


class Paged:
    """A list of free blocks, the one freed last used first."""

    Settings = BlockSettings

    def __init__(self, settings: BlockSettings) -> None:  # noqa: ARG002  # the core reads the block size
        self._free: dict[int, None] = {}

    @hookimpl
    def engine_started(self, engine: EngineInfo) -> None:
        """All blocks are free; block 0 is the first to go."""
        self._free = dict.fromkeys(reversed(range(engine.num_blocks)))

    @hookimpl
    def allocate(self, num_blocks: int) -> list[int] | None:
        """As many as are asked for, or none."""
        if num_blocks > len(self._free):
            return None
        return list(islice(reversed(self._free), num_blocks))

    @hookimpl
    def blocks_allocated(self, block_ids: Sequence[int]) -> None:
        """They are somebody's now, whoever chose them."""
        for block_id in block_ids:
            del self._free[block_id]

    @hookimpl
    def blocks_freed(self, block_ids: Sequence[int]) -> None:
        """They are free again."""
        for block_id in block_ids:
            self._free[block_id] = None
