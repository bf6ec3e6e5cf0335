"""Plugins for the tests of the command line; put on the path by them, also that of subprocesses."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from treadle import Admission, Step, hookimpl
from treadle.clocks import MonotonicClock
from treadle.plan import Outcome, StepPlan
from treadle.testing import FakeExecutor


class Letters:
    """A token is a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 997 for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return [996, *self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))]


class NoChat(Letters):
    """A tokenizer of a model without a chat template."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return None


class Fake(FakeExecutor):
    """The fake executor, with a tokenizer that chats."""

    def __init__(self) -> None:
        super().__init__(tokenizer=Letters(), max_length=600)


class Chatless(FakeExecutor):
    """One that does not."""

    def __init__(self) -> None:
        super().__init__(tokenizer=NoChat())


class Slow(Fake):
    """Steps take real time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = MonotonicClock()
        self._step_s = 0.0

    def run(self, plan: StepPlan) -> Outcome:
        time.sleep(0.02)
        return super().run(plan)


class Broken(Fake):
    """An engine that fails after some steps."""

    @hookimpl
    def step_finished(self) -> None:
        if len(self.plans) > 3:
            raise RuntimeError("the floor gave way")


class Careful:
    """A wrapper that lets everyone start."""

    @hookimpl(wrapper=True)
    def admit(self, step: Step) -> Generator[None, Admission, Admission]:
        return (yield)
