"""`treadle codec-table`: what each KV codec costs and saves, on the configured model and on one with planted key outliers.

Rows are kept in a folder: what is there is not computed again, so the table may be made in pieces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from treadle.cli import Common, common_options
from treadle.errors import ConfigError, nearest

WORST, BALANCED = "worst", "balanced"
"""Calibrations: one names the worst eighth of all heads and does nothing else, the other balances keys and names outliers."""
CALIBRATIONS: Mapping[str, Sequence[str]] = {
    WORST: ("--set", "quantize=int4", "--set", "quantize.balance=false", "--threshold", "1"),
    BALANCED: ("--set", "quantize=int4"),
}

CODECS: Mapping[str, Mapping[str, Any]] = {
    "none": {"strategy": "none"},
    "int8": {"strategy": "int8"},
    "int4, one scale a head": {"strategy": "int4", "rotation": "none", "group": "head"},
    "int4 + Hadamard": {"strategy": "int4"},
    "K4V8 + Hadamard": {"strategy": "mixed", "key_bits": 4, "value_bits": 8},
    "K8V4 + Hadamard": {"strategy": "mixed", "key_bits": 8, "value_bits": 4},
}
KEPT: Mapping[str, Mapping[str, Any]] = {
    f"{name}, worst eighth kept": {**codec, "calibration": WORST, "balance": False}
    for name, codec in CODECS.items()
    if name != "none"
}
CALIBRATED: Mapping[str, Mapping[str, Any]] = {
    "int4 + Hadamard, balanced": {"strategy": "int4", "calibration": BALANCED},
    "int4 + Hadamard, groups of 32 with minima": {"strategy": "int4", "group": 32, "symmetric": False},
    "int4 + Hadamard, one scale a head, balanced": {"strategy": "int4", "group": "head", "calibration": BALANCED},
    "int8, static scales": {"strategy": "int8", "granularity": "head_channel", "calibration": BALANCED},
}
ROWS: Mapping[str, Mapping[str, Any]] = {**CODECS, **KEPT, **CALIBRATED}
"""Settings of [quantize] for each row; a calibration is named by how it was made."""


@click.command("codec-table")
@click.option("--folder", required=True, type=click.Path(file_okay=False, path_type=Path), help="Where rows and models are kept.")
@click.option("--model", "models", multiple=True, type=click.Choice(["base", "planted"]), help="Which; both unless given.")
@click.option("--row", "names", multiple=True, help="Only these rows; all unless given.")
@click.option("--tokens", type=click.IntRange(1024), default=20480, show_default=True, help="Of the text for the perplexity.")
@click.option("--list", "listed", is_flag=True, help="List the rows and stop.")
@common_options
@click.pass_obj
def codec_table(common: Common, folder: Path, models: Sequence[str], names: Sequence[str], tokens: int, listed: bool) -> None:
    """Measure KV codecs: bytes, perplexity, greedy agreement and how far next-token distributions move.

    The text is Python's own language reference, as its `pydoc_data` has it: its first tokens are measured, others calibrate.
    """
    if listed:
        click.echo("\n".join(ROWS))
        return
    for name in names:
        if name not in ROWS:
            raise ConfigError(f"no row {name!r}; {nearest(name, ROWS)}")
    from treadle_plugins.bench.codec_rows import Bench

    bench = Bench(folder, common, tokens)
    for model in models or ("base", "planted"):
        for name in names or ROWS:
            if bench.row(model, name) is None:
                begin = time.perf_counter()
                bench.measure(model, name, ROWS[name], CALIBRATIONS)
                click.echo(f"{model}: {name}: {time.perf_counter() - begin:.0f} s", err=True)
    click.echo(draw(bench.rows()))


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, in Markdown."""
    lines = [
        "| model | codec | whole heads | bytes/token | share | pool, tokens in 1 GiB | perplexity | change "
        "| same greedy tokens | identical of 50 | KL mean | KL max |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    bases = {row["model"]: row for row in rows if row["codec"] == "none"}
    for row in rows:
        base = bases.get(row["model"])
        change = f"{100 * (row['perplexity'] / base['perplexity'] - 1):+.2f} %" if base else "?"
        share = f"{row['bytes_per_token'] / base['bytes_per_token']:.3f}" if base else "?"
        lines.append(
            f"| {row['model']} | {row['codec']} | {row['whole']} | {row['bytes_per_token']:.0f} | {share} | {row['pool_tokens']} "
            f"| {row['perplexity']:.3f} | {change} | {100 * row['same_tokens']:.1f} % | {row['identical']} "
            f"| {row['kl_mean']:.4f} | {row['kl_max']:.2f} |"
        )
    return "\n".join(lines)


def load_rows(path: Path) -> list[dict[str, Any]]:
    """Rows that were measured before."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
