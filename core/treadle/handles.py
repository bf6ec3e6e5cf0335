"""What a caller holds: a handle to a request on its way, and the completion that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from treadle.errors import WrongCall
from treadle.loop import Loop
from treadle.plan import FinishReason, TokenLogprobs
from treadle.request import Counted, Figures, LiveRequest, Request
from treadle.text import TextStream, Tokenizer


@dataclass(frozen=True)
class Completion(Counted):
    """How a request ended. Times are the engine's clock, in seconds."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated tokens, with the one that ended it."""
    text: str | None
    """Generated text, without special tokens, stop tokens and stop strings; None when the executor has no tokenizer."""
    finish_reason: FinishReason
    error: Exception | None
    counted: Figures
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @classmethod
    def of_invalid(cls, error: Exception, now: float, request_id: str = "") -> Completion:
        """The completion of a request that never was one."""
        return cls(request_id, (), (), None, FinishReason.REFUSED, error, Figures(now, finished_s=now))

    @property
    def figures(self) -> Figures:
        return self.counted

    @property
    def finished_s(self) -> float:
        assert self.counted.finished_s is not None
        return self.counted.finished_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from submission to the end of the step that brought it."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.first_token_s is None or len(self.token_ids) < 2:
            return None
        return (self.finished_s - self.first_token_s) / (len(self.token_ids) - 1)

    def raise_for_error(self) -> Completion:
        """Raise the error that ended the request, if one did; else return the completion."""
        if self.error is not None:
            raise self.error
        return self


class Chunk(NamedTuple):
    """New output of a request. The text may lag behind the tokens: it never ends within a character or a stop string."""

    token_ids: tuple[int, ...]
    text: str


class Handle:
    """A request on its way. Safe to use from any thread."""

    def __init__(
        self, loop: Loop, request: LiveRequest, tokenizer: Tokenizer | None, cancel: Callable[[LiveRequest], None]
    ) -> None:
        self._loop = loop
        self._request = request
        self._tokenizer = tokenizer
        self._cancel = cancel
        self._polled = _Reader(request, tokenizer)

    def __repr__(self) -> str:
        return f"<Handle of {self._request!r}>"

    @property
    def id(self) -> str:
        return self._request.id

    @property
    def request(self) -> Request:
        return self._request

    @property
    def finished(self) -> bool:
        """Whether the completion is there."""
        return self._request.progress[1] is not None

    def cancel(self) -> None:
        """Ask for the request's end; it takes effect at the start of the next step. Ignored when it has ended."""
        self._cancel(self._request)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end. Steps the engine when no thread does. Raises TimeoutError when `timeout_s` seconds were too few."""
        self._loop.wait_for(self._request, lambda: self.finished, timeout_s)
        return self.completion()

    def stream(self) -> Iterator[Chunk]:
        """Yield new tokens, with their text, as they come. Ends with the request; its `completion` says why.

        A stream that is closed before its end, as by leaving the loop over it, cancels the request.
        """
        reader = _Reader(self._request, self._tokenizer)
        try:
            while not reader.ended:
                self._loop.wait_for(self._request, lambda: reader.has_news)
                chunk = reader.read()
                if chunk is not None:
                    yield chunk
        except WrongCall:
            reader.ended = True  # read in a hook by mistake, not given up
            raise
        finally:
            if not reader.ended:
                self.cancel()

    def poll(self) -> Chunk | None:
        """New output since the last call, without waiting; None when there is none. For one reader at a time."""
        return self._polled.read() if self._polled.has_news else None

    def on_progress(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever there is new output, and at the end: on the stepping thread, so it must return at once.

        What it raises is logged. If there is output already, or the end, it is called here and now as well.
        """
        self._loop.watch(self._request, callback)
        if self._request.progress != (0, None):
            callback()

    def completion(self) -> Completion:
        """The completion of a finished request."""
        request, (num_output, end) = self._request, self._request.progress
        assert end is not None, f"{request!r} has not ended"
        return Completion(
            request_id=request.id,
            prompt_token_ids=request.token_ids(0, request.prompt_length),
            token_ids=request.token_ids(request.prompt_length, request.prompt_length + num_output),
            text=self._text(),
            finish_reason=end.reason,
            error=end.error,
            counted=request.figures,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )

    def _text(self) -> str | None:
        if self._tokenizer is None:
            return None
        chunk = _Reader(self._request, self._tokenizer).read()
        return "" if chunk is None else chunk.text


class _Reader:
    """Reads what was published of a request, and no token twice."""

    def __init__(self, request: LiveRequest, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self._text = None if tokenizer is None else TextStream(tokenizer, request.params.stop)
        self._num_seen = 0
        self.ended = False
        """Whether all has been read."""

    @property
    def has_news(self) -> bool:
        num_output, end = self._request.progress
        return not self.ended and (end is not None or num_output > self._num_seen)

    def read(self) -> Chunk | None:
        """What is new; None when that is neither token nor text."""
        num_output, end = self._request.progress
        start = self._request.prompt_length
        new = self._request.token_ids(start + self._num_seen, start + num_output)
        piece = "" if self._text is None else self._decode(self._text, new, None if end is None else end.reason)
        self._num_seen = num_output
        self.ended = end is not None
        return Chunk(new, piece) if new or piece else None

    def _decode(self, text: TextStream, new: tuple[int, ...], ended: FinishReason | None) -> str:
        """Decode new tokens, one by one while a stop string must not count yet; a stop token's own text is left out."""
        params = self._request.params
        if ended is FinishReason.STOP and new and new[-1] in params.stop_token_ids:
            new = new[:-1]
        early = max(0, min(len(new), params.min_tokens - self._num_seen - 1))
        piece = text.push(new[:early], may_stop=False) if early else ""
        piece += text.push(new[early:])
        return piece + text.finish() if ended is not None else piece
