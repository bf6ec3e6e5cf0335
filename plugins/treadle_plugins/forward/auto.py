"""forward.auto: on a CPU, weights packed for the matrix units and the operations around them fused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle import hookimpl

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treadle_plugins.forward.spec import PackedForward


class AutoForwardStrategy:
    """Fused where nothing is lost: float32 weights stay unpacked. A stranger's `forward` is asked before."""

    @hookimpl
    def forward(self, model: PreTrainedModel, plain: PackedForward) -> PackedForward | None:
        """A fused pass on a CPU, module by module where an architecture or a module is not known; else None."""
        from treadle_plugins.forward.fused.build import Weights, build

        return build(model, plain, weights=Weights.EXACT) if model.device.type == "cpu" else None


class FusedForwardStrategy:
    """Fused, with weights packed in every precision that the processor multiplies."""

    @hookimpl
    def forward(self, model: PreTrainedModel, plain: PackedForward) -> PackedForward | None:
        """A fused pass on a CPU, module by module where an architecture or a module is not known; else None."""
        from treadle_plugins.forward.fused.build import build

        return build(model, plain) if model.device.type == "cpu" else None
