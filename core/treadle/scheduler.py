"""From the queues to a plan: who computes how many tokens, in which blocks. From an outcome to the queues: what that brought.

    schedule   urgent waiting requests, for whom others give way
               running requests, in the order of admission:   match more -> take from the budget -> find blocks
               waiting requests, in order:                    match -> gate, admit -> take -> find blocks -> start
    commit     append tokens, end requests, give blocks back

Each request is matched, granted tokens, given blocks and indexed before the next is looked at, so that requests with a common
prompt share it within the step. A waiting request takes nothing until it is certain that it starts.

A plugin that fails or breaks a rule in a question about one request ends that request; the others are scheduled as if it had
never been there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from treadle.contracts import Admission, Budget, Match, NotBefore, Open, Preemption, PreemptionMode
from treadle.errors import PluginError
from treadle.hookspecs import Hooks
from treadle.kv_cache import KVCache
from treadle.logs import get_logger
from treadle.placement import Placement
from treadle.plan import FinishReason, Outcome, StepPlan, Work
from treadle.queues import Queues
from treadle.request import LiveRequest, Phase
from treadle.rules import Rules, Unlimited
from treadle.step import Step

log = get_logger(__name__)


class Scheduler:
    """Schedules one step after another, and commits it."""

    def __init__(
        self,
        kv_cache: KVCache,
        queues: Queues,
        rules: Rules,
        hook: Hooks,
        *,
        vocab_size: int,
        drafts: bool,
        urgent_preempt: bool,
    ) -> None:
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self._block_size = kv_cache.pool.block_size
        self._queues = queues
        self._rules = rules
        self._hook = hook
        self._placement = Placement(kv_cache, queues, rules)
        self._vocab_size = vocab_size
        self._drafts = drafts
        self._urgent_preempt = urgent_preempt
        self._works: list[Work] = []
        self.scheduled: list[LiveRequest] = []
        """Whose work it is, for each work of the plan."""
        self.changed: list[LiveRequest] = []
        """Requests that got tokens in this step, or whose end changed."""
        self._budget: Budget = Unlimited()
        self._gate: Open | NotBefore | None = None
        self._drafted: dict[LiveRequest, tuple[int, ...] | PluginError] = {}
        self._ungranted: LiveRequest | None = None
        self._granted_any = False
        self.giving_way: set[LiveRequest] = set()
        """Requests chosen to give way, and those that did in this step."""
        self.wake_s: float | None = None
        """When a waiting request may start, by the last plan."""

    # --- schedule -------------------------------------------------------------------------------------------------------------

    def schedule(self, step: Step, alone: LiveRequest | None = None) -> StepPlan:
        """Plan for everyone; or for one request alone, to see whether it is the one whose computation fails."""
        self.changed = []
        self._gate = None
        self._drafted = {}
        self.giving_way.clear()
        if self._open_budget(step):
            if alone is not None:
                self._for_one(step, alone, self._continue if alone.phase is Phase.RUNNING else self._start_unasked)
            else:
                self._schedule_all(step)
        undo_log = self._kv_cache.undo_log
        return StepPlan(step.number, tuple(self._works), tuple(undo_log.swap_out), tuple(undo_log.swap_in))

    def _schedule_all(self, step: Step) -> None:
        running = list(self._queues.running)
        self._start_urgent(step)
        self._propose(step)
        proceed = self._continue
        for request in running:
            if request.phase is Phase.RUNNING:
                self._for_one(step, request, proceed)
        # who runs comes first: nobody starts in a step in which a running request lacked room
        if self._queues.waiting and not self._placement.lacked_room:
            self._admit_waiting(step)
        if not self._works and self._queues.running:
            self._break_stall(step)

    def _open_budget(self, step: Step) -> bool:
        self._works = []
        self.scheduled = []
        self._ungranted = None
        self._granted_any = False
        self.wake_s = None
        try:
            self._budget = self._rules.budget(step)
        except PluginError as error:
            for request in [*self._queues.running, *self._queues.waiting]:
                self._fail(step, request, error)
            return False
        self._placement.begin(self._budget.may_shrink)
        return True

    def _for_one(self, step: Step, request: LiveRequest, do: Callable[[Step, LiveRequest], bool]) -> bool:
        """Do something for one request; a plugin that fails in it ends this request only."""
        try:
            return do(step, request)
        except PluginError as error:
            self._fail(step, request, error)
            return False

    def _fail(self, step: Step, request: LiveRequest, error: PluginError) -> None:
        self._queues.finish(step, request, FinishReason.ERROR, error)

    def _take(self, request: LiveRequest, wanted: int) -> int:
        granted = self._rules.take(self._budget, request, wanted)
        if granted:
            self._granted_any = True
        elif self._ungranted is None:
            self._ungranted = request
        return granted

    def _add_work(self, step: Step, request: LiveRequest, num_tokens: int, drafted: tuple[int, ...] = ()) -> None:
        table, params = request.table, request.params
        start = table.num_computed
        known = request.num_tokens
        end = start + num_tokens
        work = Work(
            request.id,
            start,
            request.token_ids(start, end) + drafted,
            table.block_ids,
            params if end >= known else None,
            len(drafted),
            known - request.prompt_length,
            None,
            None,
            request.adapter,
        )
        if params.prompt_logprobs is not None and start < request.prompt_length:
            following = request.token_ids(end, end + 1) if end < request.prompt_length else ()
            work = work._replace(prompt_logprobs=request.params.prompt_logprobs, following=next(iter(following), None))
        self._works.append(work)
        self.scheduled.append(request)
        request.mark_planned(step.number)
        if min(end, known) // self._block_size > table.num_chained:
            self._kv_cache.fill(step, request, min(end, known))

    # --- running requests -----------------------------------------------------------------------------------------------------

    def _propose(self, step: Step) -> None:
        """Drafts for all requests in decode, asked for at once."""
        if not self._drafts:
            return
        most = {
            request: left
            for request in self._queues.running
            if request.num_pending == 1
            and not request.planned_in(step.number)
            and (left := request.max_total_tokens - request.num_tokens - 1) > 0
        }
        if not most:
            return
        try:
            self._drafted = self._rules.propose(step, tuple(most), tuple(most.values()), self._vocab_size)
        except PluginError as error:
            for request in most:
                self._fail(step, request, error)

    def _continue(self, step: Step, request: LiveRequest) -> bool:
        """Schedule a running request's next tokens. False when it gets none in this step."""
        drafted: tuple[int, ...] = ()
        pending = request.num_pending
        if pending > 1:
            self._match_more(step, request)
            pending = request.num_pending
        elif self._drafted:
            drafted = self._drafts_for(request)
        granted = self._take(request, pending + len(drafted))
        num_tokens = self._placement.extend(step, request, granted, shrinkable=bool(drafted)) if granted else 0
        if not num_tokens:
            return False
        self._add_work(step, request, num_tokens, drafted[: max(0, num_tokens - pending)])
        return True

    def _drafts_for(self, request: LiveRequest) -> tuple[int, ...]:
        proposed = self._drafted.get(request, ())
        if isinstance(proposed, PluginError):
            raise proposed
        return proposed

    def _match_more(self, step: Step, request: LiveRequest) -> None:
        """In prefill, at a block boundary: others may have computed what comes next."""
        block_ids = self._matched(step, request)
        if block_ids:
            self._kv_cache.share(step, request, block_ids)

    def _matched(self, step: Step, request: LiveRequest) -> tuple[int, ...]:
        if request.num_computed % self._pool.block_size or not request.takes_cached:
            return ()
        return self._rules.match_prefix(step, request, self._pool)

    def _break_stall(self, step: Step) -> None:
        """Requests run and none can go on: the last admitted ones give way until the first progresses."""
        first = next(iter(self._queues.running))
        if self._ungranted is not None and not self._granted_any:
            self._for_one(step, self._ungranted, lambda *_: self._rules.nothing_granted())
            return
        for victim in reversed(list(self._queues.running)):
            if victim is not first and victim.phase is Phase.RUNNING:
                self._queues.preempt(step, victim)
            # tokens granted to those that could not go on are not lost to the first
            if not self._open_budget(step):
                return
            if self._for_one(step, first, self._continue) or first.phase is not Phase.RUNNING:
                return
        self._for_one(step, first, lambda *_: self._rules.no_room_found(first.num_pending))

    # --- waiting requests -----------------------------------------------------------------------------------------------------

    def _match(self, step: Step, request: LiveRequest) -> Match:
        """What the request would reuse if it started now. Nothing is taken."""
        return self._kv_cache.match(request, () if request.table.swapped else self._matched(step, request))

    def _admit_waiting(self, step: Step) -> None:
        try:
            self._admit_in_order(step)
        except PluginError as error:
            # gate and order speak of all that wait
            for request in list(self._queues.waiting):
                self._fail(step, request, error)

    def _admit_in_order(self, step: Step) -> None:
        gate = self._gate if self._gate is not None and self._queues.running else self._rules.gate(step)
        if isinstance(gate, NotBefore):
            self._wake(gate.time_s)
            return
        num_started, num_seen = 0, 0
        held_back: tuple[LiveRequest, Admission, str] | None = None
        with closing(self._rules.order(step)) as order:
            for request in order:
                if num_started == gate.most:
                    break
                num_seen += 1
                if request in self.giving_way:
                    continue  # it must not take back what it has just given up for somebody more urgent
                match, answer = self._judge(step, request)
                if answer is Admission.START:
                    if not self._for_one(step, request, lambda step, request: self._start(step, request, match)):  # noqa: B023
                        if request.phase is Phase.FINISHED:
                            continue
                        break
                    num_started += 1
                elif answer is not None:
                    held_back = held_back or (request, answer, self._rules.author("admit"))
                    if answer is not Admission.SKIP:
                        break
        if not self._queues.running and self._queues.waiting and self.wake_s is None and not self.giving_way:
            self._explain_idleness(step, num_seen, held_back)

    def _judge(self, step: Step, request: LiveRequest) -> tuple[Match, Admission | None]:
        """What a request would reuse, and what `admit` says to it: None when it waits for a time, or ended with an error."""
        try:
            match = self._match(step, request)
            answer = self._rules.admit(step, request, match)
        except PluginError as error:
            self._fail(step, request, error)
            return Match(), None
        if isinstance(answer, Admission):
            return match, answer
        if answer.time_s <= step.now:
            return match, Admission.SKIP
        self._wake(answer.time_s)
        return match, None

    def _start_unasked(self, step: Step, request: LiveRequest) -> bool:
        return self._start(step, request, self._match(step, request))

    def _start(self, step: Step, request: LiveRequest, match: Match) -> bool:
        """Grant, find blocks, start. False, and nothing taken, when tokens or blocks are lacking."""
        granted = self._take(request, request.num_pending - match.num_tokens)
        return bool(granted) and self._place_and_start(step, request, match, granted)

    def _place_and_start(self, step: Step, request: LiveRequest, match: Match, granted: int) -> bool:
        # who comes back from swap space looked for no match
        num_cached = None if request.table.swapped else request.num_cached_tokens
        num_tokens = self._placement.enter(step, request, match, granted)
        if not num_tokens:
            return False
        if request.num_cached_tokens == num_cached:
            self._hook.prefix_matched(step=step, request=request, block_ids=(), num_tokens=0)
        self._queues.start(step, request)
        self._add_work(step, request, num_tokens)
        return True

    def _wake(self, time_s: float) -> None:
        self.wake_s = time_s if self.wake_s is None else min(self.wake_s, time_s)

    def _explain_idleness(self, step: Step, num_seen: int, held_back: tuple[LiveRequest, Admission, str] | None) -> None:
        """Nothing runs though requests wait, and nobody said until when: somebody broke a rule."""
        if held_back is not None:
            request, answer, author = held_back
            self._for_one(step, request, lambda *_: self._rules.held_back(author, answer))
        elif self._ungranted is not None and not self._granted_any:
            self._for_one(step, self._ungranted, lambda *_: self._rules.nothing_granted())
        elif num_seen == 0:
            self._rules.nobody_ordered()

    # --- urgent requests ------------------------------------------------------------------------------------------------------

    def _start_urgent(self, step: Step) -> None:
        """Urgent waiting requests start in the place of running ones of lower priority, where the order provides for it.

        They start here, before anybody else is given what was freed for them.
        """
        while self._urgent_preempt and self._start_one_urgent(step):
            pass
        # those who were chosen to no avail run on
        self.giving_way.difference_update(list(self._queues.running))

    def _start_one_urgent(self, step: Step) -> bool:
        queues = self._queues
        if not (queues.waiting and queues.running):
            return False
        lowest = min(request.priority for request in queues.running)
        if queues.highest_waiting_priority <= lowest:
            return False
        try:
            with closing(self._rules.order(step)) as order:
                head = next(order, None)
            if head is None or head.priority <= lowest or not self._is_open(step):
                return False
        except PluginError:
            return False  # admission asks the same and deals with it
        return self._for_one(step, head, self._start_in_place_of_others)

    def _is_open(self, step: Step) -> bool:
        """Whether the gate is open, or would be if somebody gave up a place. It is asked once a step, unless somebody did."""
        if self._gate is None:
            self._gate = self._rules.gate(step)
        return isinstance(self._gate, Open) and (self._gate.most != 0 or self._gate.full)

    def _start_in_place_of_others(self, step: Step, head: LiveRequest) -> bool:
        """Others give way, and the request starts; or neither. False when it does not need them, or must wait."""
        gate = self._gate
        assert isinstance(gate, Open)
        match = self._match(step, head)
        answer = self._rules.admit(step, head, match)
        num_short = max(0, match.num_blocks_needed - self._pool.num_available)
        lacks_place = gate.most == 0
        if answer not in (Admission.START, Admission.NO_ROOM) or not (num_short or lacks_place):
            return False
        victims = self._choose_victims(step, head, match, num_short)
        granted = self._take(head, head.num_pending - match.num_tokens) if victims else 0
        if not granted:
            return False
        for victim, preemption in victims:
            self._queues.preempt(step, victim, preemption.num_blocks, preemption.mode)
        if lacks_place:
            gate = self._rules.gate(step)
            if isinstance(gate, NotBefore) or gate.most == 0:
                self._rules.promise_broken(gate)
        started = self._place_and_start(step, head, match, granted)
        if started and gate.most is not None:
            self._gate = Open(gate.most - 1, full=gate.most == 1)
        return started

    def _choose_victims(
        self, step: Step, head: LiveRequest, match: Match, num_short: int
    ) -> list[tuple[LiveRequest, Preemption]]:
        """Who gives way, so that all of what is lacking is there; nobody when that cannot be. They are chosen, nothing more."""
        victims: list[tuple[LiveRequest, Preemption]] = []
        matched = set(match.block_ids)
        num_freed = 0
        while num_freed < num_short or not victims:
            may_swap = self._kv_cache.swap_space.num_blocks > 0
            answer = self._rules.preempt(step, head, num_short - num_freed, may_swap=may_swap)
            if answer is None:
                return []
            assert isinstance(answer.victim, LiveRequest)
            victims.append((answer.victim, answer))
            self.giving_way.add(answer.victim)
            num_freed = self._kv_cache.num_freed(
                ((victim, p.num_blocks, p.mode is PreemptionMode.SWAP) for victim, p in victims), matched
            )
        return victims

    # --- commit ---------------------------------------------------------------------------------------------------------------

    def commit(self, step: Step, plan: StepPlan, outcome: Outcome | None) -> None:
        """Append the new tokens, end the requests that are done, give back what finished requests hold no longer."""
        if outcome is not None:
            now = step.clock.now()
            for place, (request, work) in enumerate(zip(self.scheduled, plan.works, strict=True)):
                error = self._rules.wrong_in(outcome, place, work, self._vocab_size)
                if error is not None:
                    self._kv_cache.disown(step, request)
                    self._end(step, request, FinishReason.ERROR, error)
                    continue
                if outcome.prompt_logprobs and place in outcome.prompt_logprobs:
                    request.add_prompt_logprobs(work.start, outcome.prompt_logprobs[place])
                reason = self._append(request, work, outcome.tokens[place], now)
                if outcome.logprobs and place in outcome.logprobs:
                    request.add_logprobs(outcome.logprobs[place])
                if outcome.ends and reason is None:
                    reason = outcome.ends.get(place)
                if reason is not None:
                    self._end(step, request, reason)
        self._release_held(step)

    def _append(self, request: LiveRequest, work: Work, tokens: tuple[int, ...], now: float) -> FinishReason | None:
        if work.sampling is None:
            self._kv_cache.advance(request, len(work.tokens))
            return None
        self.changed.append(request)
        reason = None
        num_appended = 0
        for token in tokens:
            num_appended += 1
            reason = request.append(token)
            if reason is not None:
                break
        # KV of drafts that were not accepted, or stand behind the end, does not count
        self._kv_cache.advance(request, len(work.tokens) - work.num_drafted + num_appended - 1)
        if request.figures.first_token_s is None:
            request.count(first_token_s=now)
            if request.pin_s is not None:
                self._kv_cache.pin_prompt(request, now + request.pin_s)
        return reason

    def _end(self, step: Step, request: LiveRequest, reason: FinishReason, error: Exception | None = None) -> None:
        """End a running request; its blocks go when `release` says so."""
        try:
            may_go = self._rules.release(step, request)
        except PluginError as problem:
            may_go, reason, error = True, FinishReason.ERROR, problem
        self._queues.finish(step, request, reason, error, hold=not may_go)

    def _release_held(self, step: Step) -> None:
        """Ask again about finished requests that hold blocks, if anything ended since. While nothing runs they go unasked."""
        if not self._queues.batches_changed():
            return
        for request in list(self._queues.held):
            try:
                may_go = not self._queues.running or self._rules.release(step, request)
            except PluginError as problem:
                may_go = True
                request.spoil(problem)
                self.changed.append(request)
                log.error("release_failed", request_id=request.id, error=str(problem))
            if may_go:
                self._queues.release(step, request)
