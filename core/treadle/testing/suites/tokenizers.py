"""What every tokenizer must do."""

from __future__ import annotations

from typing import ClassVar

import pytest

from treadle.plugin import missing_members
from treadle.text import Tokenizer


class TokenizerSuite:
    """Text comes back as it was, at any cut, and a conversation can be read in its tokens."""

    texts: ClassVar[tuple[str, ...]] = (
        "Hello, world!",
        "two  spaces and a\ttab",
        "1234 + 5 = 1239",
        "Žluťoučký kůň 🐎 漢字",
        "a\n\nb",
    )

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        """What is under test. Override it."""
        pytest.fail(f"{type(self).__name__} must override the fixture `tokenizer`")

    def test_it_is_a_tokenizer(self, tokenizer: Tokenizer) -> None:
        """It has the methods."""
        assert not missing_members(Tokenizer, tokenizer), f"{tokenizer!r} is no Tokenizer"

    def test_any_text_comes_back(self, tokenizer: Tokenizer) -> None:
        """Special tokens that were added are left out again."""
        for text in self.texts:
            ids = tokenizer.encode(text)
            assert all(isinstance(token, int) and token >= 0 for token in ids), f"{text!r} became {ids}"
            assert tokenizer.decode(ids) == text, f"{text!r} became {tokenizer.decode(ids)!r}"

    def test_the_same_text_gives_the_same_tokens(self, tokenizer: Tokenizer) -> None:
        """Nothing is left over from the text before."""
        first = [tokenizer.encode(text) for text in self.texts]
        again = [tokenizer.encode(text) for text in reversed(self.texts)][::-1]
        assert first == again

    def test_no_tokens_are_no_text(self, tokenizer: Tokenizer) -> None:
        """Nothing in, nothing out."""
        assert tokenizer.decode([]) == ""

    def test_a_cut_within_a_character_is_marked(self, tokenizer: Tokenizer) -> None:
        """What is decoded of a start is the start of the text, but for marks at its end."""
        for text in self.texts:
            ids = tokenizer.encode(text)
            for cut in range(len(ids)):
                start = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
                assert text.startswith(start), f"the first {cut} tokens of {text!r} are {start!r}"

    def test_a_conversation_holds_what_was_said(self, tokenizer: Tokenizer) -> None:
        """None stands for a model without a chat template."""
        ids = tokenizer.chat([{"role": "user", "content": "What is a treadle?"}])
        if ids is not None:
            assert "What is a treadle?" in tokenizer.decode(ids), f"{tokenizer.decode(ids)!r} lost the question"
            longer = tokenizer.chat(
                [
                    {"role": "user", "content": "What is a treadle?"},
                    {"role": "assistant", "content": "A foot lever."},
                    {"role": "user", "content": "Whose?"},
                ]
            )
            assert longer is not None
            assert "A foot lever." in tokenizer.decode(longer)
