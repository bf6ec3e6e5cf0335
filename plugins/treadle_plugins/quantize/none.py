"""quantize.none: keys and values are kept whole."""

from __future__ import annotations

from treadle import KVFormat, hookimpl


class NoQuantization:
    """The model's own precision."""

    @hookimpl
    def quantize(self) -> KVFormat:
        """Whole."""
        return KVFormat()
