"""The command line: options that every command takes, and commands that packages bring.

An entry point `command.NAME` of the group `treadle` names a `click.Command`, whose module is imported when the command is used. A
command decorated with `common_options` takes the options of the group behind its name as well; `click.pass_obj` hands it a
`Common`, from which it gets the settings.
"""

from __future__ import annotations

import ast
import errno
import importlib.util
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from treadle.errors import ConfigError, TreadleError, nearest

if TYPE_CHECKING:
    from treadle.plugin_manager import PluginManager
    from treadle.registry import Offer, Registry
    from treadle.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
OWN_PACKAGE = "treadle"
COMMAND_GROUPS = {
    "Run": ("generate",),
    "Inspect": ("blocks", "explain", "hooks", "plugins", "portrait"),
    "Configure": ("calibrate", "config"),
    "Measure": ("bench-baseline", "bench-core", "bench-speed", "codec-table"),
}
"""Titles of `treadle --help`, in order, and which of our own commands stand under them."""
OTHERS, FROM_PLUGINS = "Other", "From plugins"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@dataclass
class Common:
    """What the options that every command takes say, and what follows from them."""

    config: str | None = None
    overrides: list[str] = field(default_factory=list)
    log_level: str | None = None
    log_json: bool = False
    debug: bool = False
    """Whether errors come with a traceback."""

    @cached_property
    def registry(self) -> Registry:
        """All that installed packages offer."""
        from treadle.registry import Registry

        return Registry.installed()

    @property
    def all_overrides(self) -> list[str]:
        """Values of `--set`, and that of `--log-level` behind them."""
        return self.overrides + ([f"log_level={self.log_level}"] if self.log_level else [])

    @property
    def path(self) -> str | None:
        """The configuration file, if one is named by `--config` or the environment."""
        return self.config or os.environ.get("TREADLE_CONFIG")

    def settings(self) -> Settings:
        """Resolve the configuration and set up logs. Raises ConfigError."""
        from treadle import logs
        from treadle.settings import load

        settings = load(self.path, self.all_overrides, registry=self.registry)
        logs.configure(settings.root.log_level, self.log_json)
        self.debug = settings.root.log_level == "debug"
        return settings

    def manager(self) -> PluginManager:
        """Build the plugin stack of the configuration; no model is loaded. Raises ConfigError."""
        from treadle.plugin_manager import PluginManager

        return PluginManager(self.settings())


def common_options(command: F) -> F:
    """Add the options that every command takes; they count before and behind the command's name alike."""
    for option in reversed(_COMMON_OPTIONS):
        command = option(command)
    return command


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Note the value of a common option, wherever on the line it stands; later ones win, `--set` adds up."""
    common = context.ensure_object(Common)
    if parameter.name == "overrides":
        common.overrides.extend(value or ())
    elif value:
        assert parameter.name is not None
        setattr(common, parameter.name, value)
    common.debug = common.log_level == "debug"


def _common_option(*names: str, **attributes: Any) -> Callable[[F], F]:
    # eager, so that they count whatever stands in front of them
    return click.option(*names, callback=_keep, expose_value=False, is_eager=True, **attributes)


_COMMON_OPTIONS = (
    _common_option(
        "--config", metavar="FILE", type=click.Path(dir_okay=False), help="Configuration file; TREADLE_CONFIG names one too."
    ),
    _common_option(
        "--set", "overrides", metavar="NAME=VALUE", multiple=True, help="Override a setting, such as admit.max_batch_size=24."
    ),
    _common_option("--log-level", type=click.Choice(LOG_LEVELS), help="What is logged; debug shows tracebacks of errors too."),
    _common_option("--log-json", is_flag=True, help="Log one JSON object a line."),
)


class Failure(click.ClickException):
    """An error as a user sees it, on one line unless tracebacks are wanted."""

    exit_code = 1

    def __init__(self, error: Exception, debug: bool = False) -> None:
        kind = "" if isinstance(error, TreadleError) else f"{type(error).__name__}: "
        hint = "" if debug or isinstance(error, TreadleError) else " (unexpected; --log-level debug shows where)"
        super().__init__(f"{kind}{error}{hint}")
        self.error = error
        self.debug = debug

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it on standard error."""
        if self.debug:
            click.echo("".join(traceback.format_exception(self.error)), file=file, err=True, nl=False)
        problems = self.error.problems if isinstance(self.error, ConfigError) else (self.message,)
        for problem in problems:
            click.echo(f"error: {problem}", file=file, err=True)


