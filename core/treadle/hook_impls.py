"""The hook implementations of a plugin, and what can be known to be wrong with them before anything is asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pluggy

from treadle.errors import ConfigError, nearest
from treadle.hook_changes import about_argument, about_gone

MARK = "treadle_impl"
"""The attribute that `hookimpl` sets on a function."""


def is_hookimpl(plugin: object, attribute: str) -> bool:
    """Whether an attribute is marked as a hook implementation. No property is read."""
    return getattr(inspect.getattr_static(plugin, attribute, None), MARK, None) is not None


def hookimpls(plugin: object) -> list[str]:
    """Names of all that is marked."""
    return [name for name in dir(plugin) if is_hookimpl(plugin, name)]


def check_hookimpls(plugin: object, label: str, hooks: Mapping[str, pluggy.HookCaller]) -> None:
    """Raise ConfigError, which begins with `label`, for whatever would never be called, or not as it is meant."""
    marked = hookimpls(plugin)
    for name in marked:
        if name in hooks:
            _check(_function(plugin, name, label), label, hooks[name])
        elif not _options(plugin, name).get("optionalhook"):
            change = about_gone(name)
            raise ConfigError(f"{label} implements unknown hook {name!r}; {change.do if change else nearest(name, hooks)}")
    for name in dir(plugin):
        if (name in hooks or about_gone(name)) and name not in marked and _is_method(plugin, name):
            change = None if name in hooks else about_gone(name)
            raise ConfigError(
                f"{label} has a method {name!r}, which is named like a hook, but not marked @treadle.hookimpl, so that it would "
                f"never be called; {change.do if change else f'mark it, or call it _{name} if it is none'}"
            )


def _options(plugin: object, name: str) -> dict[str, Any]:
    options: dict[str, Any] = getattr(inspect.getattr_static(plugin, name), MARK)
    return options


def _is_method(plugin: object, name: str) -> bool:
    found = inspect.getattr_static(plugin, name, None)
    return callable(getattr(found, "__func__", found))


def _function(plugin: object, name: str, label: str) -> Callable[..., Any]:
    """What pluggy will call. It looks for marks on functions only."""
    function = getattr(plugin, name)
    if not inspect.isroutine(function) or getattr(function, MARK, None) is None:
        raise ConfigError(
            f"{label}: {name!r} is marked @treadle.hookimpl, but is no plain function, so that it would never be called; "
            "the mark stands right above `def`, beneath other decorators"
        )
    found: Callable[..., Any] = function
    return found


def _check(function: Callable[..., Any], label: str, hook: pluggy.HookCaller) -> None:
    options = getattr(function, MARK)
    if options.get("hookwrapper"):
        raise ConfigError(
            f"{label}: {hook.name!r} is a wrapper of the old kind; write hookimpl(wrapper=True) and return an answer"
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{label}: {hook.name!r} is async; hooks are plain functions, called on the stepping thread")
    if inspect.isgeneratorfunction(function) and not options.get("wrapper") and not _may_be_lazy(hook):
        raise ConfigError(
            f"{label}: {hook.name!r} yields; write hookimpl(wrapper=True) if it is to stand around other answers, else return one"
        )
    for parameter in inspect.signature(function).parameters.values():
        _check_parameter(parameter, label, hook)


def _may_be_lazy(hook: pluggy.HookCaller) -> bool:
    """Whether the hook's answer may be an iterator, so that a generator function can give it."""
    if hook.spec is None or not hook.spec.opts["firstresult"]:
        return False
    returns = str(getattr(hook.spec.function, "__annotations__", {}).get("return", "Iterable["))
    return "Iterable[" in returns or "Iterator[" in returns


def _check_parameter(parameter: inspect.Parameter, label: str, hook: pluggy.HookCaller) -> None:
    """A hook's arguments come by position to parameters without default, in whatever order they have."""
    known = hook.spec.argnames if hook.spec else ()
    name = parameter.name
    by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    if not by_position or (parameter.default is not parameter.empty and name in known):
        raise ConfigError(
            f"{label}: the argument {name!r} of {hook.name!r} would never be passed; take some of "
            f"{', '.join(known) or 'no arguments'}, each by its name and without a default"
        )
    if parameter.default is parameter.empty and name not in known:
        change = about_argument(hook.name, name)
        raise ConfigError(
            f"{label} asks the hook {hook.name!r} for an argument {name!r} that it does not have; "
            f"{change.do if change else nearest(name, known)}"
        )
