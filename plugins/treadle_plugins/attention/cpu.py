"""attention.cpu: compiled kernels for a CPU, straight over the block tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from treadle import StrategySettings, hookimpl
from treadle.logs import get_logger

if TYPE_CHECKING:
    from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec

log = get_logger(__name__)


class CpuAttentionSettings(StrategySettings):
    """Where compiled kernels are kept."""

    cache_dir: Path | None = None
    """Folder for compiled kernels; unset means `kernels` in the user's cache folder of Treadle."""


class CpuAttentionStrategy:
    """Kernels that Numba compiles once for this processor, run by torch's own threads."""

    Settings = CpuAttentionSettings

    def __init__(self, settings: CpuAttentionSettings) -> None:
        self._settings = settings

    @hookimpl(trylast=True)  # it raises where it cannot serve, so nobody who could may stand behind it
    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        """The backend. Raises ConfigError, with the reason, where it cannot serve."""
        from treadle_plugins.attention.numba_backend.backend import NumbaAttention
        from treadle_plugins.attention.spec import choose

        if self._settings.cache_dir is None or NumbaAttention.supports(spec) is not None:
            return choose([NumbaAttention], spec)
        return NumbaAttention(spec, self._settings.cache_dir)


class NumbaAttentionStrategy(CpuAttentionStrategy):
    """`cpu` under the name that it had: the same, and a notice."""

    def __init__(self, settings: CpuAttentionSettings) -> None:
        super().__init__(settings)
        log.warning("strategy_renamed", was="attention.numba", now="attention.cpu")
