"""preempt.none: nobody gives way; who finds no room waits for blocks to come back.

When nobody at all can go on, the core itself takes back the last admitted request, so that the first progresses.
"""

from __future__ import annotations

from treadle import hookimpl


class NoPreemption:
    """Choose no victim."""

    @hookimpl
    def preempt(self) -> None:
        """None: wait."""
