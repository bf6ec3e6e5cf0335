"""allocate.contiguous: the classic base line. A request's whole length is reserved in one piece when it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from treadle import BlockSettings, EngineInfo, Request, Step, Trait, hookimpl
from treadle_plugins.allocate.extents import Extents


class ContiguousSettings(BlockSettings):
    """Blocks, and how much is reserved."""

    reserve: Literal["max_tokens", "model_length"] = "max_tokens"
    """Reserve for the prompt and `max_tokens`, or for the longest sequence that the model takes."""


class Contiguous:
    """One run of neighbours for each request, large enough for its longest answer."""

    Settings = ContiguousSettings
    refuses: Mapping[Trait, str] = MappingProxyType(
        {Trait.PREFIX_REUSE: "shared blocks are scattered, contiguous allocation wants one run; set prefix.strategy to 'none'"}
    )

    def __init__(self, settings: ContiguousSettings) -> None:
        self._reserve = settings.reserve
        self._model_length = 0
        self._extents = Extents(0)

    @hookimpl
    def engine_started(self, engine: EngineInfo) -> None:
        """One run of free blocks."""
        self._model_length = engine.model.max_length
        self._extents = Extents(engine.num_blocks)

    @hookimpl
    def allocate(self, step: Step, request: Request, num_blocks: int) -> list[int] | None:
        """The whole reserve at once, or nothing."""
        # the last token of a request is never computed
        length = self._model_length if self._reserve == "model_length" else request.max_total_tokens - 1
        wanted = max(num_blocks, min(step.pool.blocks_for(length), step.pool.num_blocks) - len(request.block_table))
        start = self._extents.best_fit(wanted)
        return None if start is None else list(range(start, start + wanted))

    @hookimpl
    def blocks_allocated(self, block_ids: Sequence[int]) -> None:
        """They are somebody's now, whoever chose them."""
        self._extents.remove(block_ids)

    @hookimpl
    def blocks_freed(self, block_ids: Sequence[int]) -> None:
        """They join their free neighbours."""
        self._extents.add([block_ids])
