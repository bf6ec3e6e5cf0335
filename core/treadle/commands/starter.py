"""The configuration file that `treadle config init` writes: every setting of the default strategies, with its docstring."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from treadle.registry import SLOT, Registry, Slot, with_slots_of
from treadle.settings import Root

HEAD = """\
# Configuration of Treadle. A setting that is commented out has its default; remove the "#" to change it.
# Environment variables such as TREADLE_ADMIT__MAX_BATCH_SIZE=24 win over this file, and so does --set admit.max_batch_size=24.
"""


def starter(registry: Registry) -> str:
    """The whole file. Loading it gives exactly the defaults. Raises ConfigError when a default strategy cannot be imported."""
    root = Root()
    lines = [HEAD, *_settings(root, skip={"plugin"})]
    executor = registry.find("execute", SLOT["execute"].default, "default")
    for slot in with_slots_of(executor.load(), executor.label):
        lines += ["", *_slot(slot, registry)]
    lines += ["", f"# {Root.model_fields['plugin'].description}", "# [plugin.NAME]", ""]
    return "\n".join(lines)


def _slot(slot: Slot, registry: Registry) -> Iterator[str]:
    yield f"# Strategies: {', '.join(registry.names(slot.name))}. {_purpose(slot)}".rstrip()
    yield f"[{slot.name}]"
    yield f"strategy = {toml(slot.default)}"
    model = getattr(registry.find(slot.name, slot.default, "default").load(), "Settings", None)
    if model is not None:
        yield from _settings(model(), (slot.name,))


def _purpose(slot: Slot) -> str:
    """The question that the slot's first hook asks, from its docstring."""
    from treadle.hookspecs import Hooks

    hook = getattr(Hooks, slot.hooks[-1], None)
    return hook.__doc__.strip().splitlines()[0] if hook is not None and hook.__doc__ else ""


def _settings(values: BaseModel, path: tuple[str, ...] = (), skip: Iterable[str] = ()) -> Iterator[str]:
    """Lines of a table's own settings, then those of the tables in it."""
    inner: list[tuple[str, BaseModel, FieldInfo]] = []
    for name, field in type(values).model_fields.items():
        value = getattr(values, name)
        if name in skip:
            continue
        if isinstance(value, BaseModel):
            inner.append((name, value, field))
            continue
        yield from _comment(field)
        yield f"#{name} = {toml(value)}" if value is not None else f"# {name} = ...   (unset)"
    for name, table, field in inner:
        yield ""
        yield from _comment(field)
        yield f"[{'.'.join((*path, name))}]"
        yield from _settings(table, (*path, name))


def _comment(field: FieldInfo) -> Iterator[str]:
    for line in (field.description or "").splitlines():
        yield f"# {line}".rstrip()
    if get_origin(field.annotation) is Literal:
        yield f"# One of {', '.join(toml(choice) for choice in get_args(field.annotation))}."


def toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, ByteSize):
        return _size(value)
    if isinstance(value, bool | int | float):
        return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return json.dumps(str(value), ensure_ascii=False)


def _size(size: ByteSize) -> str:
    """Whole GiB, MiB or KiB where that is exact."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << power) == 0:
            return f'"{size >> power}{unit}"'
    return str(int(size))
