"""The chosen plugins, in order: registered, validated, and answerable for what they do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import cast

import pluggy

from treadle.errors import ConfigError
from treadle.guards import Ledger, guard
from treadle.hook_changes import since
from treadle.hook_impls import check_hookimpls, hookimpls, is_hookimpl
from treadle.hookspecs import HOOK_VERSION, Hooks
from treadle.plugin import Checker, Face, Trait, claim_extras, name_of, read_face
from treadle.settings import Choice, Settings

CORE = "core"
OWN_PACKAGE = "treadle"


@dataclass(frozen=True)
class Registered:
    """A plugin in the stack."""

    name: str
    package: str
    plugin: object
    choice: Choice | None
    unused: str | None = None
    """Why it is not asked anything, when that is so."""


@dataclass(frozen=True)
class HookFacts:
    """A hook, for people."""

    name: str
    kind: str
    """`decide`, `tell` or `register`."""
    owner: str
    """`core`, or the plugin that brings and calls it."""
    function: FunctionType
    """Its specification, with signature and docstring."""


class _Pluggy(pluggy.PluginManager):
    """Looks at what is marked, and at nothing else: some releases read every property of a plugin."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        return super().parse_hookimpl_opts(plugin, name) if is_hookimpl(plugin, name) else None


class PluginManager:
    """Builds the pluggy manager from resolved settings, and explains it.

    Plugins are registered in the order of the slots, then those of `plugins`, then `extra` objects. pluggy calls the last first:
    that is the order in which they are told. Asked are strangers before what Treadle itself brings, whatever slot each fills.
    """

    def __init__(self, settings: Settings, extra: Iterable[object] = ()) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self.registered: list[Registered] = []
        self._faces: dict[str, Face] = {}
        self._pluggy = _Pluggy("treadle")
        self._pluggy.add_hookspecs(Hooks)
        self._add_hookspecs_of_strategies()
        for slot in settings.slots:
            self._register_choice(settings.choices[slot.name])
        for choice in settings.plugins:
            self._register_choice(choice)
        for plugin in _objects(extra):
            name, package = name_of(plugin), "added by the program"
            self._register(name, package, self._checked(plugin, name, package), None)
        self._ask_strangers_first()
        for caller in self._hooks().values():
            guard(caller, self.ledger)
        self._check_traits()
        self.extras: Mapping[str, tuple[str, Checker]] = claim_extras(self._faces)
        """For each namespace of `SamplingParams.extra` that is claimed: the plugin, and what checks a value."""

    @property
    def hook(self) -> Hooks:
        """The hooks, typed. Called with keyword arguments only."""
        return cast(Hooks, self._pluggy.hook)

    def implements(self, hook: str) -> bool:
        """Whether any plugin implements the hook."""
        return bool(getattr(self._pluggy.hook, hook).get_hookimpls())

    def has_trait(self, trait: str) -> bool:
        """Whether any plugin has it."""
        return any(trait in face.traits for face in self._faces.values())

    def author(self, hook: str) -> str:
        """Who is answerable for the last answer, for errors."""
        return self.ledger.author(hook)

    # --- building -------------------------------------------------------------------------------------------------------------

    def _add_hookspecs_of_strategies(self) -> None:
        for choice in (*self.settings.choices.values(), *self.settings.plugins):
            specs = getattr(choice.factory, "hookspecs", None)
            if specs is not None:
                self._pluggy.add_hookspecs(specs)

    def _register_choice(self, choice: Choice) -> None:
        label = choice.offer.label
        slot = next((slot for slot in self.settings.slots if slot.name == choice.offer.kind), None)
        if slot is not None and not any(hasattr(self._pluggy.hook, hook) for hook in slot.hooks):
            why = f"the executor {self.settings.choices['execute'].offer.label} has no hook {' or '.join(slot.hooks)}"
            self.registered.append(Registered(label, choice.offer.package, choice.factory, choice, why))
            return
        plugin = self._checked(choice.make(), label, choice.offer.package)
        if slot is not None and not any(is_hookimpl(plugin, hook) for hook in slot.hooks):
            raise ConfigError(
                f"{label} of {choice.offer.package} (from {choice.origin}) implements no hook of its slot: "
                + ", ".join(slot.hooks)
            )
        self._register(label, choice.offer.package, plugin, choice)

    def _checked(self, plugin: object, name: str, package: str) -> object:
        """The plugin, of which all is right that can be known before it is asked. Raises ConfigError."""
        label = f"{name} of {package}" if package else name
        if inspect.isclass(plugin):
            raise ConfigError(f"{label} is a class, not a plugin; hand over an object of it: {plugin.__name__}()")
        implied = [Trait.PREFIX_REUSE] if is_hookimpl(plugin, "match_prefix") else []
        face = read_face(plugin, label, implied=implied)
        if face.version not in (None, HOOK_VERSION):
            raise ConfigError(_of_another_version(label, face.version, plugin))
        check_hookimpls(plugin, label, self._hooks())
        if self._pluggy.has_plugin(name):
            raise ConfigError(f"two plugins are called {name!r} (the second is from {package}); give one another name")
        self._faces[name] = face
        return plugin

    def _register(self, name: str, package: str, plugin: object, choice: Choice | None) -> None:
        if not hookimpls(plugin):
            raise ConfigError(f"{name} of {package} implements no hook, so it does nothing; mark its methods @treadle.hookimpl")
        try:
            self._pluggy.register(plugin, name)
        except Exception as error:  # pluggy's own errors, and whatever reading a plugin raises
            raise ConfigError(f"{name} of {package} cannot be registered: {' '.join(str(error).split())}") from error
        self.registered.append(Registered(name, package, plugin, choice))

    def _ask_strangers_first(self) -> None:
        """Put strangers' answers before those of built-in strategies, which answer for everybody, or raise where they cannot.

        Asked first to last: tryfirst and plain ones of strangers, then the built-in ones, then those that want to be last,
        strangers' before built-in ones. Plugins of one kind keep their order.
        """
        own = {item.name for item in self.registered if item.package.partition(" ")[0] == OWN_PACKAGE}
        for hook in self._hooks().values():
            if hook.spec and hook.spec.opts["firstresult"]:
                # pluggy has no public place to order implementations of one hook; it calls the last first
                hook._hookimpls.sort(key=lambda impl: _rank(impl, impl.plugin_name in own))

    def _hooks(self) -> dict[str, pluggy.HookCaller]:
        return {name: caller for name, caller in vars(self._pluggy.hook).items() if not name.startswith("_")}

    def _check_traits(self) -> None:
        named = {item.name: item for item in self.registered}
        for name, face in self._faces.items():
            for trait, reason in face.refuses.items():
                for other in (named[other] for other, its in self._faces.items() if trait in its.traits):
                    origin = other.choice.origin if other.choice else other.package
                    raise ConfigError(f"{name} does not go together with {other.name} (from {origin}): {reason}")

    # --- explaining -----------------------------------------------------------------------------------------------------------

    def hooks(self) -> list[HookFacts]:
        """Every hook of the stack: the core's, then those that plugins bring; each in the order in which it is written."""
        facts = [self._facts(hook) for hook in self._hooks().values() if hook.spec]
        return sorted(facts, key=lambda hook: (hook.owner != CORE, hook.owner, hook.function.__code__.co_firstlineno))

    def _facts(self, hook: pluggy.HookCaller) -> HookFacts:
        assert hook.spec is not None
        function, namespace = hook.spec.function, hook.spec.namespace
        assert inspect.isfunction(function), f"{hook.name} is specified by a {type(function).__name__}"
        kind = "decide" if hook.spec.opts["firstresult"] else "tell"
        choices = (*self.settings.choices.values(), *self.settings.plugins)
        brought = (choice.offer.label for choice in choices if getattr(choice.factory, "hookspecs", None) is namespace)
        return HookFacts(hook.name, kind, next(brought, CORE), function)

    def callers(self) -> list[tuple[str, list[str]]]:
        """For each hook that is implemented, the plugins in the order in which they are called."""
        rows = []
        for hook in self._hooks().values():
            names = [impl.plugin_name + (" (wrapper)" if impl.wrapper else "") for impl in reversed(hook.get_hookimpls())]
            if names:
                rows.append((hook.name, names))
        return rows


