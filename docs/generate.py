"""Parts of pages that are made from the code, so that they cannot differ from it.

A part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`, and is committed with its page. `python
docs/generate.py` says which pages are out of date, and with `--write` brings them up to date; a test runs the first.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from types import FunctionType, UnionType
from typing import Any, Literal

import click
from click.testing import CliRunner
from members import describe
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import treadle
from treadle import testing
from treadle.cli import cli
from treadle.hook_changes import CHANGES
from treadle.hookspecs import Hooks
from treadle.registry import Offer, Registry, Slot
from treadle.settings import ENV_PREFIX, Root
from treadle.testing import suites as contract_suites

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^<!-- generated: (\w+) -->\n.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL)
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
    """The page with every generated part as it should be now."""
    return MARK.sub(lambda mark: f"<!-- generated: {mark[1]} -->\n\n{PARTS[mark[1]]()}\n\n<!-- end of {mark[1]} -->", page)


def pages() -> list[Path]:
    """Pages with a generated part."""
    found = (page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
    return sorted(page for page in found if MARK.search(page.read_text(encoding="utf-8")))


def main(arguments: list[str]) -> int:
    """Say which pages are out of date, and with `--write` bring them up to date."""
    stale = [page for page in pages() if fill_in(text := page.read_text(encoding="utf-8")) != text]
    for page in stale:
        if "--write" in arguments:
            page.write_text(fill_in(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page.relative_to(ROOT), "written" if "--write" in arguments else "is out of date; run docs/generate.py --write")
    return 1 if stale and "--write" not in arguments else 0


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


def hooks() -> str:
    """Every hook of the core."""
    return "\n\n".join(_hook(function) for function in _hooks_of(Hooks))


def torch_hooks() -> str:
    """Every hook that the torch executor brings."""
    specs = Registry.installed().find("execute", "torch", "the documentation").load().hookspecs
    return "\n\n".join(_hook(function) for function in _hooks_of(specs))


def hook_changes() -> str:
    """What changed from one hook version to the next."""
    hooks = [change for change in CHANGES if not change.what.startswith("treadle_plugins.")]
    modules = [change for change in CHANGES if change.what.startswith("treadle_plugins.")]
    return "\n\n".join(
        [
            _table(["version", "hook", "what was, what is, what to do"], [[str(c.version), f"`{c.what}`", c.do] for c in hooks]),
            _table(["version", "folder", "now"], [[str(c.version), f"`{c.what}`", c.do.split(": ", 1)[1]] for c in modules]),
        ]
    )


def names() -> str:
    """What `treadle` and `treadle.testing` export."""
    rows = [
        [f"`{name}`", f"`{treadle._HOME[name]}`", _first_sentence(getattr(treadle, name))] for name in sorted(treadle.__all__)
    ]
    rows += [[f"`{name}`", "`treadle.testing`", _first_sentence(getattr(testing, name))] for name in sorted(testing.__all__)]
    return _table(["name", "defined in", "what it is"], rows)


def rooms() -> str:
    """The core's modules, each by the first line of its docstring."""
    paths = [path for path in sorted((ROOT / "core" / "treadle").glob("*.py")) if not path.stem.startswith("_")]
    rows = [[f"`{path.name}`", _first_sentence(importlib.import_module(f"treadle.{path.stem}"))] for path in paths]
    return _table(["file", "what it is"], rows)


def import_exceptions() -> str:
    """Imports from one family of plugins to another that import-linter lets pass."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    rows: dict[str, list[str]] = {}
    for exception in (line for contract in contracts for line in contract.get("ignore_imports", ())):
        importer, imported = (name.removeprefix("treadle_plugins.").removesuffix(".**") for name in exception.split(" -> "))
        if imported not in rows.setdefault(importer, []):
            rows[importer].append(imported)
    return _table(["who", "may import"], [[f"`{who}`", ", ".join(f"`{name}`" for name in what)] for who, what in rows.items()])


API = {
    "api_running": (
        "treadle.engine:Engine",
        "treadle.sampling_params:SamplingParams",
        "treadle.request:RequestOptions",
        "treadle.handles:Handle",
        "treadle.handles:Chunk",
        "treadle.handles:Completion",
        "treadle.request:Figures",
    ),
    "api_seen": (
        "treadle.step:Step",
        "treadle.request:Request",
        "treadle.request:Counted",
        "treadle.request:Phase",
        "treadle.request:StashKey",
        "treadle.request:Stash",
        "treadle.blocks:PoolView",
        "treadle.blocks:BlockRecord",
        "treadle.blocks:BlockRef",
        "treadle.blocks:IntegrityError",
    ),
    "api_answers": ("treadle.contracts", "treadle.plugin:Plugin", "treadle.plugin:Trait", "treadle.plan", "treadle.clocks"),
    "api_configuration": (
        "treadle.settings:load",
        "treadle.settings:Settings",
        "treadle.settings:Choice",
        "treadle.settings:StrategySettings",
        "treadle.settings:BlockSettings",
        "treadle.registry:Slot",
        "treadle.registry:Offer",
        "treadle.registry:Registry",
    ),
    "api_errors": ("treadle.errors", "treadle.text:Tokenizer", "treadle.text:TextStream", "treadle.logs"),
    "api_testing": ("treadle.testing.engines as treadle.testing", "treadle.testing.fake_executor as treadle.testing"),
    "torch_forward": ("treadle_plugins.forward.spec",),
    "torch_attention": ("treadle_plugins.attention.spec", "treadle_plugins.execute.torch_executor.suites:CodecSuite"),
}
"""Whose members are described in which part."""

PARTS: Mapping[str, Callable[[], str]] = {
    **{part: partial(describe, places) for part, places in API.items()},
    "strategies": strategies,
    "configuration": configuration,
    "command_line": command_line,
    "rules": rules,
    "suites": suites,
    "hooks": hooks,
    "torch_hooks": torch_hooks,
    "hook_changes": hook_changes,
    "names": names,
    "rooms": rooms,
    "import_exceptions": import_exceptions,
}


def _hooks_of(specs: type) -> list[FunctionType]:
    return [hook for hook in vars(specs).values() if inspect.isfunction(hook) and hasattr(hook, "treadle_spec")]


def _hook(function: FunctionType) -> str:
    """A section: how the hook is written, what its docstring says, and its example."""
    arguments = inspect.signature(function)
    shown = ", ".join(str(parameter) for parameter in arguments.parameters.values()).replace("'", "")
    kind = "decide" if getattr(function, "treadle_spec")["firstresult"] else "tell"  # noqa: B009  # set by the marker
    text, _, example = (inspect.getdoc(function) or "").partition("\n>>> ")
    about = re.sub(r"^(Called|Returns|Rules|Cost):", r"**\1:**", text.strip(), flags=re.MULTILINE)
    about = re.sub(r"^(\*\*Rules:\*\*)\n", r"\1\n\n", about, flags=re.MULTILINE)
    about = re.sub(r"^ +- ", "- ", about, flags=re.MULTILINE)
    returned = str(arguments.return_annotation).replace("'", "")
    parts = [f"### {function.__name__}", f"```text\n{function.__name__}({shown}) -> {returned}\n```", f"A *{kind}* hook. {about}"]
    if example:
        parts.append(f"```text\n>>> {example.strip()}\n```")
    return "\n\n".join(parts)


def _first_sentence(value: object) -> str:
    if value is treadle.hookimpl:
        return "Marks a method as the implementation of the hook of that name."  # pluggy's own docstring differs by release
    text = " ".join((inspect.getdoc(value) or "").split("\n\n", 1)[0].split())
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0]


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
