"""What changed from one hook version to the next, told to whoever brings a plugin that was written for an earlier one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One change of one hook, or of something else that plugins use."""

    version: int
    """The hook version that it came with."""
    what: str
    """The hook; or a module, or a method of a Protocol, as `Executor.run`."""
    do: str
    """What was, what is, and what to do."""
    gone: bool = False
    """Whether it is there no more."""
    lost: tuple[str, ...] = ()
    """Arguments of the hook that are there no more."""


CHANGES = (
    Change(
        2,
        "propose",
        "propose(step, request, most) is propose(step, requests, most): asked once a step for all decoding requests; `most` is a "
        "sequence beside `requests`. Answer one sequence of drafts for each of them, or None",
        lost=("request",),
    ),
    Change(
        2,
        "step_finished",
        "step_finished(step, report) is step_finished(report): the report is frozen, and may be told while the next pass runs. "
        "Who needs the live step implements step_committed(step)",
        lost=("step",),
    ),
    Change(2, "admit", "admit(step, request) got a third argument, `match`: what the request would reuse. Take it if you need "
        "it. Answer Admission.NO_ROOM instead of STOP where blocks are what is lacking, so that urgent requests may preempt"),
    Change(2, "request_refused", "request_refused(step, request) is new: told of requests that `accept` turned away"),
    Change(
        2,
        "register_strategies",
        "register_strategies is gone: offer strategies by entry points, or name one in a configuration by "
        'strategy = "module:Class"',
        gone=True,
    ),
    Change(2, "register_commands", "register_commands is gone: offer commands by entry points `command.name`", gone=True),
    Change(
        2,
        "execute",
        "execute answers an Executor without run(plan): launch(plan) starts a pass, collect() waits for its outcome. Derive from "
        "treadle.SyncExecutor to keep a `run`: it makes both of it",
    ),
    Change(2, "treadle.testing.play", "treadle.testing.play is called run_prompts, for what it does", gone=True),
    *(
        Change(2, f"treadle_plugins.{was}", f"treadle_plugins.{was} is gone: {now}", gone=True)
        for was, now in (
            ("admission", "see treadle_plugins.accept, .order, .admit, .budget and .release"),
            ("allocation", "see treadle_plugins.allocate"),
            ("eviction", "see treadle_plugins.evict"),
            ("execution", "see treadle_plugins.execute"),
            ("preemption", "see treadle_plugins.preempt"),
            ("quantization", "see treadle_plugins.quantize"),
        )
    ),
)  # fmt: skip


def since(version: int, hooks: Collection[str], changes: Sequence[Change] = CHANGES) -> list[Change]:
    """Changes of these hooks that came after `version`."""
    return [change for change in changes if change.version > version and change.what in hooks]


def about_gone(what: str, changes: Sequence[Change] = CHANGES) -> Change | None:
    """The change that took a hook or a module away."""
    found = (change for change in changes if change.gone and (what == change.what or what.startswith(f"{change.what}.")))
    return next(found, None)


def about_argument(hook: str, argument: str, changes: Sequence[Change] = CHANGES) -> Change | None:
    """The change that took an argument of a hook away."""
    return next((change for change in changes if change.what == hook and argument in change.lost), None)
