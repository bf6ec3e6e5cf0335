"""`treadle calibrate`: find out, on a text, how a model's keys and values are best quantized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from treadle.cli import Common, common_options
from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.settings import Settings
    from treadle_plugins.quantize.calibration_file import Calibration

LEAST_TOKENS = 64
"""A text, and a request, shorter than this says nothing about a model."""
OTHERS_SHOWN = 5
"""Heads that the report shows beside those that are to be kept."""


@click.command()
@click.argument("text_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
@click.option("--max-tokens", type=click.IntRange(LEAST_TOKENS), default=4096, show_default=True, help="Of the text, at most.")
@click.option("--chunk", type=click.IntRange(LEAST_TOKENS), default=1024, show_default=True, help="Tokens of one request.")
@click.option("--max-share", type=click.FloatRange(0, 1), default=0.125, show_default=True, help="Most heads to keep whole.")
@click.option(
    "--threshold",
    type=click.FloatRange(0),
    default=2.0,
    show_default=True,
    help="A head is an outlier when its error is this many times the median.",
)
@common_options
@click.pass_obj
def calibrate(
    common: Common, text_file: Path, output: Path, max_tokens: int, chunk: int, max_share: float, threshold: float
) -> None:
    """Run the configured model on TEXT_FILE and write what helps to quantize its KV: which heads are to be kept whole, a balance
    of keys, and static scales for each channel.

    Heads are judged under the codec of the configuration's [quantize], or under int4 when that is none: by how far the outputs
    of their attention are off. Use the file with quantize.calibration.
    """
    from treadle_plugins.quantize.calibration_file import write
    from treadle_plugins.quantize.findings import Limits, find

    try:
        text = text_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(text_file)!r}: {error}; a text file in UTF-8 is needed") from error
    common.settings()  # sets up logs, too
    found = find(partial(_configure, common), text, Limits(max_tokens, chunk, max_share, threshold))
    write(output, found)
    for line in report(found):
        click.echo(line)
    click.echo(f"wrote {output}; use it with --set quantize.calibration={output}")


def _configure(common: Common, overrides: Sequence[str]) -> Settings:
    from treadle.settings import load

    return load(common.path, [*common.all_overrides, *overrides], registry=common.registry)


def report(found: Calibration) -> Sequence[str]:
    """The table that people read: a row for each head that is kept whole, then the layers."""
    kept = dict.fromkeys(found.whole_heads, "whole") | dict.fromkeys(found.whole_keys, "keys")
    heads = sorted(found.heads, key=lambda head: -head.key_error)
    lines = [
        f"{found.model}: heads judged as {found.kv_format} over {found.num_tokens} tokens; "
        f"{len(kept)} of {len(heads)} are to be kept whole",
        f"{'layer':>5} {'head':>4} {'error of keys':>14} {'of values':>10}  kept",
    ]
    shown = [head for head in heads if (head.layer, head.head) in kept]
    shown += [head for head in heads if (head.layer, head.head) not in kept][:OTHERS_SHOWN]
    for head in shown:
        what = kept.get((head.layer, head.head), "")
        lines.append(f"{head.layer:5d} {head.head:4d} {head.key_error:14.4f} {head.value_error:10.4f}  {what}".rstrip())
    middle = len(heads) // 2
    lines.append(f"{'median':>10} {heads[middle].key_error:14.4f} {sorted(h.value_error for h in heads)[middle]:10.4f}")
    return lines
