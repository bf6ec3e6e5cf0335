"""Treadle: an LLM inference engine in which every policy is a plugin."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.contracts import (
        Accept,
        Admission,
        Budget,
        EngineInfo,
        Executor,
        KVFormat,
        Load,
        Match,
        ModelInfo,
        NotBefore,
        Open,
        Preemption,
        PreemptionMode,
        Refuse,
        StepReport,
        SyncExecutor,
        Trim,
    )
    from treadle.engine import Engine
    from treadle.errors import TreadleError
    from treadle.handles import Completion, Handle
    from treadle.hookspecs import hookimpl
    from treadle.plan import FinishReason
    from treadle.plugin import Plugin, Trait
    from treadle.request import Phase, Request, RequestOptions, StashKey
    from treadle.sampling_params import SamplingParams
    from treadle.settings import BlockSettings, Settings, StrategySettings, load
    from treadle.step import Step

# imported when first used, so that `treadle --help` stays quick
_HOMES = {
    "treadle.contracts": (
        "Accept", "Admission", "Budget", "EngineInfo", "Executor", "KVFormat", "Load", "Match", "ModelInfo", "NotBefore", "Open",
        "Preemption", "PreemptionMode", "Refuse", "StepReport", "SyncExecutor", "Trim",
    ),
    "treadle.engine": ("Engine",),
    "treadle.errors": ("TreadleError",),
    "treadle.handles": ("Completion", "Handle"),
    "treadle.hookspecs": ("hookimpl",),
    "treadle.plan": ("FinishReason",),
    "treadle.plugin": ("Plugin", "Trait"),
    "treadle.request": ("Phase", "Request", "RequestOptions", "StashKey"),
    "treadle.sampling_params": ("SamplingParams",),
    "treadle.settings": ("BlockSettings", "Settings", "StrategySettings", "load"),
    "treadle.step": ("Step",),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Accept", "Admission", "BlockSettings", "Budget", "Completion", "Engine", "EngineInfo", "Executor", "FinishReason", "Handle",
    "KVFormat", "Load", "Match", "ModelInfo", "NotBefore", "Open", "Phase", "Plugin", "Preemption", "PreemptionMode", "Refuse",
    "Request", "RequestOptions", "SamplingParams", "Settings", "StashKey", "Step", "StepReport", "StrategySettings",
    "SyncExecutor", "Trait", "TreadleError", "Trim", "hookimpl", "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
