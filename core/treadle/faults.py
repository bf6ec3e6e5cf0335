"""A pass that failed: what it was to write is forgotten, and the request at fault is found by computing each alone."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator

from treadle.errors import ExecutionError, TreadleError
from treadle.kv_cache import KVCache
from treadle.logs import get_logger
from treadle.plan import FinishReason, StepPlan
from treadle.queues import Queues
from treadle.request import LiveRequest, Phase
from treadle.step import Step

log = get_logger(__name__)


class Isolation:
    """Requests of a failed pass, which are computed one by one, so that only the one that cannot be computed ends."""

    def __init__(self, kv_cache: KVCache, queues: Queues) -> None:
        self._kv_cache = kv_cache
        self._queues = queues
        self._suspects: deque[LiveRequest] = deque()

    @property
    def active(self) -> bool:
        return bool(self._suspects)

    def suspects(self) -> Iterator[LiveRequest]:
        """One suspect after another, until one could be scheduled."""
        while self._suspects:
            if self._suspects[0].phase is not Phase.FINISHED:
                yield self._suspects[0]
            self._suspects.popleft()

    def acquit(self) -> None:
        """The pass was computed, so the suspect that was in it is not at fault."""
        if self._suspects:
            self._suspects.popleft()

    def clear(self) -> None:
        """Nobody is suspected any more."""
        self._suspects.clear()

    def pass_failed(self, step: Step, plan: StepPlan, scheduled: list[LiveRequest], error: Exception) -> None:
        """Undo the step, and suspect everybody in it; a request that was alone ends with the error."""
        num_copies = len(plan.swap_out) + len(plan.swap_in)
        problem = f"{type(error).__name__}: {error}"
        log.error("pass_failed", step=step.number, requests=len(plan.works), copies=num_copies, error=problem)
        self.undo(step)
        if num_copies or len(scheduled) != 1:
            # with copies nobody is to blame yet: undone, they do not come again, as what they were for is computed anew
            self._suspects = self._suspects or deque(scheduled)
            return
        self.acquit()
        if not isinstance(error, TreadleError):
            cause, error = error, ExecutionError(f"the executor failed: {problem}")
            error.__cause__ = cause
        _let_go(error)
        if scheduled[0].phase is not Phase.FINISHED:
            self._queues.finish(step, scheduled[0], FinishReason.ERROR, error)

    def undo(self, step: Step) -> None:
        """Forget what the pass was to write; requests that relied on it start over."""
        undo_log = self._kv_cache.undo_log
        self._kv_cache.undo_index()
        for request in undo_log.uncertain:
            if request.phase is Phase.RUNNING:
                self._queues.preempt(step, request)
            elif request.phase is Phase.PREEMPTED:
                self._kv_cache.free(step, request)
        indexed = [block_id for block_id in undo_log.indexed if self._kv_cache.pool.record(block_id) is not None]
        if indexed:
            self._kv_cache.evict(step, indexed)


def _let_go(error: BaseException | None) -> None:
    """Empty the frames of a failed pass. They hold its tensors, and the error lives as long as somebody keeps the completion."""
    seen: list[BaseException] = []
    # causes only: the context of an error may be one that the caller of the step is handling
    while error is not None and error not in seen:
        traceback.clear_frames(error.__traceback__)
        seen.append(error)
        error = error.__cause__
