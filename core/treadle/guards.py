"""Code around every hook implementation: what it raises is named as its plugin's, and who answered is remembered."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NoReturn

import pluggy

from treadle.errors import PluginContractError, PluginError, TreadleError
from treadle.hookspecs import Hooks
from treadle.logs import get_logger

log = get_logger(__name__)


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


def guard(hook: pluggy.HookCaller, ledger: Ledger) -> None:
    """Put code around each implementation of the hook."""
    decides = bool(hook.spec and hook.spec.opts["firstresult"])
    for impl in hook.get_hookimpls():
        plain, wrapper = (_guard_decision, _guard_wrapper) if decides else (_guard_tell, _guard_tell_wrapper)
        around = wrapper if impl.wrapper else plain
        # pluggy has no public place to put code around one implementation
        impl.function = around(impl.function, hook.name, impl.plugin_name, ledger)  # type: ignore[misc]


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
            answer = yield from _yielding_once(function(*arguments), plugin, hook)
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
        wrapper = _yielding_once(function(*arguments), plugin, hook)
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


def _yielding_once(wrapper: Generator[Any, Any, Any], plugin: str, hook: str) -> Generator[None, Any, Any]:
    """The wrapper, held to one yield. pluggy's own error would not name the plugin, and a tell's would pass unseen."""
    try:
        next(wrapper)
    except StopIteration:
        raise PluginError(plugin, hook, "a wrapper yields exactly once, and this one did not yield") from None
    try:
        resume = partial(wrapper.send, (yield))
    except BaseException as error:  # the wrapper is to see whatever was raised behind it
        resume = partial(wrapper.throw, error)
    try:
        resume()
    except StopIteration as stop:
        return stop.value
    wrapper.close()
    raise PluginError(plugin, hook, "a wrapper yields exactly once, and this one yielded again")
