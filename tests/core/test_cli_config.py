"""`treadle config`: the starter file, checks, the schema."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pydantic import ByteSize

from treadle.cli import Common, cli
from treadle.commands.starter import toml
from treadle.errors import ConfigError
from treadle.registry import Offer, Registry
from treadle.settings import Settings, load


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "cli_plugins")
    monkeypatch.delenv("TREADLE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def run(*args: str, common: Common | None = None) -> Result:
    return CliRunner().invoke(cli, list(args), obj=common)


def values(settings: Settings) -> dict[str, object]:
    chosen: dict[str, object] = {slot: (c.offer.label, c.settings) for slot, c in settings.choices.items()}
    return chosen | {"root": settings.root.model_dump(), "plugins": settings.plugins}


# --- init -----------------------------------------------------------------------------------------------------------------


def test_the_starter_passes_its_check_and_is_the_defaults() -> None:
    assert run("config", "init").output == "wrote treadle.toml; use it with --config treadle.toml\n"
    checked = run("config", "check")
    assert checked.exit_code == 0, checked.stderr
    assert checked.output == "ok: treadle.toml (no model was loaded)\n"
    assert values(load("treadle.toml")) == values(load())


def test_its_commented_settings_are_the_defaults_too(tmp_path: Path) -> None:
    text = run("config", "init", "-").output
    live = re.sub(r"(?m)^#(?=\w)", "", text)
    assert live != text
    assert "max_batch_size = 32\n" in live
    assert 'memory = "1GiB"\n' in live
    path = tmp_path / "live.toml"
    path.write_text(live)
    assert values(load(path)) == values(load())


def test_every_setting_is_in_the_starter_with_its_docstring() -> None:
    text = run("config", "init", "-").output
    for slot, choice in load().choices.items():
        section = text.split(f"\n[{slot}]\n")[1].split("\n[")[0]
        assert f'strategy = "{choice.offer.name}"' in section
        for name, field in type(choice.settings).model_fields.items() if choice.settings else ():
            assert re.search(rf"(?m)^# ?{name} = ", section), f"{slot}.{name}"
            assert field.description
            assert f"# {field.description.splitlines()[0]}" in section


def test_init_does_not_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("seed = 1\n")
    result = run("config", "init", str(path))
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert path.read_text() == "seed = 1\n"
    assert run("config", "init", str(path), "--force").exit_code == 0
    assert "[admit]" in path.read_text()
    assert run("config", "init", str(tmp_path / "no" / "folder.toml")).exit_code == 2


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (True, "true"),
        (1.5, "1.5"),
        (float("inf"), "inf"),
        ('a\n"b"', '"a\\n\\"b\\""'),
        (("a", 1), '["a", 1]'),
        ({"a": [1]}, '{"a" = [1]}'),
        (ByteSize(3 << 20), '"3MiB"'),
        (ByteSize(1500), "1500"),
    ],
)
def test_values_as_toml(value: object, written: str) -> None:
    assert toml(value) == written


# --- check ----------------------------------------------------------------------------------------------------------------


def test_check_says_every_error(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('modle = "x"\n[admit]\nstrategy = "windwed"\n[budget]\nmax_tokns = 3\n[pool]\nnum_blocks = 0\n')
    result = run("config", "check", str(path))
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    for part in ("did you mean 'model'?", "did you mean 'windowed'?", "did you mean 'max_tokens'?", "pool.num_blocks=0"):
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert all(line.startswith("error: ") and str(path) in line for line in lines)


def test_check_builds_the_plugins(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('[allocate]\nstrategy = "contiguous"\n[prefix]\nstrategy = "radix"\n')
    result = run("config", "check", str(path))
    assert result.exit_code == 2
    assert "does not go together" in result.stderr
    path.write_text('plugins = ["cli_fakes:Nothing"]\nadmit = "windwed"\n')
    result = run("config", "check", str(path))
    assert len(result.stderr.splitlines()) == 2
    assert "has no 'Nothing'" in result.stderr
    assert "windwed" in result.stderr


def test_check_refuses_what_a_run_would_refuse(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(
        'order = 3\npreempt = "swap"\nplugins = ["portrait"]\n'
        '[evict]\nstrateg = "lru"\n[plugin.portrait]\npath = "none/p.jsonl"\n'
        '[quantize]\nstrategy = "int8"\ngranularity = "head_channel"\n'
    )
    result = run("config", "check", str(path))
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    for part in ("order=3", "pool.swap_memory=0", "evict.strateg", "no folder 'none'", "needs static scales"):
        assert sum(part in line for line in lines) == 1, (part, lines)
    assert all(line.startswith("error: ") for line in lines)
    assert len(lines) == 5
    assert run("explain", "--config", str(path)).stderr.splitlines() == lines


def test_check_tells_notes_and_takes_shorthand(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('admit = "windowed"\nplugins = ["cli_fakes:Careful"]\nblocked = ["cli_fakes:Careful"]\n')
    result = run("config", "check", "--config", str(path))
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "note: plugin cli_fakes:Careful is blocked",
        f"ok: {path} (no model was loaded)",
    ]


def test_check_of_what_is_no_file_or_no_toml(tmp_path: Path) -> None:
    assert "no configuration file 'treadle.toml'" in run("config", "check").stderr
    path = tmp_path / "mine.toml"
    path.write_text("[admit\n")
    result = run("config", "check", str(path))
    assert result.exit_code == 2
    assert "line 1" in result.stderr


# --- schema ---------------------------------------------------------------------------------------------------------------


def test_the_schema_holds_every_installed_strategy() -> None:
    schema = json.loads(run("config", "schema").stdout)
    slots = {slot.name for slot in Registry.installed().slots()}
    assert {"model", "pool", "plugins", "attention", *slots} <= set(schema["properties"])
    for offer in Registry.installed():
        if offer.kind not in slots:
            continue
        options = schema["properties"][offer.kind]["oneOf"]
        assert offer.name in options[0]["enum"]
        assert {"$ref": f"#/$defs/{offer.label}"} in options
        table = schema["$defs"][offer.label]
        assert table["properties"]["strategy"] == {"const": offer.name}
        assert table["additionalProperties"] is False
    assert "strategy" in schema["$defs"]["admit.windowed"]["required"]
    assert "required" not in schema["$defs"]["admit.continuous"]
    assert schema["$defs"]["admit.windowed"]["properties"]["window_ms"]["description"]
    references = re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(schema))
    assert references
    for reference in references:
        target = schema
        for key in reference.split("/"):
            target = target[key]


def test_a_strategy_that_cannot_be_imported_is_open_and_told() -> None:
    def missing() -> object:
        raise ConfigError("admit.mine of loom 1.0 needs the module 'shuttle', which is not installed")

    common = Common()
    common.__dict__["registry"] = Registry([*Registry.installed(), Offer("admit", "mine", "loom 1.0", missing)])
    result = run("config", "schema", common=common)
    assert result.exit_code == 0
    assert "warning: admit.mine of loom 1.0 needs the module 'shuttle'" in result.stderr
    schema = json.loads(result.stdout)
    assert schema["$defs"]["admit.mine"]["properties"]["strategy"] == {"const": "mine"}
    assert "additionalProperties" not in schema["$defs"]["admit.mine"]
