"""Public names of modules, with their members, as Markdown. Read from the source, so that nothing heavy is imported."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

Named = ast.ClassDef | ast.FunctionDef


def describe(places: Iterable[str]) -> str:
    """A section for each of `module:Name`, or for each public name of `module`. Behind ` as `: where it is imported from."""
    return "\n\n".join(_section(node, module) for place in places for node, module in _found(place))


def _found(place: str) -> Iterator[tuple[Named, str]]:
    place, _, shown = place.partition(" as ")
    module, _, wanted = place.partition(":")
    nodes = [node for node in _tree(module).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    chosen = [node for node in nodes if node.name == wanted or (not wanted and not node.name.startswith("_"))]
    if not chosen:
        raise LookupError(f"{place} is not there")
    yield from ((node, shown or module) for node in chosen)


def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _section(node: Named, module: str) -> str:
    if isinstance(node, ast.FunctionDef):
        return "\n\n".join([f"### {node.name}", f"```text\n{_signature(node)}\n```", f"In `{module}`.", _prose(_doc(node))])
    bases = [ast.unparse(base) for base in node.bases]
    about = f"In `{module}`" + (f", derived from {' and '.join(f'`{base}`' for base in bases)}." if bases else ".")
    rows = [f"| `{what}` | {meaning} |" for what, meaning in _members(node)]
    parts = [f"### {node.name}", about, _prose(_doc(node))]
    if rows:
        parts.append("\n".join(["| member | meaning |", "| --- | --- |", *rows]))
    return "\n\n".join(part for part in parts if part)


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for place, item in enumerate(node.body):
        if isinstance(item, ast.FunctionDef):
            if item.name == "__init__":
                if len(item.args.args) + len(item.args.kwonlyargs) > 1 and _doc(item):
                    yield _cell(_signature(item).replace("__init__", node.name)), _cell(_doc(item))
                yield from _attributes_set_in(item)
            elif not item.name.startswith("_"):
                yield _cell(_member(item)), _cell(_doc(item))
        elif isinstance(item, (ast.AnnAssign, ast.Assign)) and not _target(item).startswith("_"):
            yield _cell(ast.unparse(item)), _cell(_doc_behind(node.body, place))


def _attributes_set_in(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for place, item in enumerate(function.body):
        if isinstance(item, (ast.AnnAssign, ast.Assign)) and _target(item).startswith("self."):
            name = _target(item).removeprefix("self.")
            doc = _doc_behind(function.body, place)
            if doc and not name.startswith("_"):
                kind = f": {ast.unparse(item.annotation)}" if isinstance(item, ast.AnnAssign) else ""
                yield _cell(name + kind), _cell(doc)


def _target(item: ast.AnnAssign | ast.Assign) -> str:
    return ast.unparse(item.target if isinstance(item, ast.AnnAssign) else item.targets[0])


def _member(function: ast.FunctionDef) -> str:
    if any(ast.unparse(mark) == "property" for mark in function.decorator_list):
        return f"{function.name}: {ast.unparse(function.returns)}" if function.returns else function.name
    return _signature(function)


def _signature(function: ast.FunctionDef) -> str:
    arguments = re.sub(r"^(self|cls)(, )?", "", ast.unparse(function.args))
    returned = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{function.name}({arguments}){'' if function.name == '__init__' else returned}"


def _doc(node: Named) -> str:
    return ast.get_docstring(node) or ""


def _doc_behind(body: list[ast.stmt], place: int) -> str:
    """The text that stands behind an attribute."""
    following = body[place + 1] if place + 1 < len(body) else None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) and isinstance(following.value.value, str):
        return following.value.value
    return ""


def _cell(text: str) -> str:
    return " ".join(text.partition(">>>")[0].split()).replace("|", "\\|")


def _prose(text: str) -> str:
    """Paragraphs; pictures and examples are fenced."""
    return "\n\n".join(
        f"```text\n{part}\n```" if part.startswith((" ", ">>>")) or re.search(r"\S {3,}\S", part) else part
        for part in re.split(r"\n\n+", text)
    )
