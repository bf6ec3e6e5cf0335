"""`treadle hooks`: every hook there is, and all about one of them."""

from __future__ import annotations

import inspect
import json as json_
from typing import TYPE_CHECKING, Any

import click

from treadle.cli import Common, common_options

if TYPE_CHECKING:
    from treadle.plugin_manager import HookFacts, PluginManager


@click.command()
@click.argument("name", required=False)
@click.option("--json", is_flag=True, help="Print JSON.")
@common_options
@click.pass_obj
def hooks(common: Common, /, name: str | None, json: bool) -> None:
    """List the hooks that a plugin may implement, or say all about one.

    Those of the core, and those that the configured executor brings. With NAME: its signature, what its docstring says, and who
    implements it in the configured stack, in call order. No model is loaded.
    """
    manager = common.manager()
    found = manager.hooks()
    if name is None:
        click.echo(json_.dumps([_facts(hook) for hook in found], indent=2) if json else as_text(found))
        return
    facts = describe(_find(name, found), manager)
    click.echo(json_.dumps(facts, indent=2) if json else details(facts))


def _find(name: str, found: list[HookFacts]) -> HookFacts:
    from treadle.errors import ConfigError, nearest

    for hook in found:
        if hook.name == name:
            return hook
    owners = ", ".join(dict.fromkeys(hook.owner for hook in found))
    raise ConfigError(f"no hook {name!r} in the configured stack ({owners}); {nearest(name, [hook.name for hook in found])}")


def _facts(hook: HookFacts) -> dict[str, Any]:
    summary = (inspect.getdoc(hook.function) or "").partition("\n")[0]
    return {"name": hook.name, "kind": hook.kind, "owner": hook.owner, "summary": summary}


def describe(hook: HookFacts, manager: PluginManager) -> dict[str, Any]:
    """All about one hook, ready for JSON."""
    return {
        **_facts(hook),
        "signature": signature(hook),
        "doc": inspect.getdoc(hook.function) or "",
        "implementations": dict(manager.callers()).get(hook.name, []),
    }


def signature(hook: HookFacts) -> str:
    """As a plugin would write it."""
    arguments = inspect.signature(hook.function)
    named = [parameter.replace(annotation=_text(parameter.annotation)) for parameter in arguments.parameters.values()]
    shown = str(arguments.replace(parameters=named, return_annotation=_text(arguments.return_annotation)))
    return hook.name + shown.replace("'", "")


def _text(annotation: object) -> object:
    return annotation if isinstance(annotation, str) or annotation is inspect.Parameter.empty else str(annotation)


def as_text(found: list[HookFacts]) -> str:
    """A section for each owner, a line for each hook."""
    lines: list[str] = []
    rows = [_facts(hook) for hook in found]
    width = max(len(row["name"]) for row in rows)
    owner = None
    for row in rows:
        if row["owner"] != owner:
            owner = row["owner"]
            lines += ["", owner] if lines else [owner]
        lines.append(f"  {row['name']:{width}}  {row['kind']:8}  {row['summary']}")
    return "\n".join(
        [*lines, "", "decide: asked in turn until one answers; tell: all hear of it; `treadle hooks NAME` says more"]
    )


def details(facts: dict[str, Any]) -> str:
    """For people."""
    doc = [f"    {line}".rstrip() for line in facts["doc"].splitlines()]
    implemented = facts["implementations"] or ["nobody"]
    return "\n".join(
        [
            f"{facts['signature']}",
            f"    [{facts['kind']}, {facts['owner']}]",
            "",
            *doc,
            "",
            "implemented here by, in call order",
            *(f"    {name}" for name in implemented),
        ]
    )
