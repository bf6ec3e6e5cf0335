"""attention.torch: the reference. It can do everything, slowly, and is the truth that kernels are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle import hookimpl

if TYPE_CHECKING:
    from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec


class TorchAttentionStrategy:
    """Torch's own scaled dot product, one sequence at a time."""

    @hookimpl(trylast=True)  # it raises where it cannot serve, so nobody who could may stand behind it
    def attention(self, spec: AttentionSpec) -> AttentionBackend:
        """The torch backend. Raises ConfigError, with the reason, where it cannot serve."""
        from treadle_plugins.attention.spec import choose
        from treadle_plugins.attention.torch_backend import TorchAttention

        return choose([TorchAttention], spec)
