"""Errors that a user can meet. Each says what is wrong, which value, where it came from and what would work."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TreadleError(Exception):
    """Base of every error that is meant for a user rather than for a developer of the core."""


class ConfigError(TreadleError):
    """A setting, strategy or plugin that cannot be used as configured; or several, one of `problems` each."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class InvalidRequest(TreadleError):
    """A request whose prompt or sampling parameters cannot be served; other requests are not affected."""


class Refused(TreadleError):
    """A request that an `accept` rule turned away.

    `retry_after_s` is the time in seconds after which a new attempt may succeed, or None when it never will.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class ModelError(TreadleError):
    """Weights, tokenizer or model settings that cannot be found, verified or loaded."""


class ExecutionError(TreadleError):
    """The executor could not compute a request's next tokens."""


class EngineStopped(TreadleError):
    """The engine was stopped, or failed, before the request ended."""


class WrongCall(TreadleError):
    """A call that cannot be made from where it was made: from a hook, or from a process that was forked."""


class PluginError(TreadleError):
    """A plugin raised an exception inside one of its hooks."""

    def __init__(self, plugin: str, hook: str, problem: str) -> None:
        super().__init__(f"plugin {plugin!r} failed in hook {hook!r}: {problem}")
        self.plugin = plugin
        self.hook = hook


class PluginContractError(PluginError):
    """A plugin's answer broke a rule that its hook's docstring states."""

    def __init__(self, plugin: str, hook: str, rule: str, got: object) -> None:
        super().__init__(plugin, hook, f"broke the rule {rule!r}; it answered {_short(got)}")
        self.rule = rule


def _short(value: object, most: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the closest known spelling, or all known ones when none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known: " + ", ".join(names) if names else "none is known here"
