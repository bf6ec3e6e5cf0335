"""Plugins and an executor that make trouble within the rules, at random but repeatably: for tests of what must withstand it."""

from __future__ import annotations

import random
from typing import Any

from treadle.contracts import Admission, Preemption, PreemptionMode
from treadle.hookspecs import hookimpl
from treadle.plan import Outcome, StepPlan
from treadle.request import Request
from treadle.step import Step
from treadle.testing.fake_executor import FakeExecutor, next_token


class RandomVictims:
    """A preempt rule that takes anybody, in part or whole, by either way, and now and then leaves the choice to the next one."""

    def __init__(self, seed: int, *, may_swap: bool) -> None:
        self._random = random.Random(seed)  # noqa: S311  # has to be repeatable
        self._may_swap = may_swap

    @hookimpl
    def preempt(self, step: Step, request: Request, num_blocks: int) -> Preemption | None:
        """Anybody whom the rules allow."""
        victims = [v for v in step.victims() if not request.is_waiting or v.priority < request.priority]
        if not victims or self._random.random() < 0.3:
            return None
        mode = PreemptionMode.SWAP if self._may_swap and self._random.random() < 0.7 else PreemptionMode.RECOMPUTE
        part = (num_blocks or None) if self._random.random() < 0.3 else None
        return Preemption(self._random.choice(victims), mode, part)


class RandomDrafts:
    """A propose rule whose drafts are right for a while. It knows the tokens of `executor`."""

    def __init__(self, seed: int, executor: FakeExecutor, *, right: float = 0.9, most: int = 20) -> None:
        self._random = random.Random(seed)  # noqa: S311  # has to be repeatable
        self._model = executor.model
        self._right = right
        self._most = most

    @hookimpl
    def propose(self, request: Request, most: int) -> list[int]:
        """Up to `most` of the tokens to come, each right by chance."""
        known = list(request.token_ids())
        drafted: list[int] = []
        for _ in range(min(most, self._random.randrange(self._most))):
            right = next_token(known + drafted, request.params, self._model, request.num_output + len(drafted))
            wrong = self._random.randrange(self._model.vocab_size)
            drafted.append(right if self._random.random() < self._right else wrong)
        return drafted


class RandomSkips:
    """An admit rule that passes over some waiting requests as long as others run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  # has to be repeatable

    @hookimpl
    def admit(self, step: Step) -> Admission | None:
        """SKIP, by chance."""
        return Admission.SKIP if step.num_running and self._random.random() < 0.3 else None


class UnsteadyExecutor(FakeExecutor):
    """A fake that can fail once, or report a single request's failure."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fail_next = False
        """Fail the next pass of several requests; then each of them can be computed."""
        self.report_on: set[str] = set()
        """Ids of requests whose failure is reported in the outcome."""

    def run(self, plan: StepPlan) -> Outcome:
        """As the fake does, unless told to fail."""
        outcome = super().run(plan)
        if self.fail_next and len(plan.works) > 1:
            self.fail_next = False
            raise RuntimeError("a passing weakness")
        errors = {place: "reported" for place, work in enumerate(plan.works) if work.request_id in self.report_on}
        return Outcome(outcome.tokens, errors)
