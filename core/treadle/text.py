"""Incremental detokenization and stop strings, over the Tokenizer protocol.

    tokens -> _Detokenizer -> text that no later token can change -> _StopFilter -> text that is in no stop string

The detokenizer decodes a short window of the last tokens, never the whole output:

    tokens   t0 .. t41 | t42 t43 t44 t45   t46 t47 | t48 ...
               dropped |    context      pending   | next
    decode(window):      "...context text" "new"  U+FFFD
                                          ^shown  ^certain
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer's `decode` puts in place of bytes that are no whole character, or not yet."""

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character, so also the most tokens that can share one."""
_WINDOW = 12
"""Tokens above which the window is cut back to its last few."""
_DIRTY_WINDOW = 32
"""The same while the text ends unfinished, where a good place to cut is harder to find."""


@runtime_checkable
class Tokenizer(Protocol):
    """Between text and token ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands: special tokens that the model expects at the start are added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`; special tokens are left out, bytes that are no whole character yet come out as U+FFFD."""
        ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Token ids of a conversation ready for the assistant's answer; None when the model has no chat template."""
        ...


class TextStream:
    """The text of a growing list of tokens, given out as soon as it is certain.

    Nothing given out is ever taken back: it holds no half character, and nothing that may turn out to be the beginning
    of a stop string. What all calls return, joined, is `tokenizer.decode` of all tokens, cut before the stop string
    that is complete first (of several complete at the same character, the longest). How tokens are spread over calls
    makes no difference.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._detokenizer = _Detokenizer(tokenizer)
        self._filter = _StopFilter(stop)
        self._parts: list[str] = []
        self._num_tokens = 0
        self._may_stop = True
        self._finished = False

    @property
    def text(self) -> str:
        """All text given out so far."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None while there is none."""
        return self._filter.hit

    @property
    def num_tokens(self) -> int:
        """Tokens taken in, up to the one that completed the stop string; those behind it are ignored."""
        return self._num_tokens

    def push(self, token_ids: Sequence[int], may_stop: bool = True) -> str:
        """Take the next tokens; return the text that has become certain, which may be empty.

        With `may_stop` False, as long as a request's `min_tokens` is not reached, a stop string that becomes complete
        counts as plain text; one that is only begun may still be completed by a later call.
        """
        assert not self._finished, "push() after finish()"
        pieces = []
        for token_id in token_ids:
            if self._filter.hit is not None:
                break
            self._num_tokens += 1
            self._may_stop = may_stop
            pieces.append(self._filter.feed(self._detokenizer.feed(token_id), may_stop))
        return self._give("".join(pieces))

    def finish(self) -> str:
        """Return what was held back: no token follows. Empty after a stop string, and when called again."""
        if self._finished:
            return ""
        self._finished = True
        rest = self._filter.feed(self._detokenizer.rest(), self._may_stop)
        return self._give(rest + self._filter.rest())

    def _give(self, piece: str) -> str:
        if piece:
            self._parts.append(piece)
        return piece


class _Detokenizer:
    """Turns tokens into text one by one, at a cost that does not grow with the text.

    Tokens are decoded with some before them as context, since many tokenizers drop the space in front of a lone token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._text = ""
        """The window's text; [:_shown] of it was given out, or is context."""
        self._shown = 0
        self._num_pending = 0
        """Tokens since the text last ended with a whole character."""
        self._cut_at = _WINDOW

    def feed(self, token_id: int) -> str:
        """Take one token; return the text that no later token can change."""
        text = self._decode([*self._window, token_id])
        if text == self._text and not self._decode([token_id, token_id]):
            return ""  # a special token, which has no text anywhere; kept, it would fill the window
        self._window.append(token_id)
        self._text = text
        self._num_pending += 1
        certain = self._certain()
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if len(self._window) > (max(self._cut_at, _DIRTY_WINDOW) if self._num_pending else self._cut_at):
            self._cut()
        return piece

    def rest(self) -> str:
        """The text held back so far."""
        piece = self._text[self._shown :]
        self._shown = len(self._text)
        return piece

    def _certain(self) -> int:
        """How many characters of the window's text no later token can change."""
        whole = len(self._text.rstrip(UNFINISHED))
        unfinished = len(self._text) - whole
        if not unfinished:
            self._num_pending = 0
        elif self._num_pending >= _LONGEST_CHARACTER:
            # More tokens than an unfinished character has bytes: some marks are text. The last may yet begin one.
            return len(self._text) - min(unfinished, _LONGEST_CHARACTER - 1)
        return whole

    def _cut(self) -> None:
        """Forget the oldest tokens of the window, at a place where that changes no text."""
        for keep in range(_LONGEST_CHARACTER, 2 * _LONGEST_CHARACTER + 1):
            head, tail = self._decode(self._window[:-keep]), self._decode(self._window[-keep:])
            # A cut through a character makes two marks of one, so the parts come out longer than the whole. They come
            # out shorter where the tokenizer drops a space in front of the tail.
            fits = len(head) + len(tail) <= len(self._text)
            shown = self._shown - len(self._text) + len(tail)
            if fits and shown > 0 and self._text.startswith(head) and self._text.endswith(tail):
                self._window, self._text, self._shown = self._window[-keep:], tail, shown
                self._cut_at = _WINDOW
                return
        self._cut_at = 2 * len(self._window)


class _StopFilter:
    """Passes text on, without what may be the beginning of a stop string, until one is complete."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        """Text that some stop string begins with; always shorter than the longest of them."""
        self.hit: str | None = None

    def feed(self, piece: str, may_stop: bool) -> str:
        """Take the next text; return what lies before any stop string and cannot belong to one."""
        if not piece or not self._stop:
            return piece
        if self.hit is not None:
            return ""
        text = self._held + piece
        start = self._find(text, len(self._held)) if may_stop else None
        if start is not None:
            self._held = ""
            return text[:start]
        kept = self._num_begun(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def rest(self) -> str:
        """The text held back so far; no more text follows."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> int | None:
        """Where the stop string begins that is complete first, and not within the first `num_old` characters."""
        best: tuple[int, int] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best, self.hit = (start + len(stop), start), stop
        return best[1] if best else None

    def _num_begun(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with, without being it."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        return next((n for n in range(longest, 0, -1) if self._begins(text[len(text) - n :])), 0)

    def _begins(self, end: str) -> bool:
        return any(len(stop) > len(end) and stop.startswith(end) for stop in self._stop)
