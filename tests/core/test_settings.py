"""Settings: which layer wins, where a value came from, and errors that say what, where and what would work."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest

from treadle.errors import ConfigError
from treadle.registry import Offer, Registry, Slot
from treadle.settings import Settings, StrategySettings, load

Load = Callable[..., Settings]


@pytest.fixture
def resolve(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a file's text, environment variables and overrides; all else in the environment is as if it were unset."""

    for name in [name for name in os.environ if name.startswith("TREADLE_")]:
        monkeypatch.delenv(name)

    def run(
        text: str | None = None, env: dict[str, str] | None = None, overrides: list[str] | None = None, **more: Any
    ) -> Settings:
        path = None
        if text is not None:
            path = tmp_path / "treadle.toml"
            path.write_text(text, encoding="utf-8")
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        # the simulated executor needs nothing that is not in the core's own environment
        overrides = ["execute=simulated", *(overrides or [])]
        return load(path, overrides, **{"registry": registry, **more})

    return run


def _admit(settings: Settings) -> Any:
    return settings.choices["admit"].settings


# --- layers ---------------------------------------------------------------------------------------------------------------------


def test_defaults_fill_every_slot(resolve: Load) -> None:
    settings = resolve()
    chosen = {slot: choice.offer.name for slot, choice in settings.choices.items()}
    assert chosen == {
        "accept": "queue_limit", "order": "fcfs", "admit": "continuous", "budget": "decode_first", "prefix": "hash_chain",
        "allocate": "paged", "evict": "lru", "preempt": "recompute", "release": "at_once", "quantize": "none",
        "execute": "simulated",
    }  # fmt: skip
    assert settings.choices["admit"].origin == "default"
    assert settings.choices["execute"].origin == "--set execute=simulated"
    assert settings.notes == ()


def test_file_then_environment_then_arguments_then_overrides(resolve: Load) -> None:
    file = "[admit]\nmax_batch_size = 1\nmax_inserts = 1\nevery_steps = 1\nspare_blocks = 1"
    env = {"TREADLE_ADMIT__MAX_INSERTS": "2", "TREADLE_ADMIT__EVERY_STEPS": "2", "TREADLE_ADMIT__SPARE_BLOCKS": "2"}
    values = {"admit": {"every_steps": 3, "spare_blocks": 3}}
    settings = resolve(file, env, ["admit.spare_blocks=4"], values=values)
    admit = _admit(settings)
    assert (admit.max_batch_size, admit.max_inserts, admit.every_steps, admit.spare_blocks) == (1, 2, 3, 4)
    origins = settings.choices["admit"].origins
    assert origins["max_batch_size"].endswith("treadle.toml")
    assert origins["max_inserts"] == "environment variable TREADLE_ADMIT__MAX_INSERTS"
    assert origins["every_steps"] == "arguments"
    assert origins["spare_blocks"] == "--set admit.spare_blocks=4"


def test_the_last_of_two_overrides_wins(resolve: Load) -> None:
    assert _admit(resolve(overrides=["admit.every_steps=2", "admit.every_steps=5"])).every_steps == 5


