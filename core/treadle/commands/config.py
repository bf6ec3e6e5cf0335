"""`treadle config`: write, check and describe configuration files."""

from __future__ import annotations

import json

import click

from treadle.cli import Common, common_options
from treadle.errors import ConfigError, TreadleError

DEFAULT_FILE = "treadle.toml"


@click.group()
@common_options
def config() -> None:
    """Write, check and describe configuration files."""


@config.command()
@click.argument("file", default=DEFAULT_FILE, type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--force", is_flag=True, help="Overwrite FILE if it is there.")
@common_options
@click.pass_obj
def init(common: Common, /, file: str, force: bool) -> None:
    """Write a configuration FILE with every setting of the default strategies, to be edited.

    FILE is treadle.toml unless given; `-` is standard output.
    """
    from treadle.commands.starter import starter

    text = starter(common.registry)
    if file == "-":
        click.echo(text, nl=False)
        return
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"{file!r} is there already; --force overwrites it, or name another file") from None
    except OSError as error:
        raise ConfigError(f"cannot write {file!r}: {error.strerror}; name a file in a folder that you may write to") from error
    click.echo(f"wrote {file}; use it with --config {file}")


@config.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@common_options
@click.pass_obj
def check(common: Common, /, file: str | None) -> None:
    """Resolve a configuration and build its plugins: prints ok, or every error.

    FILE is the file of --config or TREADLE_CONFIG, or treadle.toml, unless given. No model is loaded.
    """
    common.config = file or common.path or DEFAULT_FILE
    try:
        manager = common.manager()
    except TreadleError as error:
        for problem in error.problems if isinstance(error, ConfigError) else [error]:
            click.echo(f"error: {problem}", err=True)
        raise click.exceptions.Exit(2) from None
    for note in manager.settings.notes:
        click.echo(f"note: {note}")
    click.echo(f"ok: {common.config} (no model was loaded)")


@config.command()
@common_options
@click.pass_obj
def schema(common: Common, /) -> None:
    """Print a JSON schema of the configuration, with the strategies of all installed packages."""
    from treadle.commands.schema import build

    found = build(common.registry, lambda problem: click.echo(f"warning: {problem}", err=True))
    click.echo(json.dumps(found, indent=2, ensure_ascii=False))
