"""`treadle plugins`: what installed packages offer."""

from __future__ import annotations

import json as json_
from typing import TYPE_CHECKING, Any

import click

from treadle.cli import Common, common_options

if TYPE_CHECKING:
    from treadle.registry import Registry


@click.command()
@click.option("--json", is_flag=True, help="Print one JSON array.")
@common_options
@click.pass_obj
def plugins(common: Common, /, json: bool) -> None:
    """List what installed packages offer.

    Strategies of each slot, plugins and commands, with their packages. Only executors are imported, for the
    slots that they bring, so this works while a package is broken.
    """
    offers = list_offers(common.registry)
    click.echo(json_.dumps(offers, indent=2) if json else as_text(offers))


def list_offers(registry: Registry) -> list[dict[str, Any]]:
    """A record for each offer: slots in their order, then plugins, then commands, then what fits nowhere."""
    slots = registry.slots()
    kinds = [*(slot.name for slot in slots), "plugin", "command"]
    offers = sorted(registry, key=lambda o: (kinds.index(o.kind) if o.kind in kinds else len(kinds), o.kind, o.name))
    defaults = {(slot.name, slot.default) for slot in slots}
    times = [(offer.kind, offer.name) for offer in offers]
    return [
        {
            "kind": offer.kind,
            "name": offer.name,
            "package": offer.package,
            "source": offer.source,
            "default": (offer.kind, offer.name) in defaults,
            "problem": _problem(offer.kind, kinds, times.count((offer.kind, offer.name))),
        }
        for offer in offers
    ]


def _problem(kind: str, kinds: list[str], times: int) -> str | None:
    from treadle.errors import nearest

    if kind not in kinds:
        return f"unusable: there is no slot {kind!r}; {nearest(kind, kinds)}"
    return "unusable: offered more than once" if times > 1 else None


def as_text(offers: list[dict[str, Any]]) -> str:
    """A section for each kind, a line for each offer."""
    lines: list[str] = []
    widths = [max(len(str(offer[key])) for offer in offers) if offers else 0 for key in ("name", "package")]
    kind = None
    for offer in offers:
        if offer["kind"] != kind:
            kind = offer["kind"]
            lines += ["", kind] if lines else [kind]
        mark = "*" if offer["default"] else " "
        line = f"{mark} {offer['name']:{widths[0]}}  {offer['package']:{widths[1]}}  {offer['source']}"
        lines.append(line + (f"  ({offer['problem']})" if offer["problem"] else ""))
    return "\n".join([*lines, "", "* the default of its slot"])
