"""Text to tokens and back, chat templates, and the tokens that end a text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import InvalidRequest, ModelError
from treadle.text import Tokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")

from treadle_plugins.models.tokenizer import HFTokenizer, as_ids  # noqa: E402  # after the skips

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level(template: str | None = CHATML, bos: bool = False) -> Any:
    """A tokenizer of bytes: 256 tokens behind three special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if bos:
        special = [("<|im_start|>", 1)]
        backend.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", special_tokens=special)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0])
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[1:]})
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def wrapped() -> HFTokenizer:
    return HFTokenizer(byte_level())


def test_it_is_what_the_core_asks_for(wrapped: HFTokenizer) -> None:
    assert isinstance(wrapped, Tokenizer)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(wrapped: HFTokenizer, text: str) -> None:
    assert wrapped.decode(wrapped.encode(text)) == text


def test_it_says_what_the_transformers_tokenizer_says(wrapped: HFTokenizer) -> None:
    text = "Hello , world ! It 's 1234 .\n\t<|im_end|> Žluťoučký 🐎"
    ids = wrapped.encode(text)
    assert ids == wrapped.tokenizer.encode(text)
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert wrapped.decode(ids) == wrapped.tokenizer.decode(ids, **options)


def test_special_tokens_are_left_out_and_half_characters_are_marked(wrapped: HFTokenizer) -> None:
    assert wrapped.decode([1, *wrapped.encode("a"), 2]) == "a"
    assert wrapped.decode(wrapped.encode("é")[:1]) == "\ufffd"
    assert wrapped.decode([]) == ""


def test_a_first_token_comes_only_where_the_tokenizer_adds_it() -> None:
    assert HFTokenizer(byte_level()).encode("") == []
    with_bos = HFTokenizer(byte_level(bos=True))
    assert with_bos.encode("") == [1]
    chat = with_bos.chat([{"role": "user", "content": "a"}])
    assert chat is not None
    assert chat[:2] != [1, 1]


def test_truncation_and_padding_in_the_file_are_not_obeyed() -> None:
    fast = byte_level()
    fast.backend_tokenizer.enable_truncation(4)
    fast.backend_tokenizer.enable_padding(length=64)
    assert len(HFTokenizer(fast).encode("a" * 20)) == 20


def test_chat_ends_where_the_assistant_begins(wrapped: HFTokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = wrapped.chat(messages)
    assert ids == wrapped.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids is not None
    assert ids[-len("assistant\n") - 1] == 1


def test_chat_without_a_template_is_none() -> None:
    assert HFTokenizer(byte_level(template=None)).chat([{"role": "user", "content": "Hi"}]) is None


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty conversation"),
        ([{"role": "user"}], r"messages\[0\] has no text for 'content'"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\] has no text for 'role'"),
        ([{"role": "user", "content": None}], "has no text for 'content'"),
    ],
)
def test_bad_conversations_are_refused(wrapped: HFTokenizer, messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        wrapped.chat(messages)


def test_what_the_template_refuses_is_refused() -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('must start with user') }}{% endif %}"
    with pytest.raises(InvalidRequest, match="refuses these messages: must start with user"):
        HFTokenizer(byte_level(template)).chat([{"role": "system", "content": "x"}])


def test_half_a_character_is_refused(wrapped: HFTokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"U\+D83D at position 2"):
        wrapped.encode("ab\ud83d")
    with pytest.raises(InvalidRequest, match=r"U\+D83D"):
        wrapped.chat([{"role": "user", "content": "\ud83d"}])


def test_the_end_of_a_turn_ends_the_text_of_a_chat_model() -> None:
    assert HFTokenizer(byte_level()).eos_token_ids() == {0, 2}
    assert HFTokenizer(byte_level(template=None)).eos_token_ids() == {0}


@pytest.mark.parametrize(("value", "ids"), [(None, set()), (0, {0}), ([1, 2], {1, 2}), ((), set())])
def test_ids_come_in_several_forms(value: object, ids: set[int]) -> None:
    assert as_ids(value) == ids


def test_a_slow_tokenizer_is_an_error() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ModelError, match="Slow, has no fast form"):
        HFTokenizer(Slow())
