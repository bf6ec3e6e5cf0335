"""The group: lazy commands, common options, errors; and the commands that only look."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from treadle.cli import COMMAND_GROUPS, FROM_PLUGINS, OTHERS, OWN_PACKAGE, Common, cli
from treadle.errors import ConfigError
from treadle.registry import Offer, Registry

HERE = Path(__file__).parent
LIGHT = ["--set", "execute=simulated"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but those of the test."""
    monkeypatch.syspath_prepend(HERE / "cli_plugins")
    for name in ("TREADLE_CONFIG", "TREADLE_ADMIT", "TREADLE_ADMIT__MAX_BATCH_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(*args: str, common: Common | None = None) -> Result:
    return CliRunner().invoke(cli, list(args), obj=common)


def with_offers(*offers: Offer) -> Common:
    common = Common()
    common.__dict__["registry"] = Registry([*Registry.installed(), *offers])
    return common


def python(program: str) -> None:
    """Run a program in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)  # noqa: S603  # our own
    assert done.returncode == 0, done.stderr


def broken() -> Any:
    raise ConfigError("command.broken of loom 1.0 needs the module 'shuttle', which is not installed")


# --- the group ------------------------------------------------------------------------------------------------------------


def test_help_imports_nothing_slow() -> None:
    program = """
import sys
from click.testing import CliRunner
from treadle.cli import cli
result = CliRunner().invoke(cli, ["--help"])
assert result.exit_code == 0 and "generate" in result.output, result.output
slow = {"torch", "numpy", "pydantic", "pydantic_settings", "structlog", "transformers", "pluggy"} & set(sys.modules)
assert not slow, slow
"""
    python(program)


def test_help_reads_what_commands_say_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loom_slow.py").write_text('import click\n1 / 0\n@click.command()\ndef go():\n    """Go slowly.\n\n    Yes."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    shown = run("--help", common=with_offers(Offer("command", "go", "loom 1.0", broken, "loom_slow:go")))
    assert re.search(r"go +Go slowly\.\n", shown.output)
    assert "loom_slow" not in sys.modules


def test_help_groups_commands_and_puts_those_of_strangers_last() -> None:
    offers = (
        Offer("command", "hello", "loom 1.0", broken),
        Offer("command", "explain-more", "treadle-extras 2.0", broken),
        Offer("command", "new", f"{OWN_PACKAGE} 1.0", broken),
    )
    shown = run("--help", common=with_offers(*offers)).output
    titles = re.findall(r"^([A-Z][\w ]*):$", shown, re.MULTILINE)
    assert titles == ["Options", *COMMAND_GROUPS, OTHERS, FROM_PLUGINS]
    sections = dict(zip(titles, re.split(r"^[A-Z][\w ]*:$", shown, flags=re.MULTILINE)[1:], strict=True))
    listed = {title: tuple(re.findall(r"^  ([\w-]+) ", sections[title], re.MULTILINE)) for title in titles[1:]}
    assert listed == {**COMMAND_GROUPS, OTHERS: ("new",), FROM_PLUGINS: ("explain-more", "hello")}


def test_every_command_of_ours_has_a_group() -> None:
    own = {offer.name for offer in Registry.installed() if offer.kind == "command" and offer.package.split()[0] == OWN_PACKAGE}
    assert own == {name for names in COMMAND_GROUPS.values() for name in names}


def test_a_command_is_imported_without_the_others() -> None:
    program = """
import sys
from click.testing import CliRunner
from treadle.cli import cli
assert CliRunner().invoke(cli, ["plugins"]).exit_code == 0
assert "treadle.commands.plugins" in sys.modules
assert "treadle_plugins.commands.generate" not in sys.modules
"""
    python(program)


def test_version() -> None:
    assert run("--version").output.startswith(("treadle ", "cli "))


def test_an_unknown_command_names_the_nearest() -> None:
    result = run("generat")
    assert result.exit_code == 2
    assert "no command 'generat'; did you mean 'generate'?" in result.stderr


def test_a_command_of_a_package_runs_and_is_listed() -> None:
    @click.command()
    def hello() -> None:
        """Say hello."""
        click.echo("hello")

    common = with_offers(Offer("command", "hello", "loom 1.0", lambda: hello))
    assert "Say hello." in run("--help", common=common).output
    assert run("hello", common=common).output == "hello\n"


def test_a_broken_command_is_listed_with_its_reason_and_hurts_no_other() -> None:
    common = with_offers(Offer("command", "broken", "loom 1.0", broken))
    shown = run("--help", common=common)
    assert shown.exit_code == 0
    assert "cannot be loaded" in shown.output
    assert "generate" in shown.output
    result = run("broken", common=common)
    assert result.exit_code == 2
    assert result.stderr == "error: command.broken of loom 1.0 needs the module 'shuttle', which is not installed\n"


def test_what_is_no_command_is_refused() -> None:
    result = run("odd", common=with_offers(Offer("command", "odd", "loom 1.0", lambda: 3)))
    assert result.exit_code == 2
    assert "command.odd of loom 1.0 is a int, not a click.Command" in result.stderr


def test_two_packages_with_one_command_are_both_named() -> None:
    common = with_offers(Offer("command", "plugins", "loom 1.0", broken, "loom:plugins"))
    result = run("plugins", common=common)
    assert result.exit_code == 2
    assert "loom 1.0 (loom:plugins) and treadle" in result.stderr


def test_help_reads_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text("modle = 3\n")
    result = run("--config", str(path), "--help")
    assert result.exit_code == 0
    assert "generate" in result.output
    assert "modle" not in result.output


# --- common options and errors --------------------------------------------------------------------------------------------


def origins(result: Result) -> dict[str, str]:
    assert result.exit_code == 0, result.stderr
    (admit,) = [slot for slot in json.loads(result.stdout)["slots"] if slot["slot"] == "admit"]
    return {row["name"]: row["origin"] for row in admit["settings"]} | {"strategy": admit["origin"]}


def test_common_options_count_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[admit]\nstrategy = "static"\n')
    before = run("--config", str(path), "--set", "admit.batch_size=3", *LIGHT, "explain", "--json")
    behind = run("explain", "--json", "--config", str(path), "--set", "admit.batch_size=3", *LIGHT)
    assert origins(before) == origins(behind)
    assert origins(before)["batch_size"] == "--set admit.batch_size=3"
    assert origins(before)["strategy"] == str(path)


def test_errors_are_a_line_and_tracebacks_are_for_debug() -> None:
    plain = run("explain", "--set", "admit.strategy=windwed")
    assert plain.exit_code == 2
    assert plain.stderr.startswith("error: unknown strategy 'windwed' for slot 'admit'")
    assert plain.stderr.count("\n") == 1
    loud = run("explain", "--set", "admit.strategy=windwed", "--log-level", "debug")
    assert loud.exit_code == 2
    assert "Traceback" in loud.stderr
    assert loud.stderr.splitlines()[-1] == plain.stderr.strip()


def test_an_unexpected_error_says_how_to_see_more() -> None:
    @click.command()
    def fall() -> None:
        raise ValueError("a thread broke")

    result = run("fall", common=with_offers(Offer("command", "fall", "loom 1.0", lambda: fall)))
    assert result.exit_code == 1
    assert result.stderr == "error: ValueError: a thread broke (unexpected; --log-level debug shows where)\n"


def test_ctrl_c_in_any_command_is_130_without_a_traceback() -> None:
    @click.command()
    def wait() -> None:
        raise KeyboardInterrupt

    result = run("wait", common=with_offers(Offer("command", "wait", "loom 1.0", lambda: wait)))
    assert result.exit_code == 130
    assert "Traceback" not in result.output


# --- explain --------------------------------------------------------------------------------------------------------------


def test_explain_shows_each_settings_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('execute = "simulated"\n[admit]\nevery_steps = 2\nmax_batch_size = 8\n')
    monkeypatch.setenv("TREADLE_ADMIT__MAX_BATCH_SIZE", "9")
    result = run("explain", "--json", "--config", str(path), "--set", "admit.max_inserts=1")
    assert origins(result) == {
        "strategy": "default",
        "every_steps": str(path),
        "max_batch_size": "environment variable TREADLE_ADMIT__MAX_BATCH_SIZE",
        "max_inserts": "--set admit.max_inserts=1",
        "near_end_tokens": "default",
        "spare_blocks": "default",
    }


def test_explain_shows_plugins_hooks_in_call_order_and_notes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'execute = "simulated"\nplugins = ["cli_fakes:Careful", "cli_fakes:Chatless"]\nblocked = ["cli_fakes:Chatless"]\n'
        '[admit]\nstrategy = "continuous"\nevery_steps = 2\n'
    )
    args = ("explain", "--config", str(path), "--set", "admit.strategy=static")
    facts = json.loads(run(*args, "--json").stdout)
    hooks = {hook["hook"]: hook["implementations"] for hook in facts["hooks"]}
    assert hooks["admit"][0] == {"plugin": "plugin.cli_fakes:Careful", "package": "module cli_fakes", "wrapper": True}
    assert hooks["gate"][0]["plugin"] == "admit.static"
    assert [plugin["strategy"] for plugin in facts["plugins"]] == ["cli_fakes:Careful"]
    notes = "\n".join(facts["notes"])
    assert "admit.every_steps=2" in notes
    assert "cli_fakes:Chatless is blocked" in notes
    text = run(*args).stdout
    for part in ("admit = static", "cli_fakes:Careful (wrapper) [module cli_fakes]", "num_blocks", *facts["notes"]):
        assert part in text


# --- plugins --------------------------------------------------------------------------------------------------------------


def test_plugins_lists_offers_without_importing_them() -> None:
    common = with_offers(
        Offer("admit", "mine", "loom 1.0", broken, "loom:Mine"),
        Offer("admitt", "typo", "loom 1.0", broken, "loom:Typo"),
        Offer("plugin", "watch", "loom 1.0", broken, "loom:Watch"),
        Offer("plugin", "watch", "warp 2.0", broken, "warp:Watch"),
    )
    offers = json.loads(run("plugins", "--json", common=common).stdout)
    by_name = {(offer["kind"], offer["name"]): offer for offer in offers}
    assert by_name["admit", "mine"]["source"] == "loom:Mine"
    assert by_name["admit", "mine"]["problem"] is None
    assert by_name["admit", "continuous"]["default"] is True
    assert "did you mean 'admit'?" in by_name["admitt", "typo"]["problem"]
    assert by_name["plugin", "watch"]["problem"] == "unusable: offered more than once"
    assert by_name["command", "generate"]["source"] == "treadle_plugins.commands.generate:generate"
    text = run("plugins", common=common).stdout
    for part in ("* continuous", "loom:Mine", "offered more than once", "did you mean 'admit'?"):
        assert part in text
