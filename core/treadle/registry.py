"""Slots and strategies: which packages offer what. A strategy is imported only when it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, distributions
from typing import Any

from treadle.errors import ConfigError, nearest
from treadle.hook_changes import about_gone

GROUP = "treadle"
"""The entry-point group: `slot.name` for strategies, `plugin.name` for other plugins, `command.name` for commands."""


@dataclass(frozen=True)
class Slot:
    """A place in the configuration that is filled by one strategy."""

    name: str
    hooks: tuple[str, ...]
    """Decisions of this slot; a strategy implements at least one of them."""
    default: str


SLOTS = (
    # The order is that of registration. pluggy calls last-registered first, so tells reach the policies at the end of this tuple
    # first: the executor and the block-keeping strategies hear of a change before those that only order or admit by it.
    Slot("accept", ("accept",), "queue_limit"),
    Slot("order", ("order",), "fcfs"),
    Slot("admit", ("gate", "admit"), "continuous"),
    Slot("budget", ("budget",), "decode_first"),
    Slot("release", ("release",), "at_once"),
    Slot("preempt", ("preempt",), "recompute"),
    # evict before prefix and allocate: blocks that leave the index reach the matcher and the free list before the eviction queue.
    Slot("evict", ("evict",), "lru"),
    Slot("prefix", ("match_prefix",), "hash_chain"),
    Slot("allocate", ("allocate",), "paged"),
    Slot("quantize", ("quantize",), "none"),
    Slot("execute", ("execute",), "torch"),
)
"""The core's slots. An executor may bring slots of its own, as `slots` of its strategy's class."""
SLOT = {slot.name: slot for slot in SLOTS}
NO_SLOTS = frozenset({"plugin", "command"})
"""Kinds of offers that fill no slot."""


def with_slots_of(executor: Any, label: str) -> tuple[Slot, ...]:
    """The core's slots and those that an executor's class brings. Raises ConfigError, with the label, when these are unusable."""
    own = getattr(executor, "slots", ())
    if not (isinstance(own, tuple) and all(isinstance(slot, Slot) for slot in own)):
        raise ConfigError(f"{label}: its `slots` are {own!r}, not a tuple of treadle.registry.Slot")
    names = [slot.name for slot in own]
    for name in names:
        if not name.isidentifier() or name != name.lower() or name in SLOT or name in NO_SLOTS or names.count(name) > 1:
            raise ConfigError(f"{label}: it brings a slot {name!r}, a name that is taken or cannot be used; give it another")
    # before the executor, whose hooks stay the first to be called
    return (*SLOTS[:-1], *own, SLOTS[-1])


@dataclass(frozen=True)
class Offer:
    """Something that a package offers under a name: a strategy of a slot, a plugin or a command."""

    kind: str
    """A slot's name, `plugin` or `command`."""
    name: str
    package: str
    """Distribution and version, for people."""
    load: Callable[[], Any]
    """Import it. Raises ConfigError when a module that it needs is missing."""
    source: str = ""
    """Where the object is, as `module:attribute`."""

    @property
    def label(self) -> str:
        return f"{self.kind}.{self.name}"


