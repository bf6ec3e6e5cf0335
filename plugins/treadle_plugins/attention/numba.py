"""attention.numba: compiled kernels for a CPU, straight over the block tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from treadle import StrategySettings, hookimpl

if TYPE_CHECKING:
    from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec


class NumbaAttentionSettings(StrategySettings):
    """Where compiled kernels are kept."""

    cache_dir: Path | None = None
    """Folder for compiled kernels; unset means `kernels` in the user's cache folder of Treadle."""


class NumbaAttentionStrategy:
    """Kernels that Numba compiles once for this processor, run by torch's own threads."""

    Settings = NumbaAttentionSettings

    def __init__(self, settings: NumbaAttentionSettings) -> None:
        self._settings = settings

    @hookimpl(trylast=True)  # it raises where it cannot serve, so nobody who could may stand behind it
    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        """The numba backend. Raises ConfigError, with the reason, where it cannot serve."""
        from treadle_plugins.attention.numba_backend.backend import NumbaAttention
        from treadle_plugins.attention.spec import choose

        if self._settings.cache_dir is None or NumbaAttention.supports(spec) is not None:
            return choose([NumbaAttention], spec)
        return NumbaAttention(spec, self._settings.cache_dir)
