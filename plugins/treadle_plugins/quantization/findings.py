"""What `treadle calibrate` finds out. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from treadle import Engine, KVFormat, ModelInfo, SamplingParams, Settings, load
from treadle.contracts import KeyBalance
from treadle.errors import ConfigError, ExecutionError
from treadle_plugins.quantization.calibration_file import Calibration, Head, HeadReport, Ranges, Table
from treadle_plugins.quantization.recording import LayerStatistics, Recording, RecordingBackend

_DIGITS = 6
"""Significant digits that are kept of a number."""
_SMALLEST = 1e-4
"""Channels whose keys, or queries, are smaller than this share of the head's largest are balanced as if they had it."""


@dataclass(frozen=True)
class Limits:
    """How much is computed, and how many heads may be named."""

    max_tokens: int
    chunk: int
    """Tokens of one request."""
    max_share: float
    """Most heads to keep whole, as a share of all."""
    threshold: float
    """An outlier's error, in medians."""


def find(settings: Settings, text: str, limits: Limits) -> Calibration:
    """Run the configured model over `text` twice. Raises ConfigError for a text that is too short or a model without tokenizer."""
    recording = Recording()
    with Engine(_whole(settings, limits), [recording]) as engine:
        if engine.tokenizer is None:
            raise ConfigError(f"model {engine.info.model.name!r} has no tokenizer: calibrate needs one that reads text")
        prompts = _cut(engine.tokenizer.encode(text), limits, engine.info.model)
        return _judge(engine, recording, prompts, _candidate(settings, engine), limits)
