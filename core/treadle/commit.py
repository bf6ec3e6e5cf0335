"""From an outcome to the books: check what the executor brought, append tokens, end requests, give blocks back."""

from __future__ import annotations

from treadle.books import Books
from treadle.decisions import Decisions
from treadle.errors import ExecutionError, PluginContractError, PluginError
from treadle.logs import get_logger
from treadle.plan import Outcome, StepPlan, Work
from treadle.request import FinishReason, LiveRequest
from treadle.step import Step

log = get_logger(__name__)


class Committer:
    """Writes outcomes into the books."""

    def __init__(self, books: Books, decisions: Decisions, vocab_size: int) -> None:
        self._books = books
        self._decisions = decisions
        self._vocab_size = vocab_size

    def check(self, plan: StepPlan, outcome: object) -> Outcome:
        """The outcome, if it has the plan's shape. Raises PluginContractError otherwise."""
        if not isinstance(outcome, Outcome):
            raise self._breach("run returns an Outcome", outcome)
        if len(outcome.tokens) != len(plan.works):
            raise self._breach("an Outcome has an entry for each work", f"{len(outcome.tokens)} for {len(plan.works)} works")
        return outcome

    def commit(self, step: Step, plan: StepPlan, outcome: Outcome) -> None:
        """Append the new tokens, end the requests that are done."""
        now = step.clock.now()
        for place, work in enumerate(plan.works):
            request = self._books.running[work.request_id]
            error = self._wrong(place, work, outcome)
            if error is not None:
                self._books.disown(step, request)
                self._end(step, request, FinishReason.ERROR, error)
                continue
            if outcome.prompt_logprobs and place in outcome.prompt_logprobs:
                request.add_prompt_logprobs(work.start, outcome.prompt_logprobs[place])
            reason = self._append(request, work, outcome.tokens[place], now)
            if outcome.logprobs and place in outcome.logprobs:
                request.add_logprobs(outcome.logprobs[place])
            if reason is not None:
                self._end(step, request, reason)

    def _append(self, request: LiveRequest, work: Work, tokens: tuple[int, ...], now: float) -> FinishReason | None:
        if work.sampling is None:
            request.advance(len(work.tokens))
            return None
        reason = None
        num_appended = 0
        for token in tokens:
            num_appended += 1
            reason = request.append(token)
            if reason is not None:
                break
        # KV of drafts that were not accepted, or stand behind the end, does not count
        request.advance(len(work.tokens) - work.num_drafted + num_appended - 1)
        if request.first_token_s is None:
            request.mark_first_token(now)
            if request.pin_s is not None:
                self._books.pin_prompt(request, now + request.pin_s)
        return reason

    def _wrong(self, place: int, work: Work, outcome: Outcome) -> Exception | None:
        if outcome.errors and place in outcome.errors:
            return ExecutionError(f"request {work.request_id}: {outcome.errors[place]}")
        tokens: object = outcome.tokens[place]
        if not isinstance(tokens, (tuple, list)):
            return self._breach("an Outcome has an entry for each work", tokens)
        if work.sampling is None:
            return self._breach("a work that is not sampled brings no token", tokens) if tokens else None
        if not 1 <= len(tokens) <= 1 + work.num_drafted:
            return self._breach("a sampled work brings 1 token, and at most 1 for each drafted one", tokens)
        for token in tokens:
            if token.__class__ is not int or not 0 <= token < self._vocab_size:
                return self._breach("tokens are ids of the model's vocabulary", tokens)
        return None

    def _breach(self, rule: str, got: object) -> PluginContractError:
        return PluginContractError(self._decisions.author("execute"), "execute", rule, got)

    # --- ends -----------------------------------------------------------------------------------------------------------------

    def _end(self, step: Step, request: LiveRequest, reason: FinishReason, error: Exception | None = None) -> None:
        """End a running request; its blocks go when `release` says so."""
        try:
            may_go = self._decisions.release(step, request)
        except PluginError as problem:
            may_go, reason, error = True, FinishReason.ERROR, problem
        self._books.finish(step, request, reason, error, hold=not may_go)

    def release_held(self, step: Step) -> None:
        """Ask again about finished requests that hold blocks, if anything ended since. While nothing runs they go unasked."""
        if not self._books.take_change_of_batches():
            return
        for request in list(self._books.held.values()):
            try:
                may_go = not self._books.running or self._decisions.release(step, request)
            except PluginError as problem:
                may_go = True
                request.spoil(problem)
                log.error("release_failed", request_id=request.id, error=str(problem))
            if may_go:
                self._books.release(step, request)
