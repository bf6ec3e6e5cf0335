"""The chosen plugins, in order: registered, validated, and answerable for what they do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import pluggy

from treadle.errors import ConfigError, PluginContractError, PluginError, TreadleError, nearest
from treadle.hookspecs import HOOK_VERSION, Hooks
from treadle.logs import get_logger
from treadle.settings import Choice, Settings

log = get_logger(__name__)
REUSE_TRAIT = "prefix_reuse"
MARK = "treadle_impl"
"""The attribute that `hookimpl` sets on a function."""


class Ledger:
    """Who answered which decision last, and which tells went wrong."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._answers: dict[str, int] = {}
        self.failures: list[PluginError] = []
        """Errors that plugins raised when they were told something; all others were told nonetheless."""

    def record(self, hook: str, plugin: str, answer: object) -> None:
        self._names[hook] = plugin
        # not the answer itself, which may be a model, and would never be given back
        self._answers[hook] = id(answer)

    def has(self, hook: str, answer: object) -> bool:
        """Whether this is the answer that was recorded last."""
        return self._answers.get(hook) == id(answer)

    def note(self, plugin: str, hook: str, error: Exception) -> None:
        """A plugin raised when it was told something."""
        failure = error if isinstance(error, PluginError) else PluginError(plugin, hook, f"{type(error).__name__}: {error}")
        if failure is not error:
            failure.__cause__ = error
        self.failures.append(failure)
        log.error("plugin_failed", plugin=plugin, hook=hook, error=str(error))

    def author(self, hook: str) -> str:
        """The plugin whose answer stood last, or who was asked last when nobody answered."""
        return self._names.get(hook, "core")


@dataclass(frozen=True)
class Registered:
    """A plugin in the stack."""

    name: str
    package: str
    plugin: object
    choice: Choice | None
    unused: str | None = None
    """Why it is not asked anything, when that is so."""


class PluginManager:
    """Builds the pluggy manager from resolved settings, and explains it.

    Plugins are registered in the order of the slots, then those of `plugins`, then `extra` objects; pluggy asks the last first,
    so that a user's plugins stand in front of the built-in strategies.
    """

    def __init__(self, settings: Settings, extra: Iterable[object] = ()) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self.registered: list[Registered] = []
        self._pluggy = pluggy.PluginManager("treadle")
        self._pluggy.add_hookspecs(Hooks)
        self._add_hookspecs_of_strategies()
        for slot in settings.slots:
            self._register_choice(settings.choices[slot.name])
        for choice in settings.plugins:
            self._register_choice(choice)
        for plugin in extra:
            self._register(_name_of(plugin), "added by the program", plugin, None)
        self._guard_all()
        self._check_traits()

    @property
    def hook(self) -> Hooks:
        """The hooks, typed. Called with keyword arguments only."""
        return cast(Hooks, self._pluggy.hook)

    def implements(self, hook: str) -> bool:
        """Whether any plugin implements the hook."""
        return bool(getattr(self._pluggy.hook, hook).get_hookimpls())

    def has_trait(self, trait: str) -> bool:
        return any(trait in _traits(item.plugin) for item in self.registered if item.unused is None)

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
        plugin = choice.make()
        if slot is not None and not any(_is_hookimpl(plugin, hook) for hook in slot.hooks):
            raise ConfigError(
                f"{label} of {choice.offer.package} (from {choice.origin}) implements no hook of its slot: "
                + ", ".join(slot.hooks)
            )
        self._register(label, choice.offer.package, plugin, choice)

    def _register(self, name: str, package: str, plugin: object, choice: Choice | None) -> None:
        version = getattr(plugin, "treadle_hooks", HOOK_VERSION)
        if version != HOOK_VERSION:
            raise ConfigError(
                f"{name} of {package} was written for hook version {version}, this is {HOOK_VERSION}; install a release that fits"
            )
        known = [n for n in vars(self._pluggy.hook) if not n.startswith("_")]
        for attribute in _hookimpls(plugin):
            if attribute not in known and not getattr(getattr(plugin, attribute), MARK).get("optionalhook"):
                raise ConfigError(f"{name} of {package} implements unknown hook {attribute!r}; {nearest(attribute, known)}")
        if self._pluggy.has_plugin(name):
            raise ConfigError(f"two plugins are called {name!r} (the second is from {package}); give one another name")
        try:
            self._pluggy.register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise ConfigError(f"{name} of {package} cannot be registered: {' '.join(str(error).split())}") from error
        self.registered.append(Registered(name, package, plugin, choice))

    def _guard_all(self) -> None:
        for hook in self._hook_callers():
            firstresult = bool(hook.spec and hook.spec.opts["firstresult"])
            for impl in hook.get_hookimpls():
                decides = (_guard_decision, _guard_wrapper)
                guard = (decides if firstresult else (_guard_tell, _guard_tell_wrapper))[impl.wrapper]
                # pluggy has no public place to put code around one implementation
                impl.function = guard(impl.function, hook.name, impl.plugin_name, self.ledger)  # type: ignore[misc]

    def _hook_callers(self) -> list[pluggy.HookCaller]:
        return [caller for name, caller in vars(self._pluggy.hook).items() if not name.startswith("_")]

    def _check_traits(self) -> None:
        for item in self.registered:
            for trait, reason in getattr(item.plugin, "refuses", {}).items():
                for other in self.registered:
                    if other.unused is None and item.unused is None and trait in _traits(other.plugin):
                        origin = other.choice.origin if other.choice else other.package
                        raise ConfigError(f"{item.name} does not go together with {other.name} (from {origin}): {reason}")

    # --- explaining -----------------------------------------------------------------------------------------------------------

    def callers(self) -> list[tuple[str, list[str]]]:
        """For each hook that is implemented, the plugins in the order in which they are called."""
        rows = []
        for hook in self._hook_callers():
            names = [impl.plugin_name + (" (wrapper)" if impl.wrapper else "") for impl in reversed(hook.get_hookimpls())]
            if names:
                rows.append((hook.name, names))
        return rows


