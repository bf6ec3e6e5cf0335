"""The rules: ask a hook, check the answer against its docstring, return what the core can rely on. The executor's outcomes, too.

Nothing here changes any state. A broken rule raises PluginContractError with the plugin, the hook and the rule.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeGuard

from treadle.blocks import BlockPool
from treadle.contracts import (
    Accept,
    Admission,
    Budget,
    Executor,
    KVFormat,
    Load,
    Match,
    ModelInfo,
    NotBefore,
    Open,
    PoolSize,
    PoolSpec,
    Preemption,
    PreemptionMode,
    Refuse,
    Trim,
)
from treadle.errors import ExecutionError, PluginContractError, PluginError, TreadleError
from treadle.hook_changes import since
from treadle.plan import FinishReason, Outcome, StepPlan, Work
from treadle.plugin import missing_members
from treadle.plugin_manager import PluginManager
from treadle.request import LiveRequest, Request
from treadle.step import Step


class Unlimited:
    """The budget when nobody sets one."""

    may_shrink = True

    def take(self, request: Request, wanted: int) -> int:  # noqa: ARG002  # the signature of Budget
        """Grant all."""
        return wanted


class Rules:
    """The decide hooks, with their rules."""

    def __init__(self, manager: PluginManager) -> None:
        self._manager = manager
        self._hook = manager.hook

    def _breach(self, hook: str, rule: str, got: object) -> NoReturn:
        raise PluginContractError(self._manager.author(hook), hook, rule, got)

    def _blame(self, hook: str, error: Exception) -> NoReturn:
        """Raise what a plugin raised while its answer was used as that plugin's."""
        if isinstance(error, PluginError):
            raise error
        raise PluginError(self._manager.author(hook), hook, f"{type(error).__name__}: {error}") from error

    # --- start-up -------------------------------------------------------------------------------------------------------------

    def execute(self) -> Executor:
        answer: Any = self._hook.execute(settings=self._manager.settings, hooks=self._hook)
        self._check_members("execute", "answers an Executor", Executor, answer)
        executor: Executor = answer
        return executor

    def open_pool(self, executor: Executor, spec: PoolSpec) -> PoolSize:
        try:
            return executor.open_pool(spec)
        except TreadleError:
            raise
        except Exception as error:  # what the executor does not explain is named as its own
            self._blame("execute", error)

    def quantize(self, model: ModelInfo) -> KVFormat:
        answer: object = self._hook.quantize(model=model)
        if answer is None:
            return KVFormat()
        if not isinstance(answer, KVFormat):
            self._breach("quantize", "answers a KVFormat or None", answer)
        layers, heads = range(model.num_layers), range(model.num_kv_heads)
        pairs: list[object] = [*answer.whole_heads, *answer.whole_keys]
        known = all(isinstance(pair, tuple) and len(pair) == 2 and pair[0] in layers and pair[1] in heads for pair in pairs)
        if not known or not all(layer in layers for layer in answer.whole_layers):
            self._breach("quantize", "names heads and layers that the model has", answer)
        return answer

    # --- requests -------------------------------------------------------------------------------------------------------------

    def accept(self, request: Request, load: Load) -> Accept | Trim | Refuse:
        answer: object = self._hook.accept(request=request, load=load)
        if answer is None:
            return Accept()
        if not isinstance(answer, (Accept, Trim, Refuse)):
            self._breach("accept", "answers Accept, Trim, Refuse or None", answer)
        if isinstance(answer, Trim) and not (_is_whole(answer.max_prompt_tokens) and answer.max_prompt_tokens >= 1):
            self._breach("accept", "Trim keeps at least 1 prompt token", answer)
        if isinstance(answer, Refuse) and not (isinstance(answer.reason, str) and answer.reason):
            self._breach("accept", "Refuse gives a reason", answer)
        return answer

    def order(self, step: Step) -> Generator[LiveRequest, None, None]:
        """Yield waiting requests; the rule that somebody is yielded while nothing runs is the scheduler's to check."""
        answer: Any = self._hook.order(step=step)
        if answer is None:
            return
        seen: set[Request] = set()
        for request in self._read(answer):
            if not (isinstance(request, LiveRequest) and step.is_waiting(request)):
                self._breach("order", "yields waiting requests only", request)
            if request in seen:
                self._breach("order", "yields each request once", request)
            seen.add(request)
            yield request

    def _read(self, answer: Any) -> Iterator[object]:
        """Read a plugin's iterator; what goes wrong in it is the plugin's."""
        try:
            yield from answer
        except Exception as error:  # as above
            self._blame("order", error)

    def gate(self, step: Step) -> Open | NotBefore:
        answer: object = self._hook.gate(step=step)
        if answer is None:
            return Open()
        if not _is_open(answer) and not _is_not_before(answer):
            self._breach("gate", "answers Open, NotBefore or None", answer)
        closed = answer.time_s <= step.now if isinstance(answer, NotBefore) else answer.most == 0
        if closed and step.num_running == 0:
            self._breach("gate", "is open, or gives a time still to come, while nothing runs", answer)
        return answer

    def promise_broken(self, answer: Open | NotBefore) -> NoReturn:
        """The gate said that a place alone was lacking; a request gave its place up, and the gate is closed all the same."""
        self._breach("gate", "opens in the step in which a request gave up its place, after saying `full`", answer)

    def admit(self, step: Step, request: Request, match: Match) -> Admission | NotBefore:
        answer: object = self._hook.admit(step=step, request=request, match=match)
        if answer is None:
            return Admission.START
        if not isinstance(answer, Admission) and not _is_not_before(answer):
            self._breach("admit", "answers an Admission, NotBefore or None", answer)
        return answer

    def held_back(self, author: str, answer: object) -> NoReturn:
        """Nothing runs, and a request is held back for no stated time."""
        rule = "does not hold a request back without a time while nothing runs"
        raise PluginContractError(author, "admit", rule, answer)

    def author(self, hook: str) -> str:
        """The plugin that answered last."""
        return self._manager.author(hook)

    def nobody_ordered(self) -> NoReturn:
        """Nothing runs, requests wait, and `order` yielded none."""
        self._breach("order", "yields at least one request while nothing runs", ())

    # --- tokens ---------------------------------------------------------------------------------------------------------------

    def budget(self, step: Step) -> Budget:
        answer: Any = self._hook.budget(step=step)
        if answer is None:
            return Unlimited()
        self._check_members("budget", "answers a Budget or None", Budget, answer)
        if not isinstance(answer.may_shrink, bool):
            self._breach("budget", "answers a Budget or None", answer)
        budget: Budget = answer
        return budget

    def take(self, budget: Budget, request: Request, wanted: int) -> int:
        try:
            granted = budget.take(request, wanted)
        except Exception as error:  # whatever a plugin raises is named as the plugin's
            self._blame("budget", error)
        if granted.__class__ is not int or not 0 <= granted <= wanted:
            self._breach("budget", "take grants a whole number of 0 to wanted tokens", granted)
        return granted

    def nothing_granted(self) -> NoReturn:
        """A step in which everybody was granted nothing."""
        self._breach("budget", "take grants at least one request a token in each step", 0)

    def propose(
        self, step: Step, requests: Sequence[LiveRequest], most: Sequence[int], vocab_size: int
    ) -> dict[LiveRequest, tuple[int, ...] | PluginError]:
        """For each request its drafts, or how its own were wrong."""
        answer: object = self._hook.propose(step=step, requests=requests, most=most)
        if answer is None:
            return {}
        if not isinstance(answer, Sequence) or isinstance(answer, str) or len(answer) != len(requests):
            self._breach("propose", "answers a sequence of drafts for each request, or None", answer)
        return {
            request: self._drafts(drafts, limit, vocab_size)
            for request, drafts, limit in zip(requests, answer, most, strict=True)
            if drafts is not None
        }

    def _drafts(self, drafts: object, most: int, vocab_size: int) -> tuple[int, ...] | PluginError:
        rule = "drafts at most `most` token ids of the model's vocabulary"
        try:
            drafted = self._ids("propose", drafts, rule)
            if len(drafted) > most or not all(0 <= token < vocab_size for token in drafted):
                self._breach("propose", rule, drafts)
        except PluginError as error:
            return error
        return drafted

    # --- blocks ---------------------------------------------------------------------------------------------------------------

    def match_prefix(self, step: Step, request: LiveRequest, pool: BlockPool) -> tuple[int, ...]:
        """Blocks to use behind those that the request has computed already: nominated, and what they are taken for."""
        answer = self._hook.match_prefix(step=step, request=request)
        if answer is None:
            return ()
        most = (request.num_tokens - 1) // pool.block_size
        nominated = self._block_ids("match_prefix", answer, "answers ids of blocks of the pool, each once", pool)
        if len(nominated) > most:
            self._breach("match_prefix", "answers at most floor((known tokens - 1) / block size) blocks", answer)
        return _verified(nominated, request, pool)

    def allocate(self, step: Step, request: Request, num_blocks: int, pool: BlockPool) -> tuple[int, ...] | None:
        answer = self._hook.allocate(step=step, request=request, num_blocks=num_blocks)
        if answer is None:
            return None
        rule = "answers ids of free blocks, each once"
        block_ids = self._block_ids("allocate", answer, rule, pool)
        if not all(pool.is_free(block_id) for block_id in block_ids):
            self._breach("allocate", rule, answer)
        if len(block_ids) < num_blocks:
            self._breach("allocate", "answers at least num_blocks blocks, or None", answer)
        return block_ids

    def no_room_found(self, num_blocks: int) -> NoReturn:
        """The pool is empty, the request fits, and `allocate` finds no room."""
        self._breach("allocate", "finds room when nothing else holds a block", f"None for {num_blocks} blocks")

    def evict(self, step: Step, num_blocks: int, pool: BlockPool) -> tuple[int, ...]:
        answer = self._hook.evict(step=step, num_blocks=num_blocks)
        if answer is None:
            return ()
        rule = "answers ids of cached blocks that are not pinned, each once"
        block_ids = self._block_ids("evict", answer, rule, pool)
        if not all(pool.is_cached(block_id) and not pool.is_pinned(block_id) for block_id in block_ids):
            self._breach("evict", rule, answer)
        return block_ids

    def preempt(self, step: Step, request: Request, num_blocks: int, *, may_swap: bool) -> Preemption | None:
        answer: object = self._hook.preempt(step=step, request=request, num_blocks=num_blocks)
        if answer is None:
            return None
        if not (isinstance(answer, Preemption) and isinstance(answer.mode, PreemptionMode)):
            self._breach("preempt", "answers a Preemption or None", answer)
        victim = answer.victim
        if not (isinstance(victim, LiveRequest) and step.may_give_way(victim)):
            self._breach("preempt", "names a running request with no work planned in this step, each once", answer)
        if request.is_waiting and victim.priority >= request.priority:
            self._breach("preempt", "names a victim of lower priority when the request is waiting", answer)
        if answer.num_blocks is not None and not (_is_whole(answer.num_blocks) and answer.num_blocks >= 1):
            self._breach("preempt", "takes at least one block, or all", answer)
        if answer.mode is PreemptionMode.SWAP and not may_swap:
            self._breach("preempt", "swaps only where the executor has swap space", answer)
        return answer

    def release(self, step: Step, request: Request) -> bool:
        answer: object = self._hook.release(step=step, request=request)
        if answer is None:
            return True
        if not isinstance(answer, bool):
            self._breach("release", "answers a bool or None", answer)
        return answer

    # --- outcomes -------------------------------------------------------------------------------------------------------------

    def outcome(self, plan: StepPlan, outcome: object) -> Outcome:
        """The outcome, if it has the plan's shape."""
        if not isinstance(outcome, Outcome):
            self._breach("execute", "collect returns an Outcome", outcome)
        if len(outcome.tokens) != len(plan.works):
            got = f"{len(outcome.tokens)} for {len(plan.works)} works"
            self._breach("execute", "an Outcome has an entry for each work", got)
        return outcome

    def wrong_in(  # noqa: PLR0911  # a rule after another
        self, outcome: Outcome, place: int, work: Work, vocab_size: int
    ) -> Exception | None:
        """What is wrong with one work's part of an outcome: the request's own failure, or a breach of the executor's."""
        if outcome.errors and place in outcome.errors:
            return ExecutionError(f"request {work.request_id}: {outcome.errors[place]}")
        tokens: object = outcome.tokens[place]
        if not isinstance(tokens, (tuple, list)):
            return self._wrong_outcome("an Outcome has an entry for each work", tokens)
        if outcome.ends and place in outcome.ends:
            reason = outcome.ends[place]
            if work.sampling is None or reason not in (FinishReason.STOP, FinishReason.LENGTH):
                return self._wrong_outcome("ends a sampled work by STOP or LENGTH", reason)
        if work.sampling is None:
            return self._wrong_outcome("a work that is not sampled brings no token", tokens) if tokens else None
        if not 1 <= len(tokens) <= 1 + work.num_drafted:
            return self._wrong_outcome("a sampled work brings 1 token, and at most 1 for each drafted one", tokens)
        for token in tokens:
            if token.__class__ is not int or not 0 <= token < vocab_size:
                return self._wrong_outcome("tokens are ids of the model's vocabulary", tokens)
        return None

    def _wrong_outcome(self, rule: str, got: object) -> PluginContractError:
        return PluginContractError(self._manager.author("execute"), "execute", rule, got)

    # --- shapes ---------------------------------------------------------------------------------------------------------------

    def _check_members(self, hook: str, rule: str, protocol: type, answer: object) -> None:
        """That the answer has what the protocol names; one that passes on by `__getattr__` counts."""
        try:
            missing = missing_members(protocol, answer)
        except Exception as error:  # a property of the plugin's may raise anything
            self._blame(hook, error)
        if missing:
            hint = "".join(f" ({change.do})" for change in since(1, [hook])) if "launch" in missing else ""
            self._breach(hook, rule, f"{answer!r}, which lacks {', '.join(missing)}{hint}")

    def _ids(self, hook: str, answer: Any, rule: str) -> tuple[int, ...]:
        if not isinstance(answer, Iterable):
            self._breach(hook, rule, answer)
        try:
            ids = tuple(answer)
        except Exception as error:  # a lazy answer of the plugin's may raise anything
            self._blame(hook, error)
        if not all(map(_is_whole, ids)):
            self._breach(hook, rule, answer)
        return ids

    def _block_ids(self, hook: str, answer: Any, rule: str, pool: BlockPool) -> tuple[int, ...]:
        ids = self._ids(hook, answer, rule)
        if len(set(ids)) != len(ids) or not all(0 <= block_id < pool.num_blocks for block_id in ids):
            self._breach(hook, rule, answer)
        return ids


def _is_open(answer: object) -> TypeGuard[Open]:
    return isinstance(answer, Open) and (answer.most is None or (_is_whole(answer.most) and answer.most >= 0))


def _is_not_before(answer: object) -> TypeGuard[NotBefore]:
    if not isinstance(answer, NotBefore):
        return False
    time_s: object = answer.time_s
    # a larger whole number cannot be compared with the clock's
    return time_s < 2**64 if isinstance(time_s, int) else isinstance(time_s, float) and not math.isnan(time_s)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _verified(nominated: Sequence[int], request: LiveRequest, pool: BlockPool) -> tuple[int, ...]:
    """Nominated blocks behind those that are computed, up to the first whose record differs from the request's own tokens."""
    size = pool.block_size
    held = request.num_computed // size
    parent = request.table.chain if held else None
    for place, block_id in enumerate(nominated[held:], held):
        record = pool.record(block_id)
        if (
            record is None
            or record.parent != parent
            or record.isolation_key != request.isolation_key
            or record.tokens != request.token_ids(place * size, (place + 1) * size)
        ):
            return tuple(nominated[held:place])
        parent = record.ref
    return tuple(nominated[held:])
