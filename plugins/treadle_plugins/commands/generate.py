"""`treadle generate`: complete prompts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from treadle.cli import INTERRUPTED, Common, common_options

if TYPE_CHECKING:
    from treadle_plugins.commands.generation.inputs import Inputs
    from treadle_plugins.commands.generation.prompts import Ask

STDIN = "-"
SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip
Positive = click.IntRange(min=1)


@click.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option(
    "--file", "files", multiple=True, type=click.Path(exists=True, dir_okay=False, allow_dash=True), help="A prompt in a file."
)
@click.option("--jsonl", is_flag=True, help="Each line of files and standard input is a request, each line written a result.")
@click.option("--output", type=click.Path(dir_okay=False), help="Write results to this file, not to standard output.")
@click.option("--chat/--raw", default=None, help="Ask the model, or let it continue the text. [default: ask, if it can chat]")
@click.option("--system", metavar="TEXT", help="System message in front of each plain prompt.")
@click.option("-n", "n", type=Positive, default=1, show_default=True, help="Completions of each prompt.")
@click.option("--max-tokens", type=int, help="Most tokens to generate. [default: 512, or what model and pool hold]")
@click.option("--min-tokens", type=int, help="Let nothing end the text before this many tokens.")
@click.option("--temperature", type=float, help="0 always takes the likeliest token. [default: 0]")
@click.option("--top-k", type=int, help="Sample among the k likeliest tokens.")
@click.option("--top-p", type=float, help="Sample among the likeliest tokens that sum to this probability.")
@click.option("--seed", type=int, help="Sample the same again.")
@click.option("--stop", multiple=True, help="End at this text; may be given several times.")
@click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token; may be given several times.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's own end of text.")
@click.option("--priority", type=int, default=0, help="Higher is more urgent, where the order is by priority.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Give each request this long.")
@click.option("--ahead", type=Positive, default=256, show_default=True, help="Most requests that are under way at once.")
@click.option("--progress/--no-progress", default=None, help="Show progress. [default: on a terminal that shows no results]")
@click.option("--stats", is_flag=True, help="Print figures at the end, on standard error.")
@common_options
@click.pass_obj
def generate(common: Common, /, prompts: tuple[str, ...], **options: Any) -> None:
    """Complete prompts.

    Prompts come from arguments, from files, and from standard input (`-`, or a pipe when there is no other prompt). One prompt:
    its text is streamed. Several, -n or --jsonl: one JSON object a completion, in the order of the prompts. An answer ends after
    512 tokens where nobody says otherwise, and a line on standard error says that it was cut.

    With --jsonl a request is an object with "prompt" (text), "tokens" (ids) or "messages" (a list of role and content), and
    maybe "id", "n", "priority", "timeout_s", "cache_salt", "labels" and any sampling parameter, over the options given here. A
    wrong line gives an object with the error, the others go on, and the exit code is 1.

    Ctrl-C ends cleanly: what was finished is written. A second one ends at once.
    """
    from treadle.errors import InvalidRequest

    try:
        inputs = _inputs(prompts, options)
        ask = inputs.ask() if inputs.single else None
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from None
    _check_output(options["output"], inputs.files)
    _run(common, inputs, ask, options)


def _inputs(prompts: Sequence[str], options: dict[str, Any]) -> Inputs:
    """Sort out what was given. Raises click.UsageError and InvalidRequest."""
    from treadle_plugins.commands.generation.inputs import Inputs
    from treadle_plugins.commands.generation.prompts import Defaults

    texts = tuple(prompt for prompt in prompts if prompt != STDIN)
    files = (*options["files"], *(STDIN for prompt in prompts if prompt == STDIN))
    if files.count(STDIN) > 1:
        raise click.UsageError("standard input is named more than once; it can be read once only")
    if not texts and not files:
        if sys.stdin.isatty():
            raise click.UsageError("there is no prompt; give one as an argument, by --file, or on standard input")
        files = (STDIN,)
    if options["system"] is not None and options["chat"] is False:
        raise click.UsageError("--system needs the model's chat template, which --raw leaves out; drop one of them")
    sampling = {name: options[name] for name in SAMPLING if options[name] is not None and options[name] != ()}
    if not options["jsonl"]:
        _check_sampling(sampling)  # a line of JSON may still change it
    return Inputs(texts, files, options["jsonl"], Defaults(sampling, options["n"], options["priority"], options["timeout_s"]))


def _check_sampling(sampling: dict[str, Any]) -> None:
    """Refuse at once what would be wrong in every request. Raises InvalidRequest."""
    from treadle import SamplingParams

    SamplingParams.from_mapping(sampling, "the command's options")


def _check_output(output: str | None, files: Sequence[str]) -> None:
    """Never write over what is still to be read."""
    for file in files:
        if output and file != STDIN and os.path.exists(output) and os.path.samefile(file, output):
            raise click.UsageError(f"--output {output} is also read from; name another file")


def _run(common: Common, inputs: Inputs, ask: Ask | None, options: dict[str, Any]) -> None:
    """Load the model and serve. Raises click.exceptions.Exit with what was not well."""
    from treadle import Engine
    from treadle_plugins.commands.generation.batches import Encoder
    from treadle_plugins.commands.generation.interrupts import Interrupt
    from treadle_plugins.commands.generation.results import Figures, Output, Progress
    from treadle_plugins.commands.generation.session import Session

    settings = common.settings()
    figures = Figures()
    with Output(options["output"]) as output, Interrupt() as interrupt, Engine(settings) as engine:
        session = Session(engine, Encoder(engine, options["chat"], options["system"]), interrupt, output, figures)
        output.open()
        interrupt.soften()
        try:
            if ask is not None:
                session.stream(ask)
            else:
                session.batch(inputs, options["ahead"], Progress(inputs.total, figures) if _shows_progress(options) else None)
        finally:
            if note := figures.note():
                click.echo(note, err=True)
            if options["stats"]:
                click.echo(figures.table(), err=True)
    if interrupt.asked:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if figures.num_failed:
        raise click.exceptions.Exit(1)


def _shows_progress(options: dict[str, Any]) -> bool:
    if options["progress"] is not None:
        return bool(options["progress"])
    return sys.stderr.isatty() and (options["output"] is not None or not sys.stdout.isatty())
