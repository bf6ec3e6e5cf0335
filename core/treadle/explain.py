"""The resolved stack, for `treadle explain`: strategies, settings with their origins, and who answers each hook."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.plugin_manager import PluginManager, Registered
    from treadle.settings import Choice
    from treadle.sources import Path_

WRAPPER = " (wrapper)"


def describe(manager: PluginManager) -> dict[str, Any]:
    """Everything that `treadle explain` says, ready for JSON.

    Keys: `settings` (name, value, origin), `slots` and `plugins` (strategy or name, package, source, origin, unused, settings),
    `hooks` (hook, and its implementations in call order) and `notes`.
    """
    settings = manager.settings
    by_label = {item.name: item for item in manager.registered}
    slots = {slot.name for slot in settings.slots}
    root = settings.root.model_dump(mode="json", exclude={"plugin"})
    return {
        "settings": list(_rows(root, (), settings.origins)),
        "slots": [
            {"slot": slot.name, **_choice(settings.choices[slot.name], (slot.name,), by_label, settings.origins)}
            for slot in settings.slots
        ],
        "plugins": [
            _plugin(item, by_label, settings.origins)
            for item in manager.registered
            if item.choice is None or item.choice.offer.kind not in slots
        ],
        "hooks": [_hook(hook, names, by_label) for hook, names in manager.callers()],
        "notes": [*settings.notes, *(f"{item.name} is not asked: {item.unused}" for item in manager.registered if item.unused)],
    }


def _plugin(item: Registered, by_label: Mapping[str, Registered], origins: Mapping[Path_, str]) -> dict[str, Any]:
    if item.choice is None:
        return {"strategy": item.name, "package": item.package, "source": "", "origin": item.package, "settings": []}
    return _choice(item.choice, ("plugin", item.choice.offer.name), by_label, origins)


def _choice(choice: Choice, path: Path_, by_label: Mapping[str, Registered], origins: Mapping[Path_, str]) -> dict[str, Any]:
    values = {} if choice.settings is None else choice.settings.model_dump(mode="json")
    item = by_label.get(choice.offer.label)
    return {
        "strategy": choice.offer.name,
        "package": choice.offer.package,
        "source": choice.offer.source,
        "origin": choice.origin,
        "unused": item.unused if item else None,
        "settings": list(_rows(values, path, origins)),
    }


def _rows(values: Mapping[str, Any], path: Path_, origins: Mapping[Path_, str]) -> Iterable[dict[str, Any]]:
    """A record for each setting. Names within a table of the settings' own are joined by dots."""
    for name, value in values.items():
        here = (*path, name)
        if isinstance(value, Mapping) and value:
            for row in _rows(value, here, origins):
                yield {**row, "name": f"{name}.{row['name']}"}
        else:
            yield {"name": name, "value": value, "origin": _origin(here, origins)}


def _origin(path: Path_, origins: Mapping[Path_, str]) -> str:
    """Where a value was set. A list or table may have been set as a whole, or in part."""
    for known, origin in origins.items():
        if known == path or known[: len(path)] == path:
            return origin
    return "default"


def _hook(hook: str, names: Iterable[str], by_label: Mapping[str, Registered]) -> dict[str, Any]:
    implementations = []
    for name in names:
        plain = name.removesuffix(WRAPPER)
        item = by_label.get(plain)
        implementations.append({"plugin": plain, "package": item.package if item else "", "wrapper": name.endswith(WRAPPER)})
    return {"hook": hook, "implementations": implementations}


# --- for people -----------------------------------------------------------------------------------------------------------


def as_text(facts: Mapping[str, Any]) -> str:
    """What `describe` found, for people."""
    lines = ["settings", *_settings_lines(facts["settings"], "  "), "", "slots"]
    for slot in facts["slots"]:
        lines += _choice_lines(f"{slot['slot']} = {slot['strategy']}", slot)
    lines += ["", "plugins that fill no slot"]
    for plugin in facts["plugins"]:
        lines += _choice_lines(plugin["strategy"], plugin)
    if not facts["plugins"]:
        lines.append("  none")
    lines += ["", "hooks, in call order", *_hook_lines(facts["hooks"])]
    if facts["notes"]:
        lines += ["", "notes", *(f"  {note}" for note in facts["notes"])]
    return "\n".join(lines)


def _choice_lines(title: str, choice: Mapping[str, Any]) -> list[str]:
    unused = "; not asked" if choice.get("unused") else ""
    head = f"  {title}  [{choice['package']}, {choice['source']}; {choice['origin']}{unused}]"
    return [head, *_settings_lines(choice["settings"], "      ")]


def _settings_lines(settings: Iterable[Mapping[str, Any]], indent: str) -> list[str]:
    cells = [(row["name"], show(row["value"]), row["origin"]) for row in settings]
    widths = [max((len(cell[column]) for cell in cells), default=0) for column in (0, 1)]
    return [f"{indent}{name:{widths[0]}} = {value:{widths[1]}}  ({origin})" for name, value, origin in cells]


def show(value: Any) -> str:
    """A value as the configuration file would have it."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


def _hook_lines(hooks: Iterable[Mapping[str, Any]]) -> list[str]:
    hooks = list(hooks)
    width = max((len(hook["hook"]) for hook in hooks), default=0)
    lines = []
    for hook in hooks:
        names = [
            item["plugin"] + (WRAPPER if item["wrapper"] else "") + (f" [{item['package']}]" if item["package"] else "")
            for item in hook["implementations"]
        ]
        lines += [f"  {hook['hook']:{width}}  {names[0]}", *(f"  {'':{width}}  {name}" for name in names[1:])]
    return lines