def _objects(extra: object) -> Iterable[object]:
    """The plugins that a program hands over. Raises ConfigError for what is none at a glance."""
    if isinstance(extra, str) or not isinstance(extra, Iterable):
        raise ConfigError(f"plugins={extra!r} is not a list of plugins; write plugins=[...]")
    for plugin in extra:
        if plugin is None or isinstance(plugin, (str, bytes, int, float, Mapping)):
            raise ConfigError(
                f"{plugin!r} among the plugins is a {type(plugin).__name__}, not an object with hooks; name what is installed, "
                'or module:Class, in the configuration: plugins = ["..."]'
            )
        yield plugin


def _of_another_version(label: str, version: int | None, plugin: object) -> str:
    was = f"{label} was written for hook version {version}, this is {HOOK_VERSION}"
    if version is None or version > HOOK_VERSION:
        return f"{was}; install a newer treadle, or a release of it for this one"
    changes = since(version, hookimpls(plugin))
    if not changes:
        return (
            f"{was}. No hook that it implements has changed: install a release that fits, or state treadle_hooks = {HOOK_VERSION}"
        )
    lines = "".join(f"\n- {change.do}" for change in changes)
    return f"{was}; install a release that fits, or change it and state treadle_hooks = {HOOK_VERSION}:{lines}"


def _rank(impl: pluggy.HookImpl, is_own: bool) -> tuple[bool, bool, bool, bool]:
    """Where it stands among a hook's implementations, the last to be asked first. Wrappers stand around all others."""
    return impl.wrapper, not impl.trylast, not is_own, impl.tryfirst
