"""What the core reads on a plugin, beside its hooks; and whether an object is what a Protocol asks for."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from treadle.errors import ConfigError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel

Checker = Callable[[object], object]
"""Gets a caller's value, returns the checked one. Raises ValueError or a TreadleError that says what is wrong with it."""


class Trait(str, enum.Enum):
    """What a plugin may say of itself, so that others can refuse to work with it. Its value, a text, stands for it too."""

    PREFIX_REUSE = "prefix_reuse"
    """Requests may use blocks that others computed. Implied by a hook `match_prefix`, unless `traits` says otherwise."""
    CHUNKED_PREFILL = "chunked_prefill"
    """A prompt may be computed in several steps."""
    RECOMPUTE = "recompute"
    """A preempted request's KV may be given up and computed again."""
    URGENT_REQUESTS_PREEMPT = "urgent_requests_preempt"
    """A waiting request may take the place of a running one of lower priority."""

    def __str__(self) -> str:
        return self.value


class Plugin(Protocol):
    """All that the core reads on a plugin, beside the methods that are marked `@treadle.hookimpl`.

    A plugin is an object, or a module. It needs none of these attributes; it may inherit from this class, so that a type checker
    looks at those that it has. Whatever else it has is its own, but for one rule: a method that is named like a hook must be
    marked as one. A helper that is none begins with an underscore.
    """

    name: str = ""
    """Name in errors and in `treadle explain`; by default the class's. Strategies are called `slot.name` instead."""
    Settings: ClassVar[type[BaseModel] | None] = None
    """The settings of a strategy or a configured plugin, a `treadle.StrategySettings`; its instance goes to the constructor."""
    traits: Collection[Trait | str] | None = None
    """What others may refuse to work with; None means what follows from the hooks. A trait of your own has a dot in its name,
    such as "mypackage.slow_start": the core does nothing with it, but other plugins may refuse it."""
    refuses: Mapping[Trait | str, str] = MappingProxyType({})
    """For each trait that this plugin does not go together with: why, and what to do, for the user."""
    hookspecs: ClassVar[type | None] = None
    """A class of hook specifications that this plugin brings and calls."""
    slots: ClassVar[Sequence[Any]] = ()
    """Slots that the configuration has with this executor and not with others, each a `treadle.registry.Slot`."""
    check_configuration: ClassVar[Callable[[Any, Any], None] | None] = None
    """A static method that is given this plugin's settings and the whole `treadle.Settings` when all is resolved: it raises
    ConfigError for what the plugin could not run with."""
    treadle_hooks: int | None = None
    """The `treadle.hookspecs.HOOK_VERSION` that it was written for; None means that it fits any."""
    extras: Mapping[str, Checker] = MappingProxyType({})
    """Namespaces of `SamplingParams.extra` that this plugin claims, each with a function that checks the caller's value."""


@dataclass(frozen=True)
class Face:
    """A plugin's attributes, read once and checked."""

    version: int | None
    traits: frozenset[str]
    refuses: Mapping[str, str]
    extras: Mapping[str, Checker]


def read_face(plugin: object, label: str, *, implied: Collection[Trait] = ()) -> Face:
    """Read what a plugin says of itself; `implied` are its traits where it says nothing. Raises ConfigError that names it."""
    return Face(
        version=_version(plugin, label),
        traits=_traits(plugin, label, implied),
        refuses=_refuses(plugin, label),
        extras=_extras(plugin, label),
    )


def name_of(plugin: object) -> str:
    """What a plugin is called that no configuration names."""
    name = getattr(plugin, "name", None)
    if isinstance(name, str) and name:
        return name
    if inspect.ismodule(plugin):
        return plugin.__name__
    return plugin.__qualname__ if inspect.isclass(plugin) else type(plugin).__qualname__


def missing_members(protocol: type, value: object) -> list[str]:
    """Members of `protocol` that `value` lacks, in the order in which they are declared.

    Unlike isinstance, it asks the object itself, so that one that passes on by `__getattr__` counts, on every Python alike. What
    a property raises, other than AttributeError, is raised.
    """
    return [name for name, is_method in _members(protocol).items() if not _has(value, name, is_method)]


