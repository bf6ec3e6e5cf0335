"""What a caller holds: a handle to a request on its way, and the completion that it becomes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from treadle.contracts import Tokenizer
from treadle.plan import TokenLogprobs
from treadle.request import FinishReason, LiveRequest, Phase, Request
from treadle.text import TextStream

if TYPE_CHECKING:
    from treadle.engine import Engine


@dataclass(frozen=True)
class Completion:
    """How a request ended. Times are the engine's clock, in seconds."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated tokens, with the one that ended it."""
    text: str | None
    """Generated text, without special tokens, stop tokens and stop strings; None when the executor has no tokenizer."""
    finish_reason: FinishReason
    error: Exception | None
    num_cached_tokens: int
    num_preempted: int
    num_recomputed_tokens: int
    """Tokens computed again after preemptions: work that was lost."""
    was_trimmed: bool
    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    finished_s: float
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @classmethod
    def of_invalid(cls, error: Exception, now: float, request_id: str = "") -> Completion:
        """The completion of a request that never was one."""
        return cls(request_id, (), (), None, FinishReason.REFUSED, error, 0, 0, 0, False, now, None, None, now)

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

    def __init__(self, engine: Engine, request: LiveRequest, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._request = request
        self._tokenizer = tokenizer

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
        return self._request.phase is Phase.FINISHED

    def cancel(self) -> None:
        """Ask for the request's end; it takes effect at the start of the next step."""
        self._engine.cancel(self._request.id)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end. Steps the engine when no thread does. Raises TimeoutError when `timeout_s` seconds were too few."""
        self._engine.wait_for(lambda: self.finished, timeout_s)
        return self.completion()

    def stream(self) -> Iterator[Chunk]:
        """Yield new tokens, with their text, as they come. Ends with the request; its `completion` says why."""
        request = self._request
        text = None if self._tokenizer is None else TextStream(self._tokenizer, request.params.stop)
        num_seen = 0
        while True:
            self._engine.wait_for(lambda: self.finished or request.num_output > num_seen)  # noqa: B023  # called at once
            ended = self.finished
            new = request.token_ids(request.prompt_length + num_seen)
            piece = ""
            if text is not None:
                piece = self._push(text, new, num_seen, ended)
            if new or piece:
                yield Chunk(new, piece)
            num_seen += len(new)
            if ended:
                return

    def completion(self) -> Completion:
        """The completion of a finished request."""
        request = self._request
        assert request.finish_reason is not None, f"{request!r} has not ended"
        assert request.finished_s is not None
        return Completion(
            request_id=request.id,
            prompt_token_ids=request.token_ids(0, request.prompt_length),
            token_ids=request.token_ids(request.prompt_length),
            text=self._text(),
            finish_reason=request.finish_reason,
            error=request.error,
            num_cached_tokens=request.num_cached_tokens,
            num_preempted=request.num_preempted,
            num_recomputed_tokens=request.num_recomputed_tokens,
            was_trimmed=request.was_trimmed,
            arrival_s=request.arrival_s,
            admitted_s=request.admitted_s,
            first_token_s=request.first_token_s,
            finished_s=request.finished_s,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
        )

    def _text(self) -> str | None:
        if self._tokenizer is None:
            return None
        text = TextStream(self._tokenizer, self._request.params.stop)
        self._push(text, self._request.token_ids(self._request.prompt_length), 0, ended=True)
        return text.text

    def _push(self, text: TextStream, new: tuple[int, ...], num_seen: int, ended: bool) -> str:
        """Decode new tokens, one by one while a stop string must not count yet; a stop token's own text is left out."""
        params = self._request.params
        if ended and new and self._request.finish_reason is FinishReason.STOP and new[-1] in params.stop_token_ids:
            new = new[:-1]
        early = max(0, min(len(new), params.min_tokens - num_seen - 1))
        piece = text.push(new[:early], may_stop=False) if early else ""
        piece += text.push(new[early:])
        return piece + text.finish() if ended else piece
