"""attention.auto: the fastest backend that can do what the model and the pool need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle import hookimpl

if TYPE_CHECKING:
    from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec


class AutoAttentionStrategy:
    """The first built-in backend that can; a stranger's `attention` rule is asked before."""

    @hookimpl(trylast=True)  # it raises where it cannot serve, so nobody who could may stand behind it
    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        """The choice. Raises ConfigError, with each backend's reason, when none can serve."""
        from treadle_plugins.attention.numba_backend.backend import NumbaAttention
        from treadle_plugins.attention.spec import choose
        from treadle_plugins.attention.torch_backend import TorchAttention

        # fastest first; the reference, which can do everything, last
        return choose([NumbaAttention, TorchAttention], spec)
