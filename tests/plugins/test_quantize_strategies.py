"""quantize.int8, int4 and mixed: from settings to a format, and settings that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from treadle import KVFormat, ModelInfo, load
from treadle.errors import ConfigError
from treadle_plugins.quantize.calibration_file import Calibration, HeadReport, Ranges, read, write
from treadle_plugins.quantize.formats import CodecSettings
from treadle_plugins.quantize.int4 import Int4, Int4Settings
from treadle_plugins.quantize.int8 import Int8, Int8Settings
from treadle_plugins.quantize.mixed import Mixed, MixedSettings

MODEL = ModelInfo("small", num_layers=3, num_kv_heads=2, head_dim=8, vocab_size=10, max_length=64, fingerprint="f1")
LARGE = ModelInfo("large", num_layers=30, num_kv_heads=3, head_dim=64, vocab_size=10, max_length=64)


def table(value: float) -> tuple[tuple[tuple[float, ...], ...], ...]:
    return (((value,) * 8,) * 2,) * 3


def calibration(**changes: Any) -> Calibration:
    values: dict[str, Any] = {
        "model": "small",
        "fingerprint": "f1",
        "kv_format": "k4v4",
        "num_tokens": 100,
        "whole_heads": ((2, 0),),
        "whole_keys": ((0, 1),),
        "factors": table(2.0),
        "centers": table(0.5),
        "keys": Ranges(low=table(-14.0), high=table(7.0)),
        "values": Ranges(low=table(-1.0), high=table(2.0)),
        "heads": (HeadReport(layer=0, head=0, key_error=0.1, value_error=0.2),),
    }
    return Calibration(**(values | changes))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    write(path, calibration())
    return path


def int8(model: ModelInfo = MODEL, **settings: Any) -> KVFormat:
    return Int8(Int8Settings(**settings)).quantize(model)


def int4(model: ModelInfo = MODEL, **settings: Any) -> KVFormat:
    return Int4(Int4Settings(**settings)).quantize(model)


def mixed(model: ModelInfo = MODEL, **settings: Any) -> KVFormat:
    return Mixed(MixedSettings(**settings)).quantize(model)


def test_defaults() -> None:
    assert int8(LARGE) == KVFormat(8, 8)
    assert int8(LARGE).bytes_per_token(LARGE) / (90 * 256) <= 0.54
    four = int4(LARGE)
    assert four == KVFormat(4, 4, 16, 16, rotation=64)
    assert four.bytes_per_token(LARGE) / (90 * 256) <= 0.32
    assert mixed(LARGE) == KVFormat(8, 4, None, 16, rotation=64)


def test_sides_are_set_apart() -> None:
    form = mixed(LARGE, key_bits=4, value_bits=8, key_group=16, key_symmetric=True, value_symmetric=False, rotation=32)
    assert form == KVFormat(4, 8, 16, None, value_symmetric=False, rotation=32)
    assert mixed(LARGE, key_bits="whole", value_bits="2", value_group="head") == KVFormat(
        None, 2, value_symmetric=False, rotation=64
    )
    assert mixed(LARGE, key_bits="8", value_bits=8).rotation is None
    assert int4(LARGE, rotation="none").rotation is None
    assert int4(LARGE, rotation="16").rotation == 16


def test_heads_that_no_power_of_two_divides() -> None:
    odd = ModelInfo("odd", 2, 2, head_dim=80, vocab_size=10, max_length=10)
    form = int4(odd)
    assert (form.rotation, form.key_group) == (16, 16)


def test_named_heads_and_layers() -> None:
    form = int4(whole_heads=[[0, 1]], whole_layers=[2])
    assert form.whole_heads == {(0, 1)}
    assert form.whole_layers == {2}
    assert form.keeps_keys(2, 0)
    assert form.keeps_values(0, 1)
    assert not form.keeps_values(0, 0)


def test_settings_come_from_anywhere() -> None:
    overrides = ["quantize.strategy=mixed", "quantize.key_bits=4", "quantize.whole_heads=[[1, 0]]", "quantize.rotation=none"]
    settings = load(environment=False, overrides=overrides).choices["quantize"].settings
    assert isinstance(settings, MixedSettings)
    assert settings.key_bits == 4
    assert settings.whole_heads == ((1, 0),)


def test_a_calibration_balances_and_names_heads(file: Path) -> None:
    form = int4(calibration=file)
    assert form.whole_heads == {(2, 0)}
    assert form.whole_keys == {(0, 1)}
    assert form.keeps_keys(0, 1)
    assert not form.keeps_values(0, 1)
    assert form.key_balance is not None
    assert form.key_balance.factors == table(2.0)
    assert form.key_balance.centers == table(0.5)
    assert form.name == "k4bv4h8"
    assert int4(calibration=file, balance=False).key_balance is None
    assert int4(calibration=file, whole_heads=[[1, 1]]).whole_heads == {(2, 0), (1, 1)}
    hash(form)


def test_static_scales(file: Path) -> None:
    form = int8(calibration=file, granularity="head_channel")
    assert form.key_channels is not None
    assert form.key_channels.minima is None
    assert form.key_channels.scales[0][0][0] == pytest.approx(14 / 127)
    assert form.key_balance is None
    asymmetric = int4(calibration=file, granularity="head_channel", symmetric=False)
    assert asymmetric.rotation is None
    assert asymmetric.key_channels is not None
    assert asymmetric.key_channels.minima == table(-14.0)
    assert asymmetric.key_channels.scales[2][1][7] == pytest.approx(21 / 15)
    one = mixed(calibration=file, key_bits=4, value_bits=4, key_granularity="head_channel")
    assert one.key_channels is not None
    assert one.value_channels is None
    assert one.bytes_per_token(MODEL) < mixed(calibration=file, key_bits=4, value_bits=4).bytes_per_token(MODEL)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (int4, {"group": 3}, "quantize.group=3 does not divide the head size 8 of 'small'; one of .1, 2, 4, 8. does"),
        (mixed, {"value_group": 5}, "quantize.value_group=5 does not divide"),
        (int4, {"rotation": 3}, "quantize.rotation=3 is no power of two .* the largest is 8"),
        (int8, {"rotation": 16}, "quantize.rotation=16 is no power of two that divides the head size 8"),
        (int8, {"granularity": "head_channel"}, "quantize.granularity='head_channel' needs static scales"),
        (mixed, {"key_granularity": "head_channel"}, "quantize.key_granularity='head_channel' needs static scales"),
        (int4, {"granularity": "head_channel", "rotation": 8}, "quantize.rotation=8 mixes the channels"),
        (int8, {"whole_layers": [3]}, "name layer 3, but 'small' has layers 0 to 2"),
        (int8, {"whole_heads": [[0, 2]]}, "name KV head 2, but 'small' has KV heads 0 to 1"),
        (int8, {"calibration": "nowhere.json"}, "quantize.calibration='nowhere.json' cannot be read: No such file"),
    ],
)
def test_settings_that_do_not_fit(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"strategy": "int4", "rotation": 3}, "quantize.rotation=3 is no power of two"),
        ({"strategy": "int8", "granularity": "head_channel"}, "quantize.granularity='head_channel' needs static scales"),
        ({"strategy": "mixed", "value_granularity": "head_channel"}, "quantize.value_granularity='head_channel' needs"),
        (
            {"strategy": "int4", "granularity": "head_channel", "rotation": 8, "calibration": "nowhere.json"},
            "quantize.rotation=8 mixes the channels",
        ),
        ({"strategy": "int8", "calibration": "nowhere.json"}, "quantize.calibration='nowhere.json' cannot be read: No such file"),
    ],
)
def test_what_fits_no_model_is_refused_before_one_is_loaded(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(environment=False, values={"execute": "simulated", "quantize": table})


@pytest.mark.parametrize("wrong", [{"key_bits": 3}, {"value_bits": "some"}, {"key_group": "few"}, {"rotation": "maybe"}])
def test_values_that_mean_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MixedSettings(**wrong)


def test_a_calibration_of_another_model_is_refused(file: Path) -> None:
    other = ModelInfo("other", 3, 2, 8, 10, 64, fingerprint="f2")
    with pytest.raises(ConfigError, match=r"made for the model 'small' \(f1\), not for 'other' \(f2\)"):
        int8(other, calibration=file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no calibration file"),
        ("{", "is no calibration file"),
        (json.dumps({"version": 2}), "is no calibration file: version"),
        (json.dumps({"version": 1}), "is no calibration file: model: Field required"),
    ],
)
def test_a_damaged_calibration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(path, MODEL)


def test_a_calibration_comes_back_as_it_was(file: Path) -> None:
    assert read(file, MODEL) == calibration()
    with pytest.raises(ConfigError, match="cannot write"):
        write(file / "below", calibration())


def test_every_strategy_shares_the_settings_of_codecs() -> None:
    assert all(issubclass(strategy.Settings, CodecSettings) for strategy in (Int4, Int8, Mixed))
