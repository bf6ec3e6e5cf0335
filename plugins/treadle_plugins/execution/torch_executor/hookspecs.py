"""The torch executor's own hooks, as public as the core's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from treadle.plan import Work
    from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec

hookspec = pluggy.HookspecMarker("treadle")


class TorchExecutorHooks:
    """Hooks that only the torch executor calls."""

    @hookspec(firstresult=True)
    def attention(self, spec: AttentionSpec) -> AttentionBackend | None:
        """Answer with a backend that can do all that `spec` asks for; None passes the question on.

        Called once, when the pool is opened. The first answer counts. When nobody answers, start-up ends with a
        ConfigError. The backend may allocate nothing before its `allocate` is called.
        """

    @hookspec
    def prepare_model(self, model: PreTrainedModel, settings: object) -> None:
        """Told once, after the model is loaded and before anything is computed: prepack, fuse, quantize weights.

        May replace modules and weights in place. `settings` are the executor's. The model's attention modules are
        bound to the pool afterwards: they must keep their `layer_idx` and call transformers' attention interface.
        """

    @hookspec
    def process_logits(self, logits: torch.Tensor, works: Sequence[Work]) -> None:
        """Change `logits` in place, before sampling; return nothing.

        Called once a step that samples. `logits` is [rows, vocabulary] in float32, one row for each sampled position,
        and `works[i]` is the work that row `i` belongs to: a work with drafted tokens has several rows, in order of
        position. -inf forbids a token. Each implementation sees what those called before it left. A row left with NaN,
        +inf or nothing but -inf fails its work only. Log-probabilities are those of the logits as the model gave them.
        """
