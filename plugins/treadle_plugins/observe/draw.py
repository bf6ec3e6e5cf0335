"""`treadle portrait`: draw what plugin.portrait wrote, all panels on one time axis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from treadle.errors import TreadleError

POOL = (
    ("blocks_used", "used", "#3b6ea5"),
    ("blocks_wasted", "wasted inside blocks", "#d9843b"),
    ("blocks_reserved", "reserved", "#e8c07d"),
    ("blocks_cached", "cached", "#8fbf9f"),
    ("blocks_free", "free", "#eeeeee"),
)
MEMORY = (
    ("weights", "weights", "#5b5b8f"),
    ("kv_pool", "KV pool", "#3b6ea5"),
    ("swap_space", "swap space", "#9fb8d0"),
    ("activations", "activations and growth", "#d9843b"),
    ("rest", "everything else", "#cccccc"),
)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Samples of a file. Raises TreadleError that names the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TreadleError(f"cannot read the portrait {str(path)!r}: {error.strerror}") from error
    samples = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    if not samples:
        raise TreadleError(f"{path} holds no sample: the engine stopped before the first one was due")
    return samples


def _parse(line: str, origin: str) -> dict[str, Any]:
    try:
        sample = json.loads(line)
        return {**sample, "memory": dict(sample["memory"])}
    except (ValueError, TypeError, KeyError) as error:
        raise TreadleError(f"{origin} is no sample of a portrait ({error}); plugins = ['portrait'] writes one") from None


def draw(samples: list[dict[str, Any]], title: str) -> Any:
    """A matplotlib figure."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    times = [sample["time_s"] for sample in samples]
    figure, (requests, lengths, pool, memory) = plt.subplots(
        4, 1, sharex=True, figsize=(11, 11), height_ratios=(1, 1, 2, 2), layout="constrained"
    )
    requests.plot(times, [s["num_running"] for s in samples], label="running", color="#3b6ea5")
    requests.plot(times, [s["num_waiting"] for s in samples], label="waiting", color="#d9843b")
    requests.set_ylabel("requests")
    lengths.plot(times, [s["mean_length"] for s in samples], label="mean length, tokens", color="#5b5b8f")
    lengths.set_ylabel("tokens")
    pool.stackplot(
        times, [[s[k] for s in samples] for k, _, _ in POOL], labels=[n for _, n, _ in POOL], colors=[c for _, _, c in POOL]
    )
    pool.set_ylabel("pool, blocks")
    parts = [[s["memory"].get(k, 0) / 2**20 for s in samples] for k, _, _ in MEMORY]
    memory.stackplot(times, parts, labels=[n for _, n, _ in MEMORY], colors=[c for _, _, c in MEMORY])
    memory.set_ylabel("memory, MiB")
    memory.set_xlabel("seconds")
    for panel in (requests, lengths, pool, memory):
        panel.legend(loc="upper right", fontsize="small")
        panel.margins(x=0)
        panel.set_ylim(bottom=0)
    figure.suptitle(title)
    return figure


@click.command("portrait")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--output", multiple=True, type=click.Path(path_type=Path), help="A .png or .svg file; by default both, beside FILE."
)
@click.option("--title", default="", help="Heading of the picture.")
def portrait(file: Path, output: tuple[Path, ...], title: str) -> None:
    """Draw the memory portrait that the plugin `portrait` wrote to FILE."""
    figure = draw(read_samples(file), title or file.stem)
    for target in output or (file.with_suffix(".png"), file.with_suffix(".svg")):
        figure.savefig(target, dpi=120)
        click.echo(f"wrote {target}")
