"""prefix.none: nothing is reused."""

from __future__ import annotations

from treadle import Trait, hookimpl


class NoPrefix:
    """Every request computes all of its tokens, and blocks are not indexed."""

    traits: tuple[Trait, ...] = ()

    @hookimpl
    def match_prefix(self) -> tuple[int, ...]:
        """Nothing."""
        return ()