class Registry:
    """All that installed packages offer."""

    def __init__(self, offers: Iterable[Offer]) -> None:
        self._offers: dict[tuple[str, str], list[Offer]] = {}
        for offer in offers:
            self._offers.setdefault((offer.kind, offer.name), []).append(offer)

    @classmethod
    def installed(cls) -> Registry:
        """Read the entry points of all installed distributions; imports none of them."""
        return cls(_installed_offers())

    def with_offers(self, offers: Iterable[Offer]) -> Registry:
        """A registry that knows these as well."""
        return Registry([*self, *offers])

    def __iter__(self) -> Iterator[Offer]:
        for offers in self._offers.values():
            yield from offers

    def names(self, kind: str) -> list[str]:
        return sorted(name for known, name in self._offers if known == kind)

    def find(self, kind: str, name: str, origin: str) -> Offer:
        """The offer of that name, or the object that `module:attribute` names.

        Raises ConfigError, which says where the name was set, when there is no offer or more than one.
        """
        if ":" in name and kind != "command":
            return load_object(name, origin, kind)
        offers = self._offers.get((kind, name), [])
        if not offers:
            what = f"{kind} {name!r}" if kind in NO_SLOTS else f"strategy {name!r} for slot {kind!r}"
            raise ConfigError(f"unknown {what} (from {origin}); {nearest(name, self.names(kind))}")
        if len(offers) > 1:
            packages = " and ".join(sorted(f"{offer.package} ({offer.source})" for offer in offers))
            raise ConfigError(f"{kind}.{name} (from {origin}) is offered by {packages}; uninstall or rename one of them")
        return offers[0]

    def slots(self) -> tuple[Slot, ...]:
        """The core's slots, and those of all executors that are offered and can be imported."""
        found: dict[str, Slot] = {}
        for _, slots in self._executors():
            found |= {slot.name: slot for slot in slots if slot.name not in SLOT}
        return (*SLOTS[:-1], *found.values(), SLOTS[-1])

    def owners(self, slot: str) -> list[str]:
        """Labels of the executors that bring a slot of this name."""
        return [offer.label for offer, slots in self._executors() if slot in {known.name for known in slots} - set(SLOT)]

    def _executors(self) -> Iterator[tuple[Offer, tuple[Slot, ...]]]:
        for offer in self:
            if offer.kind == "execute":
                try:
                    yield offer, with_slots_of(offer.load(), offer.label)
                except ConfigError:
                    continue  # it says what is wrong when it is chosen


def load_object(path: str, origin: str, kind: str = "plugin") -> Offer:
    """A plugin or strategy named by `module:attribute` instead of by an entry point."""
    module, _, attribute = path.partition(":")
    return Offer(
        kind,
        path,
        f"module {module}",
        lambda: _import(module, attribute, path, f"from {origin}; its folder must be on PYTHONPATH"),
        path,
    )


def _installed_offers() -> Iterator[Offer]:
    seen: set[tuple[str, str, str]] = set()
    for distribution in distributions():
        # a distribution may be found twice, in an editable checkout and in site-packages; read the name only where needed
        points = [point for point in distribution.entry_points if point.group == GROUP]
        for point in points:
            name = distribution.metadata["Name"]
            if (name, point.name, point.value) in seen:
                continue
            seen.add((name, point.name, point.value))
            yield _offer(point, f"{name} {distribution.version}")


def _offer(point: EntryPoint, package: str) -> Offer:
    kind, _, name = point.name.partition(".")
    source = point.value.partition("[")[0].strip()
    module, _, attribute = source.partition(":")
    extras = point.value.partition("[")[2].rstrip("] ")
    hint = f"pip install '{package.split(maxsplit=1)[0]}[{extras}]'" if extras else f"install what {package} needs"
    plain = Offer(kind, name, package, lambda: None, source)
    return replace(plain, load=lambda: _import(module, attribute, f"{point.name} of {package}", hint))


def _import(module: str, attribute: str, what: str, hint: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        change = about_gone(error.name or "")
        why = f"which is not installed ({hint})" if change is None else change.do
        raise ConfigError(f"{what} needs the module {error.name!r}, {why}") from error
    except Exception as error:  # a stranger's module may raise anything while it is imported
        raise ConfigError(f"{what} cannot be imported from {module!r}: {type(error).__name__}: {error}") from error
    for part in attribute.split(".") if attribute else ():
        if not hasattr(found, part):
            near = nearest(part, [name for name in dir(found) if not name.startswith("_")])
            guess = f"; {near}" if near.startswith("did you mean") else ""
            raise ConfigError(f"{what} names {module}:{attribute}, but {module!r} has no {part!r} ({hint}){guess}")
        found = getattr(found, part)
    return found