def _members(protocol: type) -> dict[str, bool]:
    """By name, whether it is a method."""
    found: dict[str, bool] = {}
    for base in reversed(protocol.__mro__):
        if not getattr(base, "_is_protocol", False) or base.__module__ == "typing":
            continue
        names = [*vars(base).get("__annotations__", {}), *vars(base)]
        for name in names:
            if not name.startswith("_") or name == "__call__":
                found[name] = inspect.isfunction(vars(base).get(name))
    return found


def _has(value: object, name: str, is_method: bool) -> bool:
    try:
        member = getattr(value, name)
    except AttributeError:
        return False
    return callable(member) or not is_method


def _read(plugin: object, attribute: str, label: str, default: object) -> Any:
    try:
        return getattr(plugin, attribute, default)
    except Exception as error:  # a property of a stranger's may raise anything
        raise ConfigError(f"{label}: its {attribute!r} cannot be read: {type(error).__name__}: {error}") from error


def _version(plugin: object, label: str) -> int | None:
    version = _read(plugin, "treadle_hooks", label, None)
    if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
        raise ConfigError(f"{label}: treadle_hooks={version!r} is not a whole number such as 2")
    return version


def _traits(plugin: object, label: str, implied: Collection[Trait]) -> frozenset[str]:
    traits = _read(plugin, "traits", label, None)
    if traits is None:
        return frozenset(implied)
    if isinstance(traits, str) or not isinstance(traits, Collection):
        raise ConfigError(f"{label}: traits={traits!r} is not a collection of traits; write traits = (Trait.RECOMPUTE,)")
    return frozenset(_trait(trait, "traits", label) for trait in traits)


def _refuses(plugin: object, label: str) -> Mapping[str, str]:
    refuses = _read(plugin, "refuses", label, {})
    if not isinstance(refuses, Mapping):
        raise ConfigError(
            f"{label}: refuses={refuses!r} does not say why; write a table such as refuses = {{Trait.PREFIX_REUSE: 'reason'}}"
        )
    for trait, reason in refuses.items():
        if not isinstance(reason, str) or not reason:
            raise ConfigError(f"{label}: refuses[{str(trait)!r}]={reason!r} is not a reason for the user")
    return {_trait(trait, "refuses", label): reason for trait, reason in refuses.items()}


def _trait(trait: object, attribute: str, label: str) -> str:
    """A trait's text. One that is not the core's has a dot, so that a misspelt one cannot be taken for somebody's own."""
    if not isinstance(trait, str):
        raise ConfigError(f"{label}: {trait!r} in its {attribute} is no trait, but a {type(trait).__name__}")
    known = [known.value for known in Trait]
    text = trait.value if isinstance(trait, Trait) else trait
    own = [part.isidentifier() for part in text.split(".")]
    if text not in known and not (len(own) > 1 and all(own)):
        raise ConfigError(
            f"{label}: unknown trait {text!r} in its {attribute}; {nearest(text, known)} "
            "A trait of your own has a dot in its name: 'mypackage.something'"
        )
    return text


def _extras(plugin: object, label: str) -> Mapping[str, Checker]:
    extras = _read(plugin, "extras", label, {})
    if not isinstance(extras, Mapping):
        raise ConfigError(f"{label}: extras={extras!r} is not a table of namespaces, each with a function that checks its value")
    for namespace, checker in extras.items():
        if not isinstance(namespace, str) or not namespace:
            raise ConfigError(f"{label}: {namespace!r} in its extras is not the name of a namespace")
        if not callable(checker):
            raise ConfigError(f"{label}: extras[{namespace!r}]={checker!r} cannot be called to check a value")
    return dict(extras)


def claim_extras(faces: Mapping[str, Face]) -> dict[str, tuple[str, Checker]]:
    """For each namespace of `SamplingParams.extra`, the plugin that claims it and its checker. Two claims are a ConfigError."""
    claims: dict[str, tuple[str, Checker]] = {}
    for name, face in faces.items():
        for namespace, checker in face.extras.items():
            if namespace in claims:
                raise ConfigError(
                    f"{claims[namespace][0]} and {name} both claim the namespace {namespace!r} of SamplingParams.extra; "
                    "leave one of them out"
                )
            claims[namespace] = (name, checker)
    return claims
