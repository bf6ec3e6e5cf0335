"""execute.torch: run a causal language model of transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

import treadle
from treadle import Executor, StrategySettings, hookimpl
from treadle.clocks import MonotonicClock
from treadle.errors import ConfigError
from treadle.registry import Slot
from treadle_plugins.execute.torch_executor.hookspecs import TorchExecutorHooks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from treadle_plugins.forward.spec import PackedForward

BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


class TorchSettings(StrategySettings):
    """Where and in which precision the model runs."""

    device: str = "auto"
    """A torch device such as `cpu` or `cuda:0`; `auto` takes a GPU if there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of weights and KV; `auto` is bfloat16 where the processor multiplies it natively, else float32."""
    num_threads: int | None = Field(None, ge=1)
    """Threads of torch on the CPU; unset leaves torch's own choice."""
    forward: Literal["auto", "fused", "plain"] = "auto"
    """`plain` leaves all to transformers. `fused` packs the weights and fuses the pass on a CPU, as far as the architecture is
    known. `auto` does the same but for float32 weights: they are not packed, since packed products round more."""
    offline: bool = False
    """Fetch nothing: only what is on this machine is used."""


class TorchStrategy:
    """Loads the configured model and makes its executor. Imports torch only then."""

    Settings = TorchSettings
    hookspecs = TorchExecutorHooks
    slots = (Slot("attention", ("attention",), "auto"),)

    def __init__(self, settings: TorchSettings) -> None:
        self._settings = settings

    @hookimpl
    def execute(self, settings: treadle.Settings, hooks: Any) -> Executor:
        """Find and load the model. Raises ModelError or ConfigError."""
        _require("torch", "transformers", "numpy")
        import torch

        from treadle_plugins.execute.torch_executor.executor import build
        from treadle_plugins.execute.torch_executor.interface import register
        from treadle_plugins.models.load import load
        from treadle_plugins.models.resolve import resolve

        device = self._device(torch)
        if self._settings.num_threads is not None:
            torch.set_num_threads(self._settings.num_threads)
        register()
        source = resolve(settings.root.model, settings.root.cache_dir, self._settings.offline)
        loaded = load(source, self._dtype(torch, device), device)
        changes_logits = bool(hooks.process_logits.get_hookimpls())
        return build(
            loaded.model,
            loaded.info,
            loaded.tokenizer,
            choose_attention=lambda spec: hooks.attention(spec=spec),
            clock=MonotonicClock(),
            prepare_model=lambda model: hooks.prepare_model(model=model, settings=self._settings),
            make_forward=lambda model, plain: hooks.forward(model=model, plain=plain, settings=self._settings),
            process_logits=(lambda logits, works: hooks.process_logits(logits=logits, works=works)) if changes_logits else None,
        )

    @hookimpl(trylast=True)  # what comes with the executor stands behind every plugin's answer
    def forward(self, model: PreTrainedModel, plain: PackedForward) -> PackedForward | None:
        """The fused pass, where the settings want it."""
        from treadle_plugins.forward.auto import AutoForwardStrategy, FusedForwardStrategy

        if self._settings.forward == "plain":
            return None
        built_in = AutoForwardStrategy() if self._settings.forward == "auto" else FusedForwardStrategy()
        return built_in.forward(model, plain)

    def _device(self, torch_: Any) -> str:
        wanted = self._settings.device
        if wanted == "auto":
            return "cuda" if torch_.cuda.is_available() else "cpu"
        try:
            torch_.empty(1, device=wanted)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"execute.device={wanted!r} cannot be used here: {reason}; 'auto' and 'cpu' work") from error
        return wanted

    def _dtype(self, torch_: Any, device: str) -> torch.dtype:
        name = self._settings.dtype
        if name == "auto":
            name = "bfloat16" if device != "cpu" or _multiplies_bf16() else "float32"
        dtype: torch.dtype = getattr(torch_, name)
        return dtype


def _require(*modules: str) -> None:
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"execute.strategy='torch' needs {' and '.join(missing)}, which is not installed: pip install 'treadle[cpu]', or "
            "choose execute.strategy='simulated'"
        )


def _multiplies_bf16() -> bool:
    """Whether the processor multiplies bfloat16 natively, as far as the system says."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not BF16_FLAGS.isdisjoint(flags)