def test_the_environment_names_the_file(resolve: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "other.toml"
    path.write_text("model = 'from-the-file'", encoding="utf-8")
    monkeypatch.setenv("TREADLE_CONFIG", str(path))
    assert resolve().root.model == "from-the-file"
    assert resolve("model = 'named'").root.model == "named"
    assert resolve(environment=False).root.model != "from-the-file"


def test_without_the_environment_nothing_is_read_from_it(resolve: Load) -> None:
    settings = resolve(env={"TREADLE_ADMIT__EVERY_STEPS": "9", "TREADLE_NONSENSE": "1"}, environment=False)
    assert _admit(settings).every_steps == 1


@pytest.mark.parametrize(
    "given",
    [
        {"text": 'admit = "windowed"'},
        {"text": '[admit]\nstrategy = "windowed"'},
        {"env": {"TREADLE_ADMIT": "windowed"}},
        {"env": {"TREADLE_ADMIT__STRATEGY": "windowed"}},
        {"overrides": ["admit=windowed"]},
        {"overrides": ["admit.strategy=windowed"]},
        {"overrides": ['admit={strategy = "windowed"}']},
        {"values": {"admit": "windowed"}},
    ],
)
def test_a_strategy_is_chosen_by_its_name_alone_or_in_its_table(given: dict[str, Any], resolve: Load) -> None:
    assert resolve(**given).choices["admit"].offer.name == "windowed"


def test_a_name_and_its_settings_may_come_from_several_variables(resolve: Load) -> None:
    settings = resolve(env={"TREADLE_ADMIT": "windowed", "TREADLE_ADMIT__WINDOW_MS": "7.5", "TREADLE_POOL__NUM_BLOCKS": "12"})
    assert settings.choices["admit"].offer.name == "windowed"
    assert _admit(settings).window_ms == 7.5
    assert settings.root.pool.num_blocks == 12


@pytest.mark.parametrize(
    ("value", "expected"),
    [("2GiB", 2 << 30), ("1.5 GB", 1_500_000_000), ("4096", 4096)],
)
def test_sizes_are_read_for_people(value: str, expected: int, resolve: Load) -> None:
    assert resolve(overrides=[f"pool.memory={value}"]).root.pool.memory == expected
    assert resolve(env={"TREADLE_POOL__MEMORY": value}).root.pool.memory == expected


def test_another_strategy_in_a_later_layer_drops_the_earlier_ones_settings_and_says_so(resolve: Load) -> None:
    file = '[admit]\nstrategy = "windowed"\nwindow_ms = 9.0\nmax_batch_size = 3'
    settings = resolve(file, overrides=["admit=static", "admit.batch_size=5"])
    assert _admit(settings).model_dump() == {"batch_size": 5, "max_wait_ms": 100.0}
    assert len(settings.notes) == 2
    for note, name, value in zip(settings.notes, ("window_ms", "max_batch_size"), ("9.0", "3"), strict=True):
        for part in (f"admit.{name}={value}", "treadle.toml", "left out", "--set admit=static", "'static'"):
            assert part in note
    assert not any(path[-1] == "window_ms" for path in settings.origins)


def test_the_same_strategy_in_a_later_layer_keeps_the_settings(resolve: Load) -> None:
    settings = resolve('[admit]\nstrategy = "windowed"\nwindow_ms = 9.0', overrides=["admit=windowed"])
    assert _admit(settings).window_ms == 9.0
    assert settings.notes == ()


def test_settings_without_a_name_are_the_default_strategys(resolve: Load) -> None:
    """A later layer that names another strategy drops them like any others."""
    settings = resolve("[admit]\nevery_steps = 4", overrides=["admit=windowed"])
    assert settings.choices["admit"].offer.name == "windowed"
    assert len(settings.notes) == 1
    assert "admit.every_steps=4" in settings.notes[0]


class Nested(StrategySettings):
    """With a table within the table."""

    weights: dict[str, float] = pydantic.Field(default_factory=dict)


class Weighted:
    Settings = Nested

    def __init__(self, settings: Nested) -> None:
        pass


def test_tables_within_a_strategys_table_are_dropped_too(resolve: Load, registry: Registry) -> None:
    offered = registry.with_offers([Offer("order", "weighted", "test 1.0", lambda: Weighted)])
    file = '[order]\nstrategy = "weighted"\n[order.weights]\na = 1.0\nb = 2.0'
    assert resolve(file, registry=offered).choices["order"].settings == Nested(weights={"a": 1.0, "b": 2.0})
    settings = resolve(file, overrides=["order=fcfs"], registry=offered)
    assert settings.choices["order"].offer.name == "fcfs"
    assert "weights" in settings.notes[0]


# --- frozen ---------------------------------------------------------------------------------------------------------------------


def test_settings_are_frozen_once_resolved(resolve: Load) -> None:
    settings = resolve()
    with pytest.raises(pydantic.ValidationError):
        settings.root.model = "another"  # type: ignore[misc]  # that is the point
    with pytest.raises(pydantic.ValidationError):
        settings.root.pool.num_blocks = 3  # type: ignore[misc]  # as above
    with pytest.raises(pydantic.ValidationError):
        _admit(settings).max_batch_size = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.notes = ("note",)  # type: ignore[misc]  # as above
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.choices["admit"].origin = "elsewhere"  # type: ignore[misc]  # as above


# --- errors ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        # unknown names, each from a file, a variable and an override
        ({"text": "[admitt]\nx = 1"}, ["unknown setting admitt", "treadle.toml", "did you mean 'admit'?"]),
        ({"env": {"TREADLE_ADMITT__X": "1"}}, ["TREADLE_ADMITT__X", "did you mean 'TREADLE_ADMIT'?"]),
        ({"overrides": ["admitt.x=1"]}, ["unknown setting admitt", "--set admitt.x=1", "did you mean 'admit'?"]),
        ({"text": 'admit = "windowd"'}, ["'windowd'", "slot 'admit'", "treadle.toml", "did you mean 'windowed'?"]),
        ({"env": {"TREADLE_ADMIT": "windowd"}}, ["'windowd'", "TREADLE_ADMIT", "did you mean 'windowed'?"]),
        ({"overrides": ["admit=windowd"]}, ["'windowd'", "--set admit=windowd", "did you mean 'windowed'?"]),
        ({"overrides": ["admit=xyz"]}, ["'xyz'", "known: continuous, static, windowed"]),
        ({"text": "[admit]\nmax_batchsize = 1"}, ["admit.max_batchsize", "treadle.toml", "'max_batch_size'?"]),
        (
            {"env": {"TREADLE_ADMIT__MAX_BATCHSIZE": "1"}},
            ["admit.max_batchsize", "TREADLE_ADMIT__MAX_BATCHSIZE", "'max_batch_size'?"],
        ),
        ({"overrides": ["admit.max_batchsize=1"]}, ["admit.max_batchsize", "--set admit.max_batchsize=1", "'max_batch_size'?"]),
        ({"text": "[pool]\nnum_block = 1"}, ["pool.num_block", "treadle.toml", "did you mean 'num_blocks'?"]),
        ({"text": "modle = 'x'"}, ["unknown setting modle", "treadle.toml", "did you mean 'model'?"]),
        # wrong values
        ({"text": "[admit]\nevery_steps = 0"}, ["admit.every_steps=0", "treadle.toml", "greater than or equal to 1"]),
        (
            {"env": {"TREADLE_ADMIT__EVERY_STEPS": "often"}},
            ["admit.every_steps='often'", "TREADLE_ADMIT__EVERY_STEPS", "integer"],
        ),
        ({"overrides": ["allocate.block_size=17000"]}, ["allocate.block_size='17000'", "--set allocate", "512"]),
        ({"overrides": ["pool.memory=lots"]}, ["pool.memory='lots'", "--set pool.memory=lots"]),
        ({"text": "admit = 3"}, ["admit=3", "treadle.toml", "strategy's name"]),
        ({"text": "[admit]\nstrategy = 3"}, ["admit.strategy=3", "treadle.toml", "windowed"]),
        ({"text": "pool = 3"}, ["pool=3", "treadle.toml"]),
        ({"text": "[order]\nlevel_s = 3"}, ["order.fcfs", "level_s", "takes no settings"]),
        # what cannot be read
        ({"text": "seed = 1\nadmit = ]"}, ["treadle.toml", "not valid TOML", "line 2"]),
        ({"overrides": ["admit"]}, ["'admit'", "name=value"]),
        ({"overrides": ["=3"]}, ["'=3'", "name=value"]),
        ({"overrides": ["admit..x=3"]}, ["'admit..x=3'", "name=value"]),
        ({"overrides": ["plugins=[a"]}, ["'[a'", "TOML", "--set plugins=[a"]),
        ({"env": {"TREADLE_PLUGINS": "[a"}}, ["TREADLE_PLUGINS", "[a"]),
        ({"env": {"TREADLE_PLUGINS": "tenants"}}, ["TREADLE_PLUGINS", "tenants"]),
        ({"env": {"TREADLE_POOL": "lots"}}, ["TREADLE_POOL", "lots"]),
        ({"env": {"TREADLE_MODEL__NAME": "x"}}, ["TREADLE_MODEL__NAME"]),
        ({"env": {"TREADLE_ADMIT__": "x"}}, ["TREADLE_ADMIT__"]),
        # plugins
        ({"text": 'plugins = ["tenants"]'}, ["unknown plugin 'tenants'", "treadle.toml"]),
        ({"text": "[plugin.tenants]\nmost = 3"}, ["plugin.tenants", "not in `plugins`"]),
        ({"text": 'blocked = ["admit.continuous"]'}, ["admit.continuous", "blocked", "choose another for 'admit'"]),
    ],
    ids=str,
)
def test_an_error_says_what_where_and_what_would_work(given: dict[str, Any], parts: list[str], resolve: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(**given)
    for part in parts:
        assert part in str(raised.value)
    assert "\n" not in str(raised.value).strip() or "TOML" in str(raised.value)


def test_every_wrong_value_is_named_at_once(resolve: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve("[admit]\nevery_steps = 0\nmax_inserts = -1\nnear_and = 3")
    for part in ("admit.every_steps=0", "admit.max_inserts=-1", "admit.near_and"):
        assert part in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*missing\.toml.*treadle config init"):
        load(tmp_path / "missing.toml", registry=registry)


def test_a_folder_is_no_file(tmp_path: Path, registry: Registry) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load(tmp_path, registry=registry)


def test_a_file_in_another_encoding(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes("model = 'caf\u00e9'".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.toml is not valid TOML"):
        load(path, registry=registry)


def test_everything_that_is_wrong_anywhere_is_told_at_once(resolve: Load) -> None:
    file = """
modle = "x"
order = 3
plugins = ["tenants"]
[pool]
num_blocks = 0
[evict]
strateg = "lfu"
[budget]
strategy = "decode_frist"
[plugin.others]
x = 1
"""
    with pytest.raises(ConfigError) as raised:
        resolve(file, {"TREADLE_ADMITT": "static", "TREADLE_ACCEPT": "[a"}, ["release", "admit.every_steps=0"])
    for part in (
        "modle (from", "order=3 (from", "unknown plugin 'tenants'", "pool.num_blocks=0 (from", "evict.strateg (from",
        "'decode_frist'", "[plugin.others] (from", "TREADLE_ADMITT", "'[a' (from environment variable TREADLE_ACCEPT)",
        "--set 'release'", "admit.every_steps='0' (from --set admit.every_steps=0)",
    ):  # fmt: skip
        assert sum(part in problem for problem in raised.value.problems) == 1, part
    assert len(raised.value.problems) == 11
    assert str(raised.value) == "; ".join(raised.value.problems)


@pytest.mark.parametrize("slot", ["evict", "admit"])
def test_a_misspelt_strategy_has_its_origin_and_a_suggestion(slot: str, resolve: Load) -> None:
    """Whether or not the default strategy takes settings."""
    with pytest.raises(ConfigError) as raised:
        resolve(overrides=[f"{slot}.strateg=fifo"])
    assert f"unknown setting {slot}.strateg (from --set {slot}.strateg=fifo)" in str(raised.value)
    assert str(raised.value).endswith("did you mean 'strategy'?")


def test_the_order_of_variables_means_nothing(resolve: Load) -> None:
    """They are one layer, so a strategy's settings may sort before its name."""
    settings = resolve(env={"TREADLE_ADMIT__STRATEGY": "windowed", "TREADLE_ADMIT__MAX_BATCH_SIZE": "3"})
    assert _admit(settings).max_batch_size == 3
    assert settings.choices["admit"].origins == {"max_batch_size": "environment variable TREADLE_ADMIT__MAX_BATCH_SIZE"}
    assert settings.choices["admit"].origin == "environment variable TREADLE_ADMIT__STRATEGY"


def test_lists_and_tables_in_variables_are_toml(resolve: Load) -> None:
    env = {"TREADLE_ORDER": '{strategy = "length_bucket", min_batch = 2}', "TREADLE_ORDER__LIMITS": "[16, 32]"}
    choice = resolve(env=env).choices["order"]
    assert (choice.settings.min_batch, choice.settings.limits) == (2, (16, 32))  # type: ignore[union-attr]  # length_bucket's
    assert choice.origins == {
        name: f"environment variable TREADLE_ORDER{more}" for name, more in (("min_batch", ""), ("limits", "__LIMITS"))
    }


def test_a_value_over_a_table_takes_its_origins_along(resolve: Load) -> None:
    with pytest.raises(ConfigError, match=r"pool='lots' \(from --set pool=lots\)"):
        resolve("[pool]\nnum_blocks = 3", overrides=["pool=lots"])


def test_a_file_may_be_a_pipe(tmp_path: Path, registry: Registry) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("seed = 5",))
    writer.start()
    assert load(path, environment=False, registry=registry).root.seed == 5
    writer.join()


# --- slots of an executor -------------------------------------------------------------------------------------------------------


class Loom:
    """An executor with a slot of its own."""

    slots = (Slot("shuttle", ("throw",), "plain"),)


class Shuttle:
    Settings = Nested

    def __init__(self, settings: Nested) -> None:
        pass


@pytest.fixture
def looms(registry: Registry) -> Registry:
    offers = [
        Offer("execute", "loom", "test 1.0", lambda: Loom),
        Offer("shuttle", "plain", "test 1.0", lambda: Shuttle),
        Offer("shuttle", "fly", "test 1.0", lambda: Shuttle),
    ]
    return registry.with_offers(offers)


def test_an_executor_brings_slots(looms: Registry, resolve: Load) -> None:
    env = {"TREADLE_SHUTTLE__WEIGHTS__A": "2"}
    settings = resolve("[shuttle]\nstrategy = 'fly'", env, ["execute=loom"], registry=looms)
    assert [slot.name for slot in settings.slots][-2:] == ["shuttle", "execute"]
    assert settings.choices["shuttle"].offer.name == "fly"
    assert settings.choices["shuttle"].settings == Nested(weights={"a": 2.0})
    assert resolve(overrides=["execute=loom"], environment=False, registry=looms).choices["shuttle"].offer.name == "plain"


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ({"text": "[shuttle]\nstrategy = 'fly'"}, r"\[shuttle\] \(from .*treadle\.toml\)"),
        ({"env": {"TREADLE_SHUTTLE": "fly"}}, "environment variable TREADLE_SHUTTLE"),
        ({"values": {"shuttle": "fly"}}, r"\[shuttle\] \(from arguments\)"),
        ({"overrides": ["shuttle.strategy=fly"]}, r"\[shuttle\] \(from --set shuttle\.strategy=fly\)"),
    ],
)
def test_a_slot_of_an_executor_that_is_not_chosen_is_noted(
    given: dict[str, Any], origin: str, looms: Registry, resolve: Load
) -> None:
    settings = resolve(registry=looms, **given)
    assert "shuttle" not in settings.choices
    (note,) = settings.notes
    assert re.fullmatch(f"{origin} is not used: execute.loom has that slot, execute.simulated has not", note)


def test_attention_is_a_slot_of_the_torch_executor(resolve: Load) -> None:
    assert resolve(overrides=["execute=torch", "attention=numba"]).choices["attention"].offer.name == "numba"
    assert "attention" not in resolve().choices


def test_an_unknown_executor_is_the_only_error(looms: Registry, resolve: Load) -> None:
    """Which slots it would have brought is not known."""
    with pytest.raises(ConfigError) as raised:
        resolve("[shuttle]\nstrategy = 'fly'", {"TREADLE_ATTENTION": "numba"}, ["execute=lom"], registry=looms)
    assert raised.value.problems == ("unknown strategy 'lom' for slot 'execute' (from --set execute=lom); did you mean 'loom'?",)


@pytest.mark.parametrize(
    ("slots", "part"),
    [
        ([Slot("shuttle", ("throw",), "plain")], "not a tuple of treadle.registry.Slot"),
        (("shuttle",), "not a tuple of treadle.registry.Slot"),
        ((Slot("admit", ("throw",), "plain"),), "'admit', a name that is taken"),
        ((Slot("plugin", ("throw",), "plain"),), "'plugin', a name that is taken"),
        ((Slot("pool", ("throw",), "plain"),), "'pool', a name that is taken"),
        ((Slot("shut-tle", ("throw",), "plain"),), "cannot be used"),
        ((Slot("shuttle", ("throw",), "plain"),) * 2, "a name that is taken"),
    ],
)
def test_an_executors_slots_are_checked(slots: Any, part: str, registry: Registry, resolve: Load) -> None:
    odd = type("Odd", (), {"slots": slots})
    with pytest.raises(ConfigError, match=r"execute\.odd") as raised:
        resolve(overrides=["execute=odd"], registry=registry.with_offers([Offer("execute", "odd", "test 1.0", lambda: odd)]))
    assert part in str(raised.value)


# --- strategies by their path ---------------------------------------------------------------------------------------------------


def test_a_strategy_may_be_named_by_its_module(resolve: Load) -> None:
    path = "treadle_plugins.admit.windowed:Windowed"
    settings = resolve(f"[admit]\nstrategy = '{path}'\nwindow_ms = 3")
    assert settings.choices["admit"].offer.label == f"admit.{path}"
    assert settings.choices["admit"].factory.__qualname__ == "Windowed"
    assert _admit(settings).window_ms == 3
    assert resolve(env={"TREADLE_ADMIT": path}).choices["admit"].offer.package == "module treadle_plugins.admit.windowed"


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("no_such_module:Mine", ["'no_such_module'", "PYTHONPATH", "--set admit="]),
        ("treadle_plugins.admit.windowed:Windwed", ["has no 'Windwed'", "did you mean 'Windowed'?"]),
    ],
)
def test_a_path_that_leads_nowhere(path: str, parts: list[str], resolve: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(overrides=[f"admit={path}"])
    for part in parts:
        assert part in str(raised.value)


# --- checks of strategies -------------------------------------------------------------------------------------------------------


def _checked(registry: Registry, check: Callable[[Any, Settings], None]) -> Registry:
    strategy = type("Checked", (), {"check_configuration": staticmethod(check)})
    return registry.with_offers([Offer("release", "checked", "test 1.0", lambda: strategy)])


def test_a_strategy_sees_the_whole_configuration_and_may_refuse_it(registry: Registry, resolve: Load) -> None:
    def check(own: object, settings: Settings) -> None:
        assert own is None
        if settings.choices["admit"].offer.name == "static" and settings.root.seed == 3:
            raise ConfigError("seed 3 is unlucky")

    offered = _checked(registry, check)
    resolve(overrides=["release=checked", "seed=3"], registry=offered)
    resolve(overrides=["admit=static", "seed=3"], registry=offered)
    with pytest.raises(ConfigError) as raised:
        resolve(overrides=["release=checked", "seed=3", "admit=static", "order=fcsf"], registry=offered)
    assert raised.value.problems[1:] == ("seed 3 is unlucky",)
    assert "did you mean 'fcfs'" in raised.value.problems[0]


def test_a_check_that_needs_what_is_wrong_itself_says_nothing(registry: Registry, resolve: Load) -> None:
    def check(own: object, settings: Settings) -> None:
        raise ConfigError(f"{settings.choices['order'].offer.label} and {settings.root.pool.num_blocks} are bad")

    offered = _checked(registry, check)
    for wrong in ("order=fcsf", "pool.num_blocks=0"):
        with pytest.raises(ConfigError) as raised:
            resolve(overrides=["release=checked", wrong], registry=offered)
        assert len(raised.value.problems) == 1
        assert "are bad" not in str(raised.value)


def test_a_check_that_fails_is_named(registry: Registry, resolve: Load) -> None:
    offered = _checked(registry, lambda own, settings: 1 / 0)  # type: ignore[arg-type,return-value]  # never returns
    with pytest.raises(ConfigError, match=r"release\.checked failed in its check: ZeroDivisionError"):
        resolve(overrides=["release=checked"], registry=offered)


def test_swap_without_swap_memory_is_refused_with_both_origins(resolve: Load) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve('preempt = "swap"', {"TREADLE_POOL__SWAP_MEMORY": "0"})
    for part in ("preempt.strategy='swap' (from", "treadle.toml", "(from environment variable TREADLE_POOL__SWAP_MEMORY)"):
        assert part in str(raised.value)
    resolve('preempt = "swap"', overrides=["pool.swap_memory=1MiB"], environment=False)
