"""A tokenizer of bytes keeps the tokenizers' contract; those of models are tested where their libraries are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from treadle.testing.suites import TokenizerSuite
from treadle.text import Tokenizer


class Bytes:
    """Each byte is a token; turns of a conversation end with byte 0."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token).decode("utf-8", errors="replace")

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return [token for message in messages for token in (*self.encode(message["content"]), 0)]


class TestBytes(TokenizerSuite):
    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return Bytes()
