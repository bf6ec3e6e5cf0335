"""Many requests through an engine: some ahead of what is written, answers in the order of the questions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from treadle import Completion, Engine, EngineInfo, FinishReason, Handle, SamplingParams
from treadle.errors import InvalidRequest, TreadleError
from treadle.handles import Chunk
from treadle_plugins.commands.generation.interrupts import Interrupt
from treadle_plugins.commands.generation.prompts import Ask, Item, Messages, Problem

MAX_NEW_TOKENS = 512
"""Of an answer, where nobody says otherwise: a small model may repeat itself for ever."""
PAUSE_S = 0.1
"""Longest sleep between two looks at Ctrl-C and at standard input."""


@dataclass(frozen=True)
class Encoder:
    """Makes token ids of prompts."""

    engine: Engine
    chat: bool | None
    """Whether plain prompts are wrapped by the model's chat template; None means when it has one."""
    system: str | None = None

    def encode(self, ask: Ask) -> str | Sequence[int]:
        """What to submit. Raises InvalidRequest."""
        if ask.tokens is not None:
            return ask.tokens
        if ask.messages is not None:
            return self._chat(ask.messages, "messages")
        assert ask.text is not None
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            return ask.text
        if self.chat is False:
            return tokenizer.encode(ask.text)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, {"role": "user", "content": ask.text}]
        if self.chat or system:
            return self._chat(messages, "--chat" if self.chat else "--system")
        return tokenizer.chat(messages) or tokenizer.encode(ask.text)

    def _chat(self, messages: Messages, what: str) -> list[int]:
        tokenizer = self.engine.tokenizer
        tokens = None if tokenizer is None else tokenizer.chat(messages)
        if tokens is None:
            raise InvalidRequest(f"{what} needs a chat template, and the model has none; give a plain prompt to --raw instead")
        return tokens


@dataclass(frozen=True)
class Result:
    """What became of one request: an error, or `n` completions."""

    item: Ask | Problem
    completions: tuple[Completion, ...] = ()
    error: str | None = None


class _UnderWay:
    """A request that was read and whose result was not yet handed out."""

    def __init__(self, item: Ask | Problem, handles: Sequence[Handle] = (), error: str | None = None) -> None:
        self.item = item
        self.handles = handles
        self.error = error

    @property
    def ended(self) -> bool:
        return all(handle.finished for handle in self.handles)

    @property
    def cancelled(self) -> bool:
        return any(handle.request.finish_reason is FinishReason.CANCELLED for handle in self.handles)

    def result(self) -> Result:
        return Result(self.item, tuple(handle.completion() for handle in self.handles), self.error)


class Batch:
    """Reads requests as room allows, steps the engine, and hands results out in order."""

    def __init__(self, engine: Engine, encoder: Encoder, interrupt: Interrupt, ahead: int) -> None:
        self._engine = engine
        self._encoder = encoder
        self._interrupt = interrupt
        self._ahead = ahead
        self._entries: deque[_UnderWay] = deque()
        self._num_under_way = 0

    def wait_s(self) -> float:
        """Seconds that reading may wait for input: none while anything is under way."""
        return 0.0 if self._entries else PAUSE_S

    def run(self, items: Iterator[Item]) -> Iterator[Result]:
        """Results in the order of `items`, each as soon as those before it are there.

        After Ctrl-C, or when the engine fails, what is under way is given up and what had ended is handed out.
        """
        reading = True
        try:
            while (reading or self._entries) and not self._interrupt.asked:
                reading = reading and self._read(items)
                if any(not entry.ended for entry in self._entries):
                    self._engine.advance(PAUSE_S)
                while self._entries and self._entries[0].ended:
                    yield self._pop()
        except TreadleError:
            yield from self._rest()
            raise
        if self._entries:
            self._cancel()
            yield from self._rest()

    def _read(self, items: Iterator[Item]) -> bool:
        """Submit requests while there is room and one is there to be read. Returns whether more may come."""
        while self._num_under_way < self._ahead and not self._interrupt.asked:
            try:
                item = next(items)
            except StopIteration:
                return False
            if item is None:
                break
            entry = self._submit(item)
            self._entries.append(entry)
            self._num_under_way += len(entry.handles) or 1
        return True

    def _submit(self, item: Ask | Problem) -> _UnderWay:
        if isinstance(item, Problem):
            return _UnderWay(item, error=item.error)
        try:
            if item.n > self._ahead:
                raise InvalidRequest(f"n={item.n} is more than may be under way, which is {self._ahead}; raise --ahead")
            return _UnderWay(item, submit(self._engine, self._encoder, item))
        except InvalidRequest as error:
            return _UnderWay(item, error=f"{item.where}: {error}")

    def _pop(self) -> Result:
        entry = self._entries.popleft()
        self._num_under_way -= len(entry.handles) or 1
        return entry.result()

    def _cancel(self) -> None:
        for entry in self._entries:
            for handle in entry.handles:
                handle.cancel()
        while any(not entry.ended for entry in self._entries):
            self._engine.advance(PAUSE_S)

    def _rest(self) -> Iterator[Result]:
        """Results that are there, without those of requests that were given up."""
        entries, self._entries = self._entries, deque()
        for entry in entries:
            if entry.ended and not entry.cancelled:
                yield entry.result()


def submit(engine: Engine, encoder: Encoder, ask: Ask) -> list[Handle]:
    """Post a request, or a group of `n`. Raises InvalidRequest."""
    prompt = encoder.encode(ask)
    params = bounded(ask.params, engine.info, len(prompt))
    if ask.n == 1:
        return [engine.submit(prompt, params, **ask.options)]
    return engine.submit_group(prompt, params, ask.n, **ask.options)


def bounded(params: SamplingParams, info: EngineInfo, num_prompt: int) -> SamplingParams:
    """`params` with MAX_NEW_TOKENS, or as many as model and pool hold, where they name no maximum."""
    if params.max_tokens is not None:
        return params
    room = min(info.model.max_length, info.num_blocks * info.block_size + 1) - num_prompt
    most = min(max(MAX_NEW_TOKENS, params.min_tokens), room)
    return params if most < max(1, params.min_tokens) else replace(params, max_tokens=most)  # what does not fit is refused


def was_cut(ask: Ask, completion: Completion) -> bool:
    """Whether nothing but MAX_NEW_TOKENS ended the text."""
    return (
        ask.params.max_tokens is None
        and completion.finish_reason is FinishReason.LENGTH
        and len(completion.token_ids) >= MAX_NEW_TOKENS
    )


def stream(engine: Engine, handle: Handle, interrupt: Interrupt) -> Iterator[Chunk]:
    """New output of one request as it comes; after Ctrl-C the request is cancelled and what there is comes out."""
    chunks = handle.stream()
    num_seen = 0
    while True:
        while not handle.finished and handle.request.num_output == num_seen:
            if interrupt.asked:
                handle.cancel()
            engine.advance(PAUSE_S)
        chunk = next(chunks, None)
        if chunk is None:
            return
        num_seen += len(chunk.token_ids)
        yield chunk
        if interrupt.asked:
            handle.cancel()
