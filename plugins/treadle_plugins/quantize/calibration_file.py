"""What `treadle calibrate` finds out about a model's keys and values, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from treadle import ModelInfo
from treadle.errors import ConfigError

Table = tuple[tuple[tuple[float, ...], ...], ...]
"""[layer][KV head][channel]"""
Head = tuple[int, int]
"""Layer and KV head."""


class HeadReport(BaseModel):
    """How much one KV head's attention changes when its keys, or its values, are quantized: relative error of its outputs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: int
    head: int
    key_error: float
    value_error: float


class Ranges(BaseModel):
    """Smallest and largest value of each channel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: Table
    high: Table


class Calibration(BaseModel):
    """One calibration. Belongs to one model, whose fingerprint it carries."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    model: str
    fingerprint: str
    kv_format: str
    """Name of the format under which the heads were judged."""
    num_tokens: int
    """Tokens of the text that it was made from."""
    whole_heads: tuple[Head, ...]
    """Heads whose keys and values are to be kept whole."""
    whole_keys: tuple[Head, ...]
    """Heads whose keys alone are to be kept whole."""
    factors: Table
    """Balance of keys: what each channel is divided by before keys are rotated and quantized."""
    centers: Table | None
    """Mean key, which is taken off first; None for a model that caps its scores."""
    keys: Ranges
    values: Ranges
    heads: tuple[HeadReport, ...]


def read(path: Path, model: ModelInfo) -> Calibration:
    """Read a calibration of `model`. Raises ConfigError when it cannot be read, is damaged or belongs to another model."""
    found = parse(path)
    if found.fingerprint != model.fingerprint:
        raise ConfigError(
            f"quantize.calibration={str(path)!r} was made for the model {found.model!r} ({found.fingerprint}), not for "
            f"{model.name!r} ({model.fingerprint}): weights or precision differ; run `treadle calibrate` with this model"
        )
    return found


def parse(path: Path) -> Calibration:
    """Read a calibration of any model. Raises ConfigError when it cannot be read or is damaged."""
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"quantize.calibration={str(path)!r} cannot be read: {error.strerror}; `treadle calibrate` writes one"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"quantize.calibration={str(path)!r} is no calibration file: {where}: {first['msg']}") from None


def write(path: Path, calibration: Calibration) -> None:
    """Write the file. Raises ConfigError when it cannot be written."""
    try:
        path.write_text(calibration.model_dump_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror}; name a file in a folder that you may write to"
        ) from error
