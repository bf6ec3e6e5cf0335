"""Who waits, who runs, who has finished and holds blocks still. Each verb moves a request from one to another; no policy.

    inbox --queue--> waiting --start--> running --finish--> (held --release-->) gone
                        ^-----preempt------'

A verb changes the request's phase, its place here and its blocks together, and tells the plugins.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from treadle.contracts import Load, PreemptionMode
from treadle.hookspecs import Hooks
from treadle.kv_cache import KVCache
from treadle.plan import FinishReason
from treadle.request import LiveRequest, Phase
from treadle.step import Step


class Queues:
    """Waiting, running and held requests. Keys are the requests themselves: names may be given again."""

    def __init__(self, kv_cache: KVCache, hook: Hooks) -> None:
        self._kv_cache = kv_cache
        self._hook = hook
        self.running: dict[LiveRequest, None] = {}
        """In the order of admission."""
        self.waiting: OrderedDict[LiveRequest, None] = OrderedDict()
        """Longest waiting first."""
        self.held: dict[LiveRequest, None] = {}
        """Finished requests whose blocks are not given back yet."""
        self.ended: list[LiveRequest] = []
        """Requests that ended since the last step was closed."""
        self._batches_changed = False
        self._priorities: Counter[int] = Counter()
        self._waiting_prompt_tokens = 0

    def __iter__(self) -> Iterator[LiveRequest]:
        """Everybody who may hold blocks."""
        yield from self.running
        yield from self.waiting
        yield from self.held

    @property
    def load(self) -> Load:
        pool = self._kv_cache.pool
        return Load(len(self.waiting), self._waiting_prompt_tokens, len(self.running), pool.num_used / pool.num_blocks)

    @property
    def highest_waiting_priority(self) -> int:
        return max(self._priorities)

    def batches_changed(self) -> bool:
        """Whether a request ended or was preempted since this was asked last."""
        changed, self._batches_changed = self._batches_changed, False
        return changed

    # --- verbs ----------------------------------------------------------------------------------------------------------------

    def queue(self, step: Step, request: LiveRequest) -> None:
        """An accepted request waits."""
        self._add_waiting(request)
        self._hook.request_queued(step=step, request=request)

    def start(self, step: Step, request: LiveRequest) -> None:
        """A waiting request runs; its blocks are there."""
        resumed = request.phase is Phase.PREEMPTED
        self._remove_waiting(request)
        request.start(step.number, step.now)
        self.running[request] = None
        (self._hook.request_resumed if resumed else self._hook.request_admitted)(step=step, request=request)

    def preempt(
        self,
        step: Step,
        request: LiveRequest,
        num_blocks: int | None = None,
        mode: PreemptionMode = PreemptionMode.RECOMPUTE,
    ) -> None:
        """A running request waits again and gives up all blocks, or the last `num_blocks`. Full swap space means recompute."""
        del self.running[request]
        request.preempt()
        self._add_waiting(request)
        self.waiting.move_to_end(request, last=False)
        self._batches_changed = True
        if mode is PreemptionMode.RECOMPUTE or not self._kv_cache.swap_out(step, request, num_blocks):
            mode = PreemptionMode.RECOMPUTE
            self._kv_cache.truncate(step, request, num_blocks)
        self._hook.request_preempted(step=step, request=request, mode=mode)

    def finish(
        self, step: Step, request: LiveRequest, reason: FinishReason, error: Exception | None = None, *, hold: bool = False
    ) -> None:
        """A request ends, wherever it is. With `hold` its blocks stay until `release`."""
        told = self._hook.request_refused if request.phase is Phase.SUBMITTED else self._hook.request_finished
        if request.is_waiting:
            self._remove_waiting(request)
        self.running.pop(request, None)
        self._batches_changed = True
        request.finish(reason, step.clock.now(), error)
        self.ended.append(request)
        if hold:
            self.held[request] = None
        else:
            self._kv_cache.free(step, request)
        told(step=step, request=request)

    def release(self, step: Step, request: LiveRequest) -> None:
        """A held request's blocks go."""
        del self.held[request]
        self._kv_cache.free(step, request)

    def reclaim_from_waiting(self, step: Step, but: LiveRequest, num_blocks: int, *, swapped: bool) -> bool:
        """A request that waits with blocks of the pool gives up the last `num_blocks`. False when none holds any.

        The last in the queue comes first. Those with KV in swap space start over, and are spared unless `swapped`.
        """
        # who was preempted stands before all who never started, and those hold nothing
        preempted = list(takewhile(lambda request: request.phase is Phase.PREEMPTED, self.waiting))
        for request in reversed(preempted):
            if request is but or not request.table.held():
                continue
            if not request.table.swapped:
                self._kv_cache.truncate(step, request, num_blocks)
                return True
            if swapped:
                self._kv_cache.free(step, request)
                return True
        return False

    def _add_waiting(self, request: LiveRequest) -> None:
        self.waiting[request] = None
        self._priorities[request.priority] += 1
        self._waiting_prompt_tokens += request.prompt_length

    def _remove_waiting(self, request: LiveRequest) -> None:
        del self.waiting[request]
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]
        self._waiting_prompt_tokens -= request.prompt_length