def _name_of(plugin: object) -> str:
    name = getattr(plugin, "name", None)
    return name if isinstance(name, str) else type(plugin).__qualname__


def _traits(plugin: object) -> Sequence[str]:
    """What a plugin says of itself that others may refuse to work with. Matching prefixes means reuse, unless it is denied."""
    default = (REUSE_TRAIT,) if _is_hookimpl(plugin, "match_prefix") else ()
    traits: Sequence[str] = getattr(plugin, "traits", default)
    return traits


def _is_hookimpl(plugin: object, attribute: str) -> bool:
    return getattr(inspect.getattr_static(plugin, attribute, None), MARK, None) is not None


def _hookimpls(plugin: object) -> list[str]:
    return [name for name in dir(plugin) if _is_hookimpl(plugin, name)]


def _raise_named(error: Exception, plugin: str, hook: str) -> NoReturn:
    """Raise the error as the plugin's. What start-up hooks say to the user, such as that a model is missing, stays as it is."""
    asked_in_a_step = hasattr(Hooks, hook) and hook not in ("execute", "quantize")
    if isinstance(error, PluginError) or (isinstance(error, TreadleError) and not asked_in_a_step):
        raise error
    raise PluginError(plugin, hook, f"{type(error).__name__}: {error}") from error


def _guard_decision(function: Callable[..., Any], hook: str, plugin: str, ledger: Ledger) -> Callable[..., Any]:
    def guarded(*arguments: Any) -> Any:
        try:
            answer = function(*arguments)
        except Exception as error:  # whatever a plugin raises is named as the plugin's
            _raise_named(error, plugin, hook)
        # None too: when nobody answers, the last one asked is answerable
        ledger.record(hook, plugin, answer)
        return answer

    return guarded


def _guard_wrapper(function: Callable[..., Any], hook: str, plugin: str, ledger: Ledger) -> Callable[..., Any]:
    def guarded(*arguments: Any) -> Generator[None, Any, Any]:
        try:
            answer = yield from function(*arguments)
        except Exception as error:  # as above
            _raise_named(error, plugin, hook)
        if not ledger.has(hook, answer):
            ledger.record(hook, plugin, answer)
        return answer

    return guarded


def _guard_tell(function: Callable[..., Any], hook: str, plugin: str, ledger: Ledger) -> Callable[..., None]:
    def guarded(*arguments: Any) -> None:
        try:
            answer = function(*arguments)
            if answer is not None:
                raise PluginContractError(plugin, hook, "returns nothing", answer)
        except Exception as error:  # the others must hear of it too; the engine looks at the ledger afterwards
            ledger.note(plugin, hook, error)

    return guarded


def _guard_tell_wrapper(function: Callable[..., Any], hook: str, plugin: str, ledger: Ledger) -> Callable[..., Any]:
    def guarded(*arguments: Any) -> Generator[None, Any, Any]:
        wrapper = function(*arguments)
        try:
            next(wrapper)
        except Exception as error:  # as above
            ledger.note(plugin, hook, error)
            return (yield)
        answers = yield
        try:
            wrapper.send(answers)
        except StopIteration:
            pass
        except Exception as error:  # as above
            ledger.note(plugin, hook, error)
        return answers

    return guarded
