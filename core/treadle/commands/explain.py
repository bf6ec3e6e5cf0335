"""`treadle explain`: the stack that a configuration resolves to."""

from __future__ import annotations

import json as json_

import click

from treadle.cli import Common, common_options


@click.command()
@click.option("--json", is_flag=True, help="Print one JSON object.")
@common_options
@click.pass_obj
def explain(common: Common, /, json: bool) -> None:
    """Show what the configuration resolves to.

    Per slot the strategy, its package, and each setting with its origin; per hook who answers, in call order. No model is loaded.
    """
    from treadle.explain import as_text, describe

    facts = describe(common.manager())
    click.echo(json_.dumps(facts, indent=2, ensure_ascii=False) if json else as_text(facts))
