"""`treadle blocks replay`: look through what plugin.block_log wrote."""

from __future__ import annotations

from pathlib import Path

import click

from treadle_plugins.observe.block_entries import entry_line, read_log
from treadle_plugins.observe.block_replay import first_divergence, neighbours


@click.group("blocks")
def blocks() -> None:
    """Look into a log of blocks."""


@blocks.command("replay")
@click.argument("file", type=click.Path(path_type=Path))
def replay(file: Path) -> None:
    """Replay a block log up to the first entry that contradicts those before it. Ends with 1 when there is one.

    FILE is what the plugin `block_log` wrote. The entries that touched the same blocks are shown around it.
    """
    log = read_log(file)
    found = first_divergence(log)
    if found is None:
        since = "the engine's start" if log.snapshot is None else "a snapshot"
        click.echo(f"{file}: no divergence in {len(log.entries)} entries since {since}, {log.header.num_blocks} blocks")
        return
    at, divergence = found
    click.echo(f"{file}: entry {at.number} contradicts those before it: {divergence}")
    for item in neighbours(log.entries, at, divergence.blocks):
        click.echo(f"{'>' if item is at else ' '} {entry_line(*item)}")
    raise SystemExit(1)
