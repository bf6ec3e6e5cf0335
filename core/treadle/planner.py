"""From the books to a plan: who computes how many tokens in this step, and in which blocks.

Running requests come first, in the order of their admission, then waiting ones as they start. Each is matched, granted tokens,
given blocks and indexed before the next is looked at, so that requests with a common prompt share it within the step.

A plugin that fails or breaks a rule in a question about one request ends that request; the others are planned as if it had never
been there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial

from treadle.blocks import BlockPool
from treadle.books import Books
from treadle.contracts import Admission, Budget, NotBefore, PreemptionMode
from treadle.decisions import Decisions, Unlimited
from treadle.errors import PluginError
from treadle.hookspecs import Hooks
from treadle.plan import StepPlan, Work
from treadle.request import FinishReason, LiveRequest, Phase
from treadle.step import Step

PRIORITY_TRAIT = "urgent_requests_preempt"
"""An order strategy has this trait when waiting requests may preempt running ones of lower priority."""


class Planner:
    """Plans one step after another."""

    def __init__(
        self, books: Books, decisions: Decisions, hook: Hooks, *, vocab_size: int, drafts: bool, urgent_preempt: bool
    ) -> None:
        self._books = books
        self._pool: BlockPool = books.pool
        self._decisions = decisions
        self._hook = hook
        self._vocab_size = vocab_size
        self._drafts = drafts
        self._urgent_preempt = urgent_preempt
        self._works: list[Work] = []
        self._budget: Budget = Unlimited()
        self._asked: LiveRequest | None = None
        self._granted_any = False
        self._lacked_room = False
        self._gave_way: set[str] = set()
        self.wake_s: float | None = None
        """When a waiting request may start, by the last plan."""

    def plan(self, step: Step) -> StepPlan:
        """Plan for everyone."""
        if self._open_budget(step):
            self._make_room(step)
            for request in list(self._books.running.values()):
                if request.phase is Phase.RUNNING:
                    self._for_one(step, request, self._continue)
            # who runs comes first: nobody starts in a step in which a running request lacked room
            if self._books.waiting and not self._lacked_room:
                self._admit_waiting(step)
            if not self._works and self._books.running:
                self._break_stall(step)
        return self._close(step)

    def plan_alone(self, step: Step, request: LiveRequest) -> StepPlan:
        """Plan for this request only, to see whether it is the one whose computation fails."""
        if self._open_budget(step):
            self._for_one(step, request, self._continue if request.phase is Phase.RUNNING else self._start)
        return self._close(step)

    def _open_budget(self, step: Step) -> bool:
        self._works = []
        self._asked = None
        self._granted_any = False
        self._lacked_room = False
        self._gave_way.clear()
        self.wake_s = None
        try:
            self._budget = self._decisions.budget(step)
        except PluginError as error:
            for request in [*self._books.running.values(), *self._books.waiting.values()]:
                self._fail(step, request, error)
            return False
        return True

    def _close(self, step: Step) -> StepPlan:
        journal = self._books.journal
        return StepPlan(step.number, tuple(self._works), tuple(journal.swap_out), tuple(journal.swap_in))

    def _for_one(self, step: Step, request: LiveRequest, do: Callable[[Step, LiveRequest], bool]) -> bool:
        """Do something for one request; a plugin that fails in it ends this request only."""
        try:
            return do(step, request)
        except PluginError as error:
            self._fail(step, request, error)
            return False

    def _fail(self, step: Step, request: LiveRequest, error: PluginError) -> None:
        self._books.finish(step, request, FinishReason.ERROR, error)

    # --- running requests -----------------------------------------------------------------------------------------------------

    def _continue(self, step: Step, request: LiveRequest) -> bool:
        """Plan a running request's next tokens. False when it gets none in this step."""
        pending = request.num_pending
        drafted: tuple[int, ...] = ()
        if pending > 1:
            self._match_more(step, request)
            pending = request.num_pending
        elif self._drafts:
            drafted = self._draft(step, request)
        granted = self._take(request, pending + len(drafted))
        num_tokens = self._fit(step, request, granted, shrinkable=bool(drafted)) if granted else 0
        if not num_tokens:
            return False
        self._schedule(step, request, num_tokens, drafted[: max(0, num_tokens - pending)])
        return True

    def _match_more(self, step: Step, request: LiveRequest) -> None:
        """In prefill, at a block boundary: others may have computed what comes next."""
        if request.num_computed % self._pool.block_size == 0 and request.takes_cached:
            block_ids = self._decisions.match_prefix(step, request, self._pool)
            if block_ids:
                self._books.reuse(step, request, block_ids)
                num_tokens = len(block_ids) * self._pool.block_size
                self._hook.prefix_matched(step=step, request=request, block_ids=block_ids, num_tokens=num_tokens)

    def _draft(self, step: Step, request: LiveRequest) -> tuple[int, ...]:
        most = request.max_total_tokens - request.num_tokens - 1
        return self._decisions.propose(step, request, most, self._vocab_size) if most > 0 else ()

    def _take(self, request: LiveRequest, wanted: int) -> int:
        granted = self._decisions.take(self._budget, request, wanted)
        if granted:
            self._granted_any = True
        elif self._asked is None:
            self._asked = request
        return granted

    def _schedule(self, step: Step, request: LiveRequest, num_tokens: int, drafted: tuple[int, ...] = ()) -> None:
        start = request.num_computed
        known = request.num_tokens
        end = start + num_tokens
        work = Work(
            request.id,
            start,
            request.token_ids(start, end) + drafted,
            request.block_table,
            request.params if end >= known else None,
            len(drafted),
            known - request.prompt_length,
        )
        if request.params.prompt_logprobs is not None and start < request.prompt_length:
            following = request.token_ids(end, end + 1) if end < request.prompt_length else ()
            work = work._replace(prompt_logprobs=request.params.prompt_logprobs, following=next(iter(following), None))
        self._works.append(work)
        request.mark_planned(step.number)
        if min(end, known) // self._pool.block_size > request.num_chained:
            self._books.fill(step, request, min(end, known))

    # --- blocks ---------------------------------------------------------------------------------------------------------------

    def _fit(self, step: Step, request: LiveRequest, granted: int, *, shrinkable: bool = False) -> int:
        """Get blocks for up to `granted` more tokens. Returns how many tokens fit: 0 when the request must wait."""
        needed = self._pool.blocks_for(request.num_computed + granted) - len(request.block_table)
        if needed <= 0:
            return granted
        block_ids = self._find_room(step, request, needed)
        if block_ids is None and (shrinkable or self._budget.may_shrink):
            fitting = self._fit_less(step, request, needed)
            if fitting:
                return min(fitting, granted)
        while block_ids is None:
            if not self._make_way(step, request, needed):
                return 0
            block_ids = self._find_room(step, request, needed)
        self._books.give(step, request, block_ids)
        return granted

    def _find_room(self, step: Step, request: LiveRequest, num_blocks: int) -> tuple[int, ...] | None:
        """Free blocks, if need be by forgetting cached ones."""
        block_ids = self._decisions.allocate(step, request, num_blocks, self._pool)
        while block_ids is None and self._pool.num_cached:
            short = num_blocks - self._pool.num_free
            chosen = self._decisions.evict(step, short if short > 0 else num_blocks, self._pool)
            if not chosen:
                break
            self._books.evict(step, chosen)
            block_ids = self._decisions.allocate(step, request, num_blocks, self._pool)
        return block_ids

    def _fit_less(self, step: Step, request: LiveRequest, needed: int) -> int:
        """Tokens that fit what the request holds and what is free."""
        fewer = min(needed - 1, self._pool.num_free)
        if fewer > 0:
            block_ids = self._decisions.allocate(step, request, fewer, self._pool)
            if block_ids is not None:
                self._books.give(step, request, block_ids)
        return len(request.block_table) * self._pool.block_size - request.num_computed

    def _make_way(self, step: Step, request: LiveRequest, needed: int) -> bool:
        """Free blocks at somebody's cost. False when nobody gives way, or the request itself did."""
        books = self._books
        runs = request.phase is Phase.RUNNING
        self._lacked_room = self._lacked_room or runs
        if books.held and (runs or not books.running):
            for finished in list(books.held.values()):
                books.release(step, finished)
            return True
        short = max(1, needed - self._pool.num_free)
        if len(books.running) == int(runs):
            # alone: nobody would gain if it gave way itself, so those that wait and those that pinned do
            return books.reclaim_from_waiting(step, request, short, swapped=True) or books.unpin_all()
        if runs and books.reclaim_from_waiting(step, request, short, swapped=False):
            return True
        return runs and self._preempt_for(step, request, short) and request.phase is Phase.RUNNING

    def _preempt_for(self, step: Step, request: LiveRequest, num_blocks: int) -> bool:
        may_swap = self._books.swap_space.num_blocks > 0
        answer = self._decisions.preempt(step, request, num_blocks, may_swap=may_swap)
        if answer is None:
            return False
        victim = self._books.running[answer.victim.id]
        if request.is_waiting:
            self._gave_way.add(victim.id)
        if answer.mode is PreemptionMode.RECOMPUTE or not self._books.swap_out(step, victim, answer.num_blocks):
            self._books.preempt(step, victim, answer.num_blocks)
        return True

    def _break_stall(self, step: Step) -> None:
        """Requests run and none can go on: the last admitted ones give way until the first progresses."""
        first = next(iter(self._books.running.values()))
        if self._asked is not None and not self._granted_any:
            self._for_one(step, self._asked, lambda *_: self._decisions.nothing_granted())
            return
        for victim in reversed(list(self._books.running.values())):
            if victim is not first and victim.phase is Phase.RUNNING:
                self._books.preempt(step, victim)
            # tokens granted to those that could not go on are not lost to the first
            if not self._open_budget(step):
                return
            if self._for_one(step, first, self._continue) or first.phase is not Phase.RUNNING:
                return
        self._for_one(step, first, lambda *_: self._decisions.no_room_found(first.num_pending))

    # --- waiting requests -----------------------------------------------------------------------------------------------------

    def _make_room(self, step: Step) -> None:
        """Urgent waiting requests preempt running ones of lower priority, where the order provides for it."""
        books = self._books
        while self._urgent_preempt and books.waiting and books.running:
            lowest = min(request.priority for request in books.running.values())
            if max(books.waiting_priorities) <= lowest:
                return
            try:
                with closing(self._decisions.order(step)) as order:
                    head = next(order, None)
                short = None if head is None or head.priority <= lowest else self._shortage(step, head)
            except PluginError:
                return  # admission asks the same and deals with it
            if head is None or short is None:
                return
            if not self._for_one(step, head, partial(self._preempt_for, num_blocks=short)):
                return

    def _shortage(self, step: Step, request: LiveRequest) -> int | None:
        """Blocks that a waiting request lacks, 0 when it lacks a place in the batch, None when it lacks nothing."""
        gate = self._decisions.gate(step)
        if isinstance(gate, NotBefore):
            return None
        if gate.most == 0:
            return 0 if gate.full else None
        short = self._pool.blocks_for(request.num_tokens) - self._pool.num_available
        return short if short > 0 else None

    def _admit_waiting(self, step: Step) -> None:
        try:
            self._admit_in_order(step)
        except PluginError as error:
            # gate and order speak of all that wait
            for request in list(self._books.waiting.values()):
                self._fail(step, request, error)

    def _admit_in_order(self, step: Step) -> None:
        gate = self._decisions.gate(step)
        if isinstance(gate, NotBefore):
            self._wake(gate.time_s)
            return
        num_started, num_seen = 0, 0
        held_back: tuple[LiveRequest, Admission, str] | None = None
        with closing(self._decisions.order(step)) as order:
            for request in order:
                if num_started == gate.most:
                    break
                num_seen += 1
                if request.id in self._gave_way:
                    continue  # it must not take back what it has just given up for somebody more urgent
                answer = self._admission(step, request)
                if answer is Admission.START:
                    if not self._for_one(step, request, self._start):
                        if request.phase is Phase.FINISHED:
                            continue
                        break
                    num_started += 1
                elif answer is not None:
                    held_back = held_back or (request, answer, self._decisions.author("admit"))
                    if answer is Admission.STOP:
                        break
        if not self._books.running and self._books.waiting and self.wake_s is None and not self._gave_way:
            self._explain_idleness(step, num_seen, held_back)

    def _admission(self, step: Step, request: LiveRequest) -> Admission | None:
        """What `admit` says. None when it waits for a time to come, or ended with an error."""
        try:
            answer = self._decisions.admit(step, request)
        except PluginError as error:
            self._fail(step, request, error)
            return None
        if isinstance(answer, Admission):
            return answer
        if answer.time_s <= step.now:
            return Admission.SKIP
        self._wake(answer.time_s)
        return None

    def _start(self, step: Step, request: LiveRequest) -> bool:
        """Match, grant, give blocks, start. False, and nothing changed, when tokens or blocks are lacking."""
        if request.swapped:
            return self._swap_in(step, request)
        block_ids: tuple[int, ...] = ()
        kept = request.num_computed
        if kept % self._pool.block_size == 0 and request.takes_cached:
            block_ids = self._decisions.match_prefix(step, request, self._pool)
            if block_ids:
                self._books.reuse(step, request, block_ids)
        num_matched = len(block_ids) * self._pool.block_size
        granted = self._take(request, request.num_pending)
        num_tokens = self._fit(step, request, granted) if granted else 0
        if not num_tokens:
            if granted and not self._books.running:
                self._decisions.no_room_found(self._pool.blocks_for(request.num_tokens))
            if not kept:
                self._books.give_up_blocks(step, request)
                request.unreuse(num_matched)
            return False
        self._hook.prefix_matched(step=step, request=request, block_ids=block_ids, num_tokens=num_matched)
        self._books.start(step, request)
        self._schedule(step, request, num_tokens)
        return True

    def _swap_in(self, step: Step, request: LiveRequest) -> bool:
        """Resume from swap space, when there is room for what is swapped out and for the next tokens together."""
        num_swapped = len(request.swapped)
        granted = self._take(request, request.num_pending)
        if not granted:
            return False
        growth = self._pool.blocks_for(request.num_computed + granted) - len(request.block_table)
        needed = num_swapped + max(growth, 0)
        block_ids = self._find_room(step, request, needed)
        while block_ids is None:
            if not self._make_way(step, request, needed):
                if not self._books.running:
                    self._decisions.no_room_found(needed)
                return False
            block_ids = self._find_room(step, request, needed)
        self._books.swap_in(step, request, block_ids[:num_swapped])
        if block_ids[num_swapped:]:
            self._books.give(step, request, block_ids[num_swapped:])
        self._books.start(step, request)
        self._schedule(step, request, granted)
        return True

    def _wake(self, time_s: float) -> None:
        self.wake_s = time_s if self.wake_s is None else min(self.wake_s, time_s)

    def _explain_idleness(self, step: Step, num_seen: int, held_back: tuple[LiveRequest, Admission, str] | None) -> None:
        """Nothing runs though requests wait, and nobody said until when: somebody broke a rule."""
        if held_back is not None:
            request, answer, author = held_back
            self._for_one(step, request, lambda *_: self._decisions.held_back(author, answer))
        elif self._asked is not None and not self._granted_any:
            self._for_one(step, self._asked, lambda *_: self._decisions.nothing_granted())
        elif num_seen == 0:
            self._decisions.nobody_ordered()
