"""An engine for tests: it says what it is told to say, after one millisecond a token."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import serving
from workloads import Job


class ScriptedEngine:
    """Counts up from the length of the prompt; a `flaw` makes it answer too little, raise or end."""

    facts: dict[str, Any] = {"scripted": 1}  # noqa: RUF012  # what the protocol asks for

    def __init__(self, flaw: str) -> None:
        self._flaw = flaw
        print("engines chatter on standard output")

    def serve(self, jobs: Sequence[Job], at_once: int) -> list[serving.Answer]:
        if self._flaw == "raises":
            raise RuntimeError("no such operation")
        if self._flaw == "ends":
            os._exit(3)
        return [self._answer(job) for job in jobs]

    def memory(self) -> dict[str, int]:
        return {"weights": 1 << 20}

    def _answer(self, job: Job) -> serving.Answer:
        answer = serving.Answer()
        for place in range(job.max_tokens - (self._flaw == "short")):
            time.sleep(0.001)
            answer.add([len(job.prompt) + place], (place + 1) / 1000)
        return answer


if __name__ == "__main__":
    given = serving.arguments(flaw={"default": ""})
    serving.run(lambda: ScriptedEngine(given.flaw))
