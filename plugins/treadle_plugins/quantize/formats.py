"""From the settings of a quantize strategy to a KVFormat, for the model at hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

import treadle
from treadle import KVFormat, ModelInfo, StrategySettings
from treadle.contracts import KeyBalance, StaticChannels
from treadle.errors import ConfigError
from treadle_plugins.quantize.calibration_file import Ranges, Table, parse, read

FEW_BITS = 4
"""From here down, groups and a rotation pay for themselves."""
MINIMA_BITS = 2
"""From here down, minima do too."""
AUTO_GROUP = 16
"""For the same bytes, groups of 32 with minima are worse: see docs/log.md."""

Granularity = Literal["token_head", "head_channel"]


def _number(value: Any) -> Any:
    """Settings of the environment and the command line come as text."""
    return int(value) if isinstance(value, str) and value.isdigit() else value


Bits = Annotated[Literal[8, 4, 2, "whole"], BeforeValidator(_number)]
Group = Annotated[int | Literal["auto", "head"], BeforeValidator(_number)]
Rotation = Annotated[int | Literal["auto", "none"], BeforeValidator(_number)]


class CodecSettings(StrategySettings):
    """Settings that all codecs share."""

    rotation: Rotation = "auto"
    """Size of the Hadamard blocks that rotate keys and values first, a power of two that divides the head size; `auto` takes the
    largest one where codes have 4 bits or fewer, `none` never rotates."""
    whole_layers: tuple[int, ...] = ()
    """Layers that are not quantized."""
    whole_heads: tuple[tuple[int, int], ...] = ()
    """Pairs of layer and KV head that are not quantized."""
    calibration: Path | None = None
    """File of `treadle calibrate`: keeps the heads that it names whole, balances keys, and gives static scales."""
    balance: bool = True
    """Make the channels of keys alike first, as the calibration found them."""

    def sides(self) -> tuple[Side, Side]:
        """What is chosen for keys and for values."""
        raise NotImplementedError


@dataclass(frozen=True)
class Side:
    """What was chosen for keys, or for values; `names` are the settings by which errors call them."""

    bits: int | None
    group: int | str = "auto"
    symmetric: bool | None = None
    granularity: Granularity = "token_head"
    names: str = ""
    """Put before `group` and `granularity`: `key_`, `value_` or nothing."""

    @property
    def is_static(self) -> bool:
        """Whether its scales come from the calibration."""
        return self.bits is not None and self.granularity == "head_channel"

    @property
    def has_few_bits(self) -> bool:
        """Whether it needs all help that there is."""
        return self.bits is not None and self.bits <= FEW_BITS

    @property
    def is_symmetric(self) -> bool:
        """As chosen, else unless there are next to no bits."""
        return self.bits is None or self.bits > MINIMA_BITS if self.symmetric is None else self.symmetric

    def group_for(self, model: ModelInfo) -> int | None:
        """Channels that share a scale; None for all of a head. Raises ConfigError for a group that does not fit."""
        if self.bits is None or self.group == "head" or self.is_static:
            return None
        if isinstance(self.group, int):
            if self.group < 1 or model.head_dim % self.group:
                raise ConfigError(
                    f"quantize.{self.names}group={self.group} does not divide the head size {model.head_dim} of "
                    f"{model.name!r}; one of {_divisors(model.head_dim)} does"
                )
            return self.group
        fitting = [size for size in _divisors(model.head_dim) if size <= AUTO_GROUP]
        return fitting[-1] if self.has_few_bits and fitting[-1] < model.head_dim else None


def check(codec: CodecSettings, settings: treadle.Settings) -> None:  # noqa: ARG001  # nothing else matters
    """Refuse a codec that fits no model, and a calibration that cannot be read. Raises ConfigError."""
    for side in codec.sides():
        if side.is_static and codec.calibration is None:
            raise _needs_scales(side)
        if side.is_static and isinstance(codec.rotation, int):
            raise _mixes_channels(codec.rotation, side)
    if isinstance(codec.rotation, int) and (codec.rotation < 1 or codec.rotation & (codec.rotation - 1)):
        raise ConfigError(f"quantize.rotation={codec.rotation} is no power of two; use one that divides the head size, or 'auto'")
    if codec.calibration is not None:
        parse(codec.calibration)


def build(model: ModelInfo, settings: CodecSettings) -> KVFormat:
    """The format. Raises ConfigError for what does not fit the model, and for a calibration that is missing or not its own."""
    keys, values = settings.sides()
    _check_whole(model, settings)
    rotation = _rotation(model, settings.rotation, keys, values)
    calibration = None if settings.calibration is None else read(settings.calibration, model)
    balanced = calibration is not None and settings.balance and keys.bits is not None and not keys.is_static
    return KVFormat(
        key_bits=keys.bits,
        value_bits=values.bits,
        key_group=keys.group_for(model),
        value_group=values.group_for(model),
        key_symmetric=keys.is_symmetric,
        value_symmetric=values.is_symmetric,
        key_channels=_static(keys, None if calibration is None else calibration.keys),
        value_channels=_static(values, None if calibration is None else calibration.values),
        key_balance=KeyBalance(calibration.factors, calibration.centers) if calibration and balanced else None,
        rotation=rotation,
        whole_heads=frozenset(settings.whole_heads) | frozenset(calibration.whole_heads if calibration else ()),
        whole_keys=frozenset(calibration.whole_keys if calibration else ()),
        whole_layers=frozenset(settings.whole_layers),
    )


def _rotation(model: ModelInfo, chosen: int | str, keys: Side, values: Side) -> int | None:
    static = next((side for side in (keys, values) if side.is_static), None)
    if chosen == "none" or (chosen == "auto" and (static or not (keys.has_few_bits or values.has_few_bits))):
        return None
    largest = model.head_dim & -model.head_dim
    if chosen == "auto":
        return largest if largest > 1 else None
    assert isinstance(chosen, int), "other texts are refused by the settings"
    if static:
        raise _mixes_channels(chosen, static)
    if chosen < 1 or chosen & (chosen - 1) or largest % chosen:
        raise ConfigError(
            f"quantize.rotation={chosen} is no power of two that divides the head size {model.head_dim} of {model.name!r}; "
            f"the largest is {largest}"
        )
    return chosen


def _mixes_channels(rotation: int, side: Side) -> ConfigError:
    return ConfigError(
        f"quantize.rotation={rotation} mixes the channels that quantize.{side.names}granularity='head_channel' has scales "
        "for; use rotation='none' or granularity 'token_head'"
    )


def _needs_scales(side: Side) -> ConfigError:
    return ConfigError(
        f"quantize.{side.names}granularity='head_channel' needs static scales; set quantize.calibration to a file that "
        "`treadle calibrate` wrote, or use 'token_head'"
    )


def _static(side: Side, ranges: Ranges | None) -> StaticChannels | None:
    if not side.is_static:
        return None
    if ranges is None:
        raise _needs_scales(side)
    assert side.bits is not None, "a side kept whole is not static"
    if side.is_symmetric:
        middle = 1 << (side.bits - 1)
        return StaticChannels(_each(lambda low, high: max(abs(low), abs(high)) / (middle - 1), ranges))
    top = (1 << side.bits) - 1
    return StaticChannels(_each(lambda low, high: (high - low) / top, ranges), ranges.low)


def _each(scale: Any, ranges: Ranges) -> Table:
    return tuple(
        tuple(tuple(map(scale, *channels)) for channels in zip(*heads, strict=True))
        for heads in zip(ranges.low, ranges.high, strict=True)
    )


def _check_whole(model: ModelInfo, settings: CodecSettings) -> None:
    layers = [*settings.whole_layers, *(layer for layer, _ in settings.whole_heads)]
    for name, wrong, most in (
        ("layer", _beyond(layers, model.num_layers), model.num_layers),
        ("KV head", _beyond((head for _, head in settings.whole_heads), model.num_kv_heads), model.num_kv_heads),
    ):
        if wrong is not None:
            raise ConfigError(
                f"quantize.whole_layers and whole_heads name {name} {wrong}, but {model.name!r} has {name}s 0 to {most - 1}"
            )


def _beyond(numbers: Iterable[int], most: int) -> int | None:
    return next((number for number in numbers if not 0 <= number < most), None)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
