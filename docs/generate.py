"""Tables that are made from the code when the site is built, so that they cannot differ from it.

A line `<!-- generated: NAME -->` of a page is replaced by what the function of that name returns.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import UnionType
from typing import Any, Literal

import click
from click.testing import CliRunner
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from treadle.cli import cli
from treadle.hookspecs import Hooks
from treadle.registry import Offer, Registry, Slot
from treadle.settings import ENV_PREFIX, Root
from treadle.testing import suites as contract_suites

MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
PACKAGE = "treadle"
TYPE_NAMES = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "ByteSize": "bytes",
    "Path": "folder",
}


def fill_in(page: str) -> str:
    """The page with every mark replaced."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), page)


def strategies() -> str:
    """A section for each slot, with each of its strategies and their settings."""
    registry = Registry.installed()
    return "\n\n".join(_slot(slot, registry) for slot in registry.slots())


def configuration() -> str:
    """The settings that belong to no slot."""
    rows = []
    for name, field in Root.model_fields.items():
        if name == "plugin":
            continue
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            rows += [_row(f"{name}.{inner}", f) for inner, f in field.annotation.model_fields.items()]
        else:
            rows.append(_row(name, field))
    variable = [[row[0], f"`{ENV_PREFIX}{row[0].strip('`').upper().replace('.', '__')}`", *row[1:]] for row in rows]
    return _table(["setting", "environment variable", "type", "default", "meaning"], variable)


def command_line() -> str:
    """`--help` of each command."""
    return "\n\n".join(_help(cli, ["treadle"]))


def rules() -> str:
    """Every rule that the core enforces on an answer."""
    rows = []
    for name, hook in vars(Hooks).items():
        text = inspect.getdoc(hook) if inspect.isfunction(hook) else None
        section = re.search(r"^Rules:\n((?: +.*\n?)+)", text or "", re.MULTILINE)
        if section:
            rows += [[f"`{name}`", rule.strip()] for rule in re.split(r"^ *- ", section[1], flags=re.MULTILINE)[1:]]
    return _table(["hook", "rule"], rows)


def suites() -> str:
    """The contract suites, by what they promise."""
    rows = [[f"`{name}`", inspect.cleandoc(getattr(contract_suites, name).__doc__)] for name in contract_suites.__all__]
    return _table(["suite", "promises"], [row for row in rows if row[0].endswith("Suite`") and row[0] != "`StrategySuite`"])


PARTS: Mapping[str, Callable[[], str]] = {
    "strategies": strategies,
    "configuration": configuration,
    "command_line": command_line,
    "rules": rules,
    "suites": suites,
}


def _slot(slot: Slot, registry: Registry) -> str:
    own = [offer for offer in registry if offer.kind == slot.name and offer.package.split()[0] == PACKAGE]
    own.sort(key=lambda offer: (offer.name != slot.default, offer.name))
    hooks = ", ".join(f"`{hook}`" for hook in slot.hooks)
    owners = " and ".join(f"`{label}`" for label in registry.owners(slot.name))
    about = f"Hooks: {hooks}." + (f" A slot of {owners}." if owners else "")
    return "\n\n".join([f"## {slot.name}", about, *(_strategy(offer, slot) for offer in own)])


def _strategy(offer: Offer, slot: Slot) -> str:
    factory = offer.load()
    default = " (default)" if offer.name == slot.default else ""
    # the module says what the strategy is for, `slot.name: ` in front
    text = inspect.cleandoc(sys.modules[factory.__module__].__doc__ or "").removeprefix(f"{offer.label}: ")
    about, *more = text.split("\n\n")
    parts = [f"### {offer.label}{default}", about[:1].upper() + about[1:], *(_paragraph(part) for part in more)]
    settings = getattr(factory, "Settings", None)
    if settings is None:
        parts.append("No settings.")
    else:
        rows = [_row(name, field) for name, field in settings.model_fields.items()]
        parts.append(_table(["setting", "type", "default", "meaning"], rows))
    return "\n\n".join(parts)


def _paragraph(text: str) -> str:
    return f"```text\n{inspect.cleandoc(text)}\n```" if text.startswith("    ") else text


def _row(name: str, field: FieldInfo) -> list[str]:
    default = field.get_default(call_default_factory=True)
    limits = [str(item) for item in field.metadata if type(item).__name__ in ("Ge", "Gt", "Le", "Lt")]
    kind = ", ".join([_type(field.annotation), *(_limit(limit) for limit in limits)])
    return [f"`{name}`", kind, "unset" if default is None else f"`{_plain(default)}`", field.description or ""]


def _limit(text: str) -> str:
    """`Ge(ge=1)` as people write it."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    name, value = re.fullmatch(r"\w+\((\w+)=(.+)\)", text).groups()  # type: ignore[union-attr]
    return f"{signs[name]} {value}"


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin in (typing.Union, UnionType):
        return " or ".join(_type(part) for part in arguments if part is not type(None))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (tuple, list):
        return f"list of {_type(arguments[0])}"
    if origin is not None:
        return f"table of {_type(arguments[-1])}"
    name: str = annotation.__name__
    return TYPE_NAMES.get(name, name)


def _plain(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def _table(titles: list[str], rows: Iterable[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines)


def _help(command: click.Command, words: list[str]) -> Iterable[str]:
    context = click.Context(command, info_name=words[-1])
    asked = [*words[1:], "--help"]
    shown = CliRunner().invoke(cli, asked, prog_name="treadle", terminal_width=100)
    if shown.exit_code:
        raise RuntimeError(f"`{' '.join(asked)}` failed: {shown.output}")
    yield f"## {' '.join(words)}\n\n```text\n{shown.output.strip()}\n```"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None:
                yield from _help(found, [*words, name])
