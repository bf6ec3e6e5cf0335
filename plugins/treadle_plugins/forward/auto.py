"""forward.auto: on a CPU, weights packed for the matrix units and the operations around them fused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle import hookimpl

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treadle_plugins.forward.spec import PackedForward


class AutoForwardStrategy:
    """A stranger's `forward` is asked before."""

    @hookimpl
    def forward(self, model: PreTrainedModel, plain: PackedForward) -> PackedForward | None:
        """The fused pass on a CPU, module by module where an architecture or a module is not known; else None."""
        if model.device.type != "cpu":
            return None
        from treadle_plugins.forward.fused.build import build

        return build(model, plain)
