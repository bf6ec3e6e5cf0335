"""The core's hooks. Each docstring says when the hook is called, what it returns and which rules the core enforces.

*decide* hooks are asked in turn until one answers something other than None. *tell* hooks inform every plugin and return nothing.
A plugin implements a hook by a method of the same name marked `@treadle.hookimpl`; it may leave out arguments that it does not
need. Hooks run on the stepping thread only, never per token and never per layer.

A broken rule raises `PluginContractError`, which names the plugin, the hook and the rule. Where the question was about one
request, that request ends with the error and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from treadle.blocks import IntegrityError
    from treadle.contracts import (
        Accept,
        Admission,
        Budget,
        EngineInfo,
        Executor,
        KVFormat,
        Load,
        Match,
        ModelInfo,
        NotBefore,
        Open,
        Preemption,
        PreemptionMode,
        Refuse,
        StepReport,
        Trim,
    )
    from treadle.plan import BlockCopy
    from treadle.request import Request
    from treadle.settings import Settings
    from treadle.step import Step

hookspec = pluggy.HookspecMarker("treadle")
hookimpl = pluggy.HookimplMarker("treadle")

HOOK_VERSION = 2
"""Raised when a hook changes in a way that old plugins do not survive; a plugin may state the version it was written for."""


class Hooks:
    """Every hook of the core."""

    # --- decide: asked once per request; None passes the question on --------------------------------------------------------

    @hookspec(firstresult=True)
    def accept(self, request: Request, load: Load) -> Accept | Trim | Refuse | None:
        """Whether a request that has just arrived is queued.

        Called: once for each request, at the start of the step after its submission, before it is counted as waiting. What is
        then too long for the model or the pool is refused by the core.

        Returns: `Accept()`, `Trim(max_prompt_tokens)`, `Refuse(reason, retry_after_s)`, or None to pass the question on. When
        nobody answers, the request is accepted.

        Rules:
            - answers Accept, Trim, Refuse or None
            - Trim keeps at least 1 prompt token
            - Refuse gives a reason

        Cost: once per request.

        >>> from treadle import Refuse, hookimpl
        >>> from treadle.testing import run_prompts
        >>> class NoLongPrompts:
        ...     @hookimpl
        ...     def accept(self, request, load):
        ...         return Refuse("at most 8 tokens") if request.prompt_length > 8 else None
        >>> [c.finish_reason.value for c in run_prompts(NoLongPrompts(), prompts=[[1, 2, 3], [4] * 9])]
        ['length', 'refused']
        """

    @hookspec(firstresult=True)
    def admit(self, step: Step, request: Request, match: Match) -> Admission | NotBefore | None:
        """Whether a waiting request starts now.

        Called: for one waiting request after another, in the order that `order` gives, while the gate is open. `match` says what
        it would reuse, and how many blocks its start would take. Also for an urgent request, before others give way to it.

        Returns: `START`, `SKIP` (leave it and look at the next one), `STOP` (look no further in this step), `NO_ROOM` (the same,
        for want of blocks alone: an urgent request may then have those of others), `NotBefore(time)` (like SKIP, and step again
        then at the latest), or None to pass the question on. When nobody answers, it starts.

        Rules:
            - answers an Admission, NotBefore or None
            - does not hold a request back without a time while nothing runs

        Cost: a few calls per step; more only when many are skipped.

        >>> from treadle import Admission, hookimpl
        >>> from treadle.testing import run_prompts
        >>> class OneAtATimePerTenant:
        ...     @hookimpl
        ...     def admit(self, step, request):
        ...         tenants = {other.labels.get("tenant") for other in step.running}
        ...         return Admission.SKIP if request.labels.get("tenant") in tenants else None
        >>> done = run_prompts(OneAtATimePerTenant(), prompts=[[1], [2]], labels={"tenant": "a"})
        >>> done[0].finished_s < done[1].first_token_s
        True
        """

    @hookspec(firstresult=True)
    def propose(self, step: Step, requests: Sequence[Request], most: Sequence[int]) -> Sequence[Sequence[int] | None] | None:
        """Draft tokens that may follow, to be verified in the same pass.

        Called: once in a step, for all running requests in decode, before budget is taken for them, if any plugin implements it.

        Returns: for each of `requests` up to as many token ids as `most` says beside it, or None for no draft; None for no drafts
        at all. Drafts change how fast tokens come, never which.

        Rules:
            - answers a sequence of drafts for each request, or None
            - drafts at most `most` token ids of the model's vocabulary

        Cost: once per step.

        >>> from treadle import hookimpl
        >>> from treadle.testing import run_prompts
        >>> class RepeatLast:
        ...     @hookimpl
        ...     def propose(self, requests, most):
        ...         return [request.token_ids(-1) for request in requests]
        >>> run_prompts(RepeatLast(), prompts=[[1, 2]])[0].token_ids == run_prompts(prompts=[[1, 2]])[0].token_ids
        True
        """

    @hookspec(firstresult=True)
    def match_prefix(self, step: Step, request: Request) -> Sequence[int] | None:
        """Nominate cached or used blocks that hold the start of the request's tokens.

        Called: for a waiting request before `admit` judges it, and again at each block boundary while it is in prefill. Not for
        requests that ask for prompt logprobs. A waiting request may be matched in several steps before it starts.

        Returns: block ids from token 0 on, in order; empty or None for no match. They are a nomination: the core compares token
        ids, parents and isolation keys with its own records, and takes the blocks up to the first difference.

        Rules:
            - answers at most floor((known tokens - 1) / block size) blocks
            - answers ids of blocks of the pool, each once

        Cost: once per waiting request that `admit` is asked about, and once per block of a chunked prefill.

        >>> from treadle import hookimpl
        >>> from treadle.testing import run_prompts
        >>> class NeverReuse:
        ...     @hookimpl
        ...     def match_prefix(self, step, request):
        ...         return ()
        >>> [c.num_cached_tokens for c in run_prompts(NeverReuse(), prompts=[[7] * 40, [7] * 40], prefix="hash_chain")]
        [0, 0]
        """

    @hookspec(firstresult=True)
    def allocate(self, step: Step, request: Request, num_blocks: int) -> Sequence[int] | None:
        """Choose free blocks for a request's next tokens.

        Called: only when the next tokens do not fit the blocks that the request holds. When the answer is None, cached blocks
        are evicted, a prefill chunk shrinks, blocks of finished and of waiting requests are taken back, or a victim is preempted,
        and it is asked again.

        Returns: ids of at least `num_blocks` free blocks (more are held in reserve), or None when there is no room.

        Rules:
            - answers ids of free blocks, each once
            - answers at least num_blocks blocks, or None
            - finds room when nothing else holds a block

        Cost: once per block of tokens.

        >>> from treadle import hookimpl
        >>> from treadle.testing import run_prompts
        >>> class HighestFirst:
        ...     @hookimpl
        ...     def allocate(self, step, request, num_blocks):
        ...         free = [b for b in reversed(range(step.pool.num_blocks)) if step.pool.is_free(b)]
        ...         return free[:num_blocks] if len(free) >= num_blocks else None
        >>> run_prompts(HighestFirst(), prompts=[[1, 2, 3]])[0].finish_reason.value
        'length'
        """

    @hookspec(firstresult=True)
    def preempt(self, step: Step, request: Request, num_blocks: int) -> Preemption | None:
        """Choose a running request that gives way.

        Called: when a running request needs `num_blocks` blocks and nothing can be evicted; asked again until they are there.
        With an order that lets urgent requests preempt also for a waiting request that `gate` and `admit` let start; its victims
        must be of lower priority, and give way only when all that it lacks is found. `num_blocks` is 0 when that is a place.

        Returns: `Preemption(victim, mode, num_blocks)`, or None: then the request waits for blocks to come back. The victim may
        be the request itself. When nobody can go on, the core preempts the last admitted request, so that the first progresses.

        Rules:
            - answers a Preemption or None
            - names a running request with no work planned in this step, each once
            - names a victim of lower priority when the request is waiting
            - takes at least one block, or all
            - swaps only where the executor has swap space

        Cost: once per victim.

        >>> from treadle import Preemption, hookimpl
        >>> from treadle.testing import run_prompts
        >>> class ShortestOutputFirst:
        ...     @hookimpl
        ...     def preempt(self, step, request, num_blocks):
        ...         return Preemption(min(step.victims(), key=lambda r: r.num_output))
        >>> done = run_prompts(ShortestOutputFirst(), prompts=[[1] * 30, [2] * 30], num_blocks=4, max_tokens=12)
        >>> [c.num_preempted for c in done], [len(c.token_ids) for c in done]
        ([0, 1], [12, 12])
        """

    @hookspec(firstresult=True)
    def release(self, step: Step, request: Request) -> bool | None:
        """Whether a finished request's blocks go now.

        Called: when a request finishes, and after each step in which another finished or was preempted, while it is held.

        Returns: True to give them back, False to hold them. When nobody answers they go. While nothing runs, and when a running
        request cannot go on for want of blocks, the core takes held blocks back without asking.

        Rules:
            - answers a bool or None

        Cost: once per finished request, more while it is held.

        >>> from treadle import hookimpl
        >>> from treadle.testing import run_prompts
        >>> class HoldWhileOthersRun:
        ...     @hookimpl
        ...     def release(self, step, request):
        ...         return step.num_running == 0
        >>> [c.finish_reason.value for c in run_prompts(HoldWhileOthersRun(), prompts=[[1], [2]])]
        ['length', 'length']
        """

    # --- decide: whole answers, once a step; others change them with a wrapper ----------------------------------------------

    @hookspec(firstresult=True)
    def order(self, step: Step) -> Iterable[Request] | None:
        """The waiting requests, most urgent first.

        Called: once in a step that has waiting requests and an open gate. Read only as far as needed.

        Returns: an iterator. A request that is not yielded is not considered in this step.

        Rules:
            - yields waiting requests only
            - yields each request once
            - yields at least one request while nothing runs

        Cost: once per step; reading must not cost more as the queue grows.

        >>> from treadle import hookimpl
        >>> from treadle.testing import run_prompts
        >>> class LongestPromptFirst:
        ...     def __init__(self):
        ...         self.waiting = {}
        ...     @hookimpl
        ...     def request_queued(self, step, request):
        ...         self.waiting[request] = None
        ...     @hookimpl
        ...     def request_admitted(self, step, request):
        ...         del self.waiting[request]
        ...     @hookimpl
        ...     def order(self, step):
        ...         return sorted(self.waiting, key=lambda r: -r.prompt_length)
        >>> done = run_prompts(LongestPromptFirst(), prompts=[[1], [2, 2], [3, 3, 3]], max_batch_size=1)
        >>> done[2].first_token_s < done[1].first_token_s < done[0].first_token_s
        True
        """

    @hookspec(firstresult=True)
    def gate(self, step: Step) -> Open | NotBefore | None:
        """Whether and how many waiting requests may start in this step.

        Called: once in a step that has waiting requests; once more after a request gave up its place to an urgent one, which
        happens only after `Open(0, full=True)`.

        Returns: `Open(most)` or `NotBefore(time)`. When nobody answers, any number may start.

        Rules:
            - answers Open, NotBefore or None
            - is open, or gives a time still to come, while nothing runs
            - opens in the step in which a request gave up its place, after saying `full`

        Cost: once per step.

        >>> from treadle import Open, hookimpl
        >>> from treadle.testing import run_prompts
        >>> class OneInsertAStep:
        ...     @hookimpl(wrapper=True)
        ...     def gate(self, step):
        ...         answer = yield
        ...         return Open(1) if isinstance(answer, Open) and answer.most != 0 else answer
        >>> done = run_prompts(OneInsertAStep(), prompts=[[1], [2]])
        >>> done[0].first_token_s < done[1].first_token_s
        True
        """

    @hookspec(firstresult=True)
    def budget(self, step: Step) -> Budget | None:
        """How many tokens each request gets in this step.

        Called: once at the start of a step's planning, and again when planning starts over because nobody could go on. The
        answer's `take(request, wanted)` is then asked for urgent requests that start in the place of others, for running
        requests, in the order of their admission, then for waiting ones as they start.

        Returns: a Budget. When nobody answers, everyone gets what it wants.

        Rules:
            - answers a Budget or None
            - take grants a whole number of 0 to wanted tokens
            - take grants at least one request a token in each step

        Cost: once per step; `take` once per request and step.

        >>> from treadle import hookimpl
        >>> from treadle.testing import run_prompts
        >>> class FourTokensEach:
        ...     may_shrink = True
        ...     def take(self, request, wanted):
        ...         return min(wanted, 4)
        ...     @hookimpl
        ...     def budget(self, step):
        ...         return self
        >>> run_prompts(FourTokensEach(), prompts=[[5] * 20])[0].token_ids == run_prompts(prompts=[[5] * 20])[0].token_ids
        True
        """

    @hookspec(firstresult=True)
    def evict(self, step: Step, num_blocks: int) -> Sequence[int] | None:
        """Choose cached blocks to forget.

        Called: when `allocate` found no room and blocks are cached.

        Returns: ids of cached blocks, best `num_blocks` of them; fewer or None when that is all. Blocks that follow an evicted
        one can no longer be found; they leave the index with it.

        Rules:
            - answers ids of cached blocks that are not pinned, each once

        Cost: when the pool is full, once per allocation.

        >>> from treadle import hookimpl
        >>> from treadle.testing import run_prompts
        >>> class Everything:
        ...     @hookimpl
        ...     def evict(self, step, num_blocks):
        ...         return [b for b in range(step.pool.num_blocks) if step.pool.is_cached(b)]
        >>> done = run_prompts(Everything(), prompts=[[n] * 40 for n in range(9)], num_blocks=4)
        >>> {c.finish_reason.value for c in done}
        {'length'}
        """

    # --- decide: once, at start-up ------------------------------------------------------------------------------------------

    @hookspec(firstresult=True)
    def quantize(self, model: ModelInfo) -> KVFormat | None:
        """How keys and values are stored.

        Called: once, when the executor is there and before the pool is made.

        Returns: a KVFormat. When nobody answers, KV is kept whole.

        Rules:
            - answers a KVFormat or None
            - names heads and layers that the model has

        Cost: once.

        >>> from treadle import KVFormat
        >>> KVFormat(key_bits=8, value_bits=4).name
        'k8v4'
        """

    @hookspec(firstresult=True)
    def execute(self, settings: Settings, hooks: Any) -> Executor | None:
        """Make the executor: load weights, choose a device.

        Called: once, first of all. `hooks` are all hooks of the stack, so that an executor can call those that it brought itself:
        a strategy's attribute `hookspecs` names a class of them.

        Returns: an Executor.

        Rules:
            - answers an Executor
            - collect returns an Outcome
            - an Outcome has an entry for each work
            - ends a sampled work by STOP or LENGTH
            - a work that is not sampled brings no token
            - a sampled work brings 1 token, and at most 1 for each drafted one
            - tokens are ids of the model's vocabulary

        Cost: once.

        >>> from treadle import Executor
        >>> from treadle.testing import FakeExecutor
        >>> isinstance(FakeExecutor(), Executor)
        True
        """

    # --- tell ---------------------------------------------------------------------------------------------------------------

    @hookspec
    def engine_started(self, engine: EngineInfo) -> None:
        """The pool is there; the first step has not begun."""

    @hookspec
    def engine_stopped(self) -> None:
        """No step follows. Told once, also after a failure."""

    @hookspec
    def request_queued(self, step: Step, request: Request) -> None:
        """The request was accepted and waits."""

    @hookspec
    def request_admitted(self, step: Step, request: Request) -> None:
        """The request started; its blocks are there."""

    @hookspec
    def request_preempted(self, step: Step, request: Request, mode: PreemptionMode) -> None:
        """The request waits again, at its old place; its blocks are given back or swapped out."""

    @hookspec
    def request_resumed(self, step: Step, request: Request) -> None:
        """The request runs again after preemption; its blocks are there."""

    @hookspec
    def request_finished(self, step: Step, request: Request) -> None:
        """The request ended, wherever it was, for the reason that it carries. If it was never queued, it is told as refused."""

    @hookspec
    def request_refused(self, step: Step, request: Request) -> None:
        """The request ended before it was queued: refused by `accept` or for its length, or cancelled before a step saw it."""

    @hookspec
    def prefix_matched(self, step: Step, request: Request, block_ids: Sequence[int], num_tokens: int) -> None:
        """The request holds these blocks too, for `num_tokens` of its tokens; none when it starts without.

        Those that nobody held are told as reused next.
        """

    @hookspec
    def blocks_allocated(self, step: Step, request: Request, block_ids: Sequence[int]) -> None:
        """Free blocks became the request's."""

    @hookspec
    def blocks_filled(self, step: Step, request: Request, block_ids: Sequence[int]) -> None:
        """This step's pass fills these blocks; they are indexed already, so that others can match them within the step."""

    @hookspec
    def blocks_released(self, step: Step, request: Request, block_ids: Sequence[int]) -> None:
        """The request holds these blocks no longer. What becomes of those that nobody else holds is told next."""

    @hookspec
    def blocks_swapped_out(self, step: Step, request: Request, copies: Sequence[BlockCopy]) -> None:
        """Blocks of the request are copied to swap space in this step's pass; they are told as released next."""

    @hookspec
    def blocks_swapped_in(self, step: Step, request: Request, copies: Sequence[BlockCopy]) -> None:
        """Blocks that were just allocated to the request are copied from swap space in this step's pass."""

    @hookspec
    def swap_released(self, step: Step, request: Request, swap_ids: Sequence[int]) -> None:
        """What the request has in these blocks of swap space is given up, and is not read any more."""

    @hookspec
    def blocks_cached(self, step: Step, block_ids: Sequence[int]) -> None:
        """Indexed blocks are held by nobody any more, the end of a sequence first."""

    @hookspec
    def blocks_reused(self, step: Step, block_ids: Sequence[int]) -> None:
        """Cached blocks are held again."""

    @hookspec
    def blocks_evicted(self, step: Step, block_ids: Sequence[int]) -> None:
        """Blocks left the index; those that nobody holds are told as freed next."""

    @hookspec
    def blocks_freed(self, step: Step, block_ids: Sequence[int]) -> None:
        """Blocks are free."""

    @hookspec
    def step_committed(self, step: Step) -> None:
        """What the step brought is in the books; told at once, with the step as it stands."""

    @hookspec
    def step_finished(self, report: StepReport) -> None:
        """The step is over. The report is frozen: where passes overlap with planning, the next pass runs already."""

    @hookspec
    def integrity_broken(self, error: IntegrityError) -> None:
        """The books contradict themselves. What a plugin knows of it can be added by `error.attach(text)` before it is raised."""