class ConfigFailure(Failure):
    """What has to be changed in the configuration or on the command line."""

    exit_code = 2


@contextmanager
def _as_failures(common: Common) -> Iterator[None]:
    """Turn what a command raises into what a user should see."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit):
        raise
    except KeyboardInterrupt:
        click.echo(err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # whoever read our output has gone; click ends quietly
        kind = ConfigFailure if isinstance(error, ConfigError) else Failure
        raise kind(error, common.debug) from error


class CommandGroup(click.Group):
    """A group whose commands are those that packages and plugins offer, imported only when needed."""

    def list_commands(self, context: click.Context) -> list[str]:
        common = context.ensure_object(Common)
        return sorted(common.registry.names("command"))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        common = context.ensure_object(Common)
        if name in common.registry.names("command"):
            return _load(common.registry.find("command", name, "the command line"))
        return None

    def resolve_command(self, context: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest."""
        name = args[0]
        command = self.get_command(context, name)
        if command is None:
            context.fail(f"no command {name!r}; {nearest(name, self.list_commands(context))}")
        return name, command, args[1:]

    def invoke(self, context: click.Context) -> Any:
        """Run the command that the line names."""
        with _as_failures(context.ensure_object(Common)):
            return super().invoke(context)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands. One that cannot be loaded is listed with the reason, and the others go on."""
        common = context.ensure_object(Common)
        rows = [(name, _summary(common, name)) for name in common.registry.names("command")]
        for title, entries in _grouped(common, rows):
            with formatter.section(title):
                formatter.write_dl(entries)


def _grouped(common: Common, rows: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Our own commands by what they are for, and those of other packages and of plugins behind them."""
    own = {offer.name for offer in common.registry if offer.kind == "command" and offer.package.split()[0] == OWN_PACKAGE}
    title_of = {name: title for title, names in COMMAND_GROUPS.items() for name in names}
    found: dict[str, list[tuple[str, str]]] = {title: [] for title in (*COMMAND_GROUPS, OTHERS, FROM_PLUGINS)}
    for row in sorted(rows):
        found[title_of.get(row[0], OTHERS) if row[0] in own else FROM_PLUGINS].append(row)
    return ((title, entries) for title, entries in found.items() if entries)


def _load(offer: Offer) -> click.Command:
    return _checked(offer.load(), f"{offer.label} of {offer.package}")


def _checked(command: Any, what: str) -> click.Command:
    if not isinstance(command, click.Command):
        raise ConfigError(f"{what} is a {type(command).__name__}, not a click.Command")
    return command


def _summary(common: Common, name: str) -> str:
    """What a command says of itself. Read from its source, since importing all commands to list them could take seconds."""
    try:
        offer = common.registry.find("command", name, "the command line")
        return _docstring(offer.source) or _load(offer).get_short_help_str(80)
    except TreadleError as error:
        return f"(cannot be loaded: {error})"


def _docstring(source: str) -> str | None:
    """The first line of the docstring of a function, given as `module:function`; None when that takes an import."""
    module, _, function = source.partition(":")
    try:
        spec = importlib.util.find_spec(module) if module else None
        if spec is None or spec.origin is None:
            return None
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (ImportError, OSError, SyntaxError, ValueError):
        return None  # importing it will say what is wrong
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return (ast.get_docstring(node) or "").partition("\n")[0] or None
    return None


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@common_options
@click.version_option(package_name="treadle", message="%(prog)s %(version)s")
def cli() -> None:
    """Run language models with batching and cache policies of your choice."""


def main() -> None:
    """Entry point of the `treadle` script."""
    cli(prog_name="treadle")
