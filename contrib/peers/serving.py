"""The engine's end of the pipe: a process that loads one engine, then serves what it is sent until it is told to stop.

Each engine's script hands a function to `run`. Commands come as lines of JSON on standard input and answers leave on what was
standard output; whatever the engine itself prints goes to standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from workloads import Job

DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


@dataclass
class Answer:
    """What an engine made of one job. Times are seconds since the jobs were handed over."""

    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0

    def add(self, tokens: Sequence[int], now_s: float) -> None:
        """Tokens that an engine gave out at `now_s`."""
        if not tokens:
            return
        if not self.tokens:
            self.first_s = now_s
        self.tokens += tokens
        self.last_s = now_s


class Served(Protocol):
    """An engine that was loaded."""

    facts: dict[str, Any]
    """Versions, precisions and settings."""

    def serve(self, jobs: Sequence[Job], at_once: int) -> list[Answer]:
        """Serve all jobs, handed over together, at most `at_once` of them at a time; an answer for each, in order."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by part, as far as the engine says; may be empty."""
        ...


def arguments(**more: dict[str, Any]) -> argparse.Namespace:
    """What the driver passes to every engine, and `more` options of one engine's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--pool-tokens", type=int, required=True)
    for name, options in more.items():
        parser.add_argument(f"--{name}", **options)
    return parser.parse_args()


def run(load: Callable[[], Served]) -> None:
    """Load an engine, say so, and answer commands until the input ends."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)  # a stopped process would not see that the driver is gone
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # engines print to standard output, also from C++

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")

    try:
        started_s = time.perf_counter()
        engine = load()
        reply({"facts": engine.facts, "load_s": time.perf_counter() - started_s})
        for line in sys.stdin:
            reply(_obey(engine, json.loads(line)))
    except Exception as error:  # whatever an engine raises, the driver has to hear of it
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})


def _obey(engine: Served, command: dict[str, Any]) -> dict[str, Any]:
    jobs = [Job(**job) for job in command["jobs"]]
    gc.collect()
    started_s = time.perf_counter()
    answers = engine.serve(jobs, command["at_once"])
    wall_s = time.perf_counter() - started_s
    return {"wall_s": wall_s, "answers": [asdict(answer) for answer in answers], "memory": engine.memory()}
