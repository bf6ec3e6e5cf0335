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
    from treadle_plugins.forward.spec import PackedForward

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

    @hookspec(firstresult=True)
    def forward(self, model: PreTrainedModel, plain: PackedForward, settings: object) -> PackedForward | None:
        """Answer with a forward pass of your own over packed tokens; None passes the question on.

        Called once, after `prepare_model`, with `plain`, the model's own pass. The first answer counts; when nobody
        answers, `plain` computes every step. The answer may take the model's weights away (to pack them without a
        second copy) and not use the model again, or replace modules and answer with a pass that calls `plain`. It must
        call `attend` once for each layer, with what the model itself would attend with: on a few tokens, queries, keys,
        values and logits are compared with the model's own, and start-up ends with a ModelError where they differ by
        more than rounding explains. `settings` are the executor's.
        """

    @hookspec
    def process_logits(self, logits: torch.Tensor, works: Sequence[Work]) -> None:
        """Change `logits` in place, before sampling; return nothing.

        Called once a step that samples. `logits` is [rows, vocabulary] in float32, one row for each sampled position,
        and `works[i]` is the work that row `i` belongs to: a work with drafted tokens has several rows, in order of
        position. -inf forbids a token. Each implementation sees what those called before it left. A row left with NaN,
        +inf or nothing but -inf fails its work only. Log-probabilities are those of the logits as the model gave them.
        """
