"""Plugins and an executor that make trouble within the rules, at random but repeatably: for tests of what must withstand it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal

from treadle.contracts import Admission, PoolSize, PoolSpec, Preemption, PreemptionMode
from treadle.hookspecs import hookimpl
from treadle.plan import BlockCopy, Outcome, StepPlan, Work
from treadle.request import Request
from treadle.step import Step
from treadle.testing.fake_executor import Blocks, FakeExecutor, next_token

Site = Literal["open_pool", "swap_out", "swap_in", "write"]


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
    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """For each up to `most` of the tokens to come, each right by chance."""
        return [self._draft(request, limit) for request, limit in zip(requests, most, strict=True)]

    def _draft(self, request: Request, most: int) -> list[int]:
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


class FailingExecutor(FakeExecutor):
    """A fake in which making room, copying a block or writing a request's KV fails, half-way.

    What it was writing holds wrong tokens then, each marked as what belongs there, so that only the tokens of whoever relies on
    it tell; what would have come behind it in the pass is not touched.
    """

    def __init__(
        self, site: Site, at: int, *, times: int | None = 1, error: type[BaseException] = MemoryError, **options: Any
    ) -> None:
        """The `at`-th time that something is done at `site` fails, and `times` in all from then on; None: every time."""
        super().__init__(**options)
        self.num_failed = 0
        self._site, self._at, self._times, self._error = site, at, times, error
        self._num_done = 0

    def mend(self) -> None:
        """Nothing fails any more."""
        self._times = 0

    def open_pool(self, spec: PoolSpec) -> PoolSize:
        """As the fake does, unless told to fail."""
        if self._fails("open_pool"):
            self._raise("open_pool")
        return super().open_pool(spec)

    def _copy(self, copies: Sequence[BlockCopy], sources: Blocks, targets: Blocks) -> None:
        site: Site = "swap_out" if targets is self._swapped else "swap_in"
        for source, target in copies:
            if self._fails(site):
                targets[target] = [entry and (entry[0] + 1, entry[1]) for entry in sources[source]]
                self._raise(site)
            super()._copy([BlockCopy(source, target)], sources, targets)

    def _write(self, work: Work) -> None:
        if self._fails("write"):
            super()._write(work._replace(tokens=tuple(token + 1 for token in work.tokens)))
            self._raise("write")
        super()._write(work)

    def _fails(self, site: Site) -> bool:
        if site != self._site:
            return False
        self._num_done += 1
        return self._num_done >= self._at and (self._times is None or self.num_failed < self._times)

    def _raise(self, site: Site) -> None:
        self.num_failed += 1
        raise self._error(f"no memory at {site}")
