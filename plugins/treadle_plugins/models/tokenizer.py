"""Text to token ids and back, through a fast tokenizer of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from treadle.errors import InvalidRequest, ModelError

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endofturn|>", "<|end_of_turn|>", "<turn|>")
"""How chat templates end a turn; models that use one of these say so in their template."""


class HFTokenizer:
    """A `treadle.contracts.Tokenizer` over a fast tokenizer of transformers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"the model's tokenizer, {type(tokenizer).__name__}, has no fast form; save it as tokenizer.json and try again"
            )
        self.tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # a tokenizer.json may ask for both, as training does
        self._backend.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands; special tokens come first where the model's tokenizer adds them."""
        _refuse_surrogates(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=True).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens; bytes that are no whole character yet come out as U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Token ids of `messages`, ready for the assistant's answer; None when the model has no chat template.

        Raises InvalidRequest for a message without role or content, and for what the template refuses.
        """
        if not self.tokenizer.chat_template:
            return None
        _check_messages(messages)
        text = self._apply_template(messages)
        _refuse_surrogates(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids  # the template brings its own
        return ids

    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's end-of-text token and the token that its chat template ends a turn with."""
        known = self.tokenizer.get_vocab()
        template = str(self.tokenizer.chat_template or "")
        turns = {known[token] for token in _END_OF_TURN if token in template and token in known}
        return frozenset(turns | as_ids(self.tokenizer.eos_token_id))

    def _apply_template(self, messages: Sequence[dict[str, str]]) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error


def as_ids(value: object) -> set[int]:
    """Token ids of a setting that may be unset, one id or several."""
    if isinstance(value, int):
        return {value}
    return {int(item) for item in value} if isinstance(value, Iterable) else set()


def _check_messages(messages: Sequence[dict[str, str]]) -> None:
    if not messages:
        raise InvalidRequest("messages=[] is an empty conversation; give at least one message with role and content")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidRequest(f"messages[{index}] has no text for {key!r}; it holds {sorted(message)}")


def _refuse_surrogates(text: str) -> None:
    """Half a character, as broken JSON escapes bring it, is no text that could be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"U+{ord(text[error.start]):04X} at position {error.start}"
        raise InvalidRequest(f"the text holds half a character ({where}), which no encoding has; remove it") from None
