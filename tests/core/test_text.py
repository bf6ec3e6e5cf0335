"""Incremental detokenization and stop strings, over tokenizers with the habits of real ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.text import UNFINISHED, TextStream, Tokenizer

SPECIAL = 999


class ByteTokenizer:
    """Like GPT-2's: tokens 0 to 255 are bytes, some others are several, which need not be whole characters."""

    MERGED = (
        b" the",
        b"he",
        b" caf\xc3",
        b"\xa9 \xe2\x82",
        b"\xac",
        b"\x9f\x98",
        b"END",
        b"\n\n",
        b"\xc3\xa9",
        b"\xef\xbf\xbd",
    )

    def __init__(self) -> None:
        self.num_decoded = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return b"".join(self._bytes(t) for t in token_ids if t != SPECIAL).decode("utf-8", errors="replace")

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return None

    def _bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self.MERGED[token_id - 256]


class PieceTokenizer(ByteTokenizer):
    """Like Llama's: `decode` drops the leading space of its first piece; characters without a piece are bytes.

    A run of bytes that is not all valid decodes to one mark for each byte, so a whole character in front of an
    unfinished one turns back into marks for a while.
    """

    PIECES = (
        "\u2581",
        "\u2581the",
        "\u2581a",
        "ing",
        "e",
        "\u2581END",
        "EN",
        "D",
        "\n",
        "\u2581\u2581",
        UNFINISHED,
        "\u2581.",
    )

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        parts, run = [], b""
        for token_id in [*token_ids, 256]:
            if token_id == SPECIAL:
                continue
            if token_id < 256:
                run += bytes([token_id])
                continue
            parts.append(self._run(run))
            parts.append(self.PIECES[token_id - 256])
            run = b""
        text = "".join(parts[:-1]).replace("\u2581", " ")
        return text[1:] if text.startswith(" ") else text

    @staticmethod
    def _run(run: bytes) -> str:
        try:
            return run.decode()
        except UnicodeDecodeError:
            return UNFINISHED * len(run)


class StrippingTokenizer(PieceTokenizer):
    """Drops all the white space that a text begins with."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids).lstrip(" ")


STOP_TEXTS = ("END", "EN", " the", "e\u20ac", "aa", "a a", "\n\n", "\U0001f600", " E", "ND", UNFINISHED)

BYTE_TOKENS = st.lists(st.one_of(st.integers(0, 255), st.integers(256, 265), st.just(SPECIAL)), max_size=60)
# U+FFFD is left out: spelled with bytes inside a run of others, it looks the same as the others' unfinished characters.
CHARACTERS = st.text("ae E\u00e9\u20ac\U0001f600", max_size=4).map(lambda text: list(text.encode()))
PIECE_TOKENS = st.lists(st.one_of(st.integers(256, 267).map(lambda t: [t]), CHARACTERS, st.just([SPECIAL])), max_size=40).map(
    lambda groups: [token for group in groups for token in group]
)
STOPS = st.lists(st.sampled_from(STOP_TEXTS), max_size=3)
CUTS = st.lists(st.integers(0, 80), max_size=8)


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """`text` up to the stop string that is complete first; of two, the longest."""
    found = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    _, start, stop = min(found)
    return text[:start], stop


def chunks(tokens: list[int], cuts: Sequence[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(edges)]


def check_whole(tokenizer: Tokenizer, tokens: list[int], stops: Sequence[str], cuts: Sequence[int]) -> None:
    stream = TextStream(tokenizer, tuple(stops))
    text = "".join([*(stream.push(chunk) for chunk in chunks(tokens, cuts)), stream.finish()])
    expected, stop = cut_at_stop(tokenizer.decode(tokens), stops)
    assert text == expected
    assert stream.text == expected
    assert stream.stopped == stop


@given(BYTE_TOKENS, STOPS, CUTS)
def test_bytes_stream_as_they_decode_whole(tokens: list[int], stops: list[str], cuts: list[int]) -> None:
    check_whole(ByteTokenizer(), tokens, stops, cuts)


@given(st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xFF, 97, 259, SPECIAL]), max_size=120), CUTS)
def test_broken_bytes_stream_as_they_decode_whole(tokens: list[int], cuts: list[int]) -> None:
    check_whole(ByteTokenizer(), tokens, (), cuts)


@given(PIECE_TOKENS, STOPS, CUTS)
def test_pieces_stream_as_they_decode_whole(tokens: list[int], stops: list[str], cuts: list[int]) -> None:
    check_whole(PieceTokenizer(), tokens, stops, cuts)


@given(PIECE_TOKENS, STOPS, CUTS)
def test_stripped_text_streams_as_it_decodes_whole(tokens: list[int], stops: list[str], cuts: list[int]) -> None:
    check_whole(StrippingTokenizer(), tokens, stops, cuts)


@given(PIECE_TOKENS, STOPS, CUTS)
def test_every_prefix_given_out_stands(tokens: list[int], stops: list[str], cuts: list[int]) -> None:
    """What was given out at any time begins the final text: nothing of a stop string, no half character."""
    expected, _ = cut_at_stop(PieceTokenizer().decode(tokens), stops)
    stream = TextStream(PieceTokenizer(), tuple(stops))
    for chunk in chunks(tokens, cuts):
        stream.push(chunk)
        assert expected.startswith(stream.text)


@given(BYTE_TOKENS, STOPS, CUTS)
def test_minimum_tokens_do_not_depend_on_chunks(tokens: list[int], stops: list[str], cuts: list[int]) -> None:
    least = len(tokens) // 2
    single, chunked = TextStream(ByteTokenizer(), tuple(stops)), TextStream(ByteTokenizer(), tuple(stops))
    for token in tokens[:least]:
        single.push([token], may_stop=False)
    for token in tokens[least:]:
        single.push([token])
    for may_stop, part in ((False, tokens[:least]), (True, tokens[least:])):
        for chunk in chunks(part, cuts):
            chunked.push(chunk, may_stop)
    single.finish()
    chunked.finish()
    assert (single.text, single.stopped, single.num_tokens) == (chunked.text, chunked.stopped, chunked.num_tokens)


def test_a_character_comes_when_it_is_whole() -> None:
    stream = TextStream(ByteTokenizer())
    assert [stream.push([byte]) for byte in "a\u20acb".encode()] == ["a", "", "", "\u20ac", "b"]


def test_a_whole_character_survives_an_unfinished_one_in_the_same_run_of_bytes() -> None:
    stream = TextStream(PieceTokenizer())
    assert [stream.push([byte]) for byte in "\U0001f600\U0001f600".encode()] == ["", "", "", "\U0001f600"] * 2


def test_special_tokens_inside_a_character() -> None:
    first, *rest = "\u20ac".encode()
    stream = TextStream(ByteTokenizer())
    assert stream.push([first, *[SPECIAL] * 100]) == ""
    assert stream.push(rest) == "\u20ac"


@pytest.mark.parametrize("tokens", [[0xFF], [265], [0xE2, 0x82]], ids=["invalid", "real", "unfinished"])
def test_marks_are_not_held_back_for_ever(tokens: list[int]) -> None:
    stream = TextStream(ByteTokenizer())
    for num_pushed in range(1, 200):
        stream.push(tokens)
        assert len(stream.text) >= num_pushed - 3
    stream.finish()
    assert stream.text == ByteTokenizer().decode(tokens * 199)


def test_text_before_an_unfinished_character_is_not_held_back() -> None:
    assert TextStream(ByteTokenizer()).push([258]) == " caf"


def test_a_stop_string_over_several_tokens() -> None:
    stream = TextStream(ByteTokenizer(), ("END",))
    assert [stream.push([byte]) for byte in b"aEENDb"] == ["a", "", "E", "", "", ""]
    assert (stream.text, stream.stopped, stream.num_tokens) == ("aE", "END", 5)
    assert stream.finish() == ""


def test_a_begun_stop_string_is_given_out_at_the_end() -> None:
    stream = TextStream(ByteTokenizer(), ("END",))
    assert stream.push(b"aEN") == "a"
    assert stream.finish() == "EN"
    assert stream.finish() == ""
    assert stream.text == "aEN"


def test_a_stop_string_inside_another_wins_when_it_is_complete_first() -> None:
    stream = TextStream(ByteTokenizer(), ("abcd", "bc"))
    assert stream.push(b"xabcd") == "xa"
    assert stream.stopped == "bc"


def test_a_stop_string_may_end_in_text_that_was_held_back() -> None:
    stream = TextStream(ByteTokenizer(), (UNFINISHED,))
    assert stream.push([97, 0xE2]) == "a"
    assert stream.finish() == ""
    assert stream.stopped == UNFINISHED


def test_a_stop_string_before_min_tokens_is_text() -> None:
    stream = TextStream(ByteTokenizer(), ("aa",))
    assert stream.push(b"aa", may_stop=False) == "a"
    assert stream.push(b"a") == ""
    assert (stream.text, stream.stopped) == ("a", "aa")


def test_a_stop_string_begun_before_min_tokens_counts() -> None:
    stream = TextStream(ByteTokenizer(), ("END",))
    assert stream.push(b"xEN", may_stop=False) == "x"
    assert stream.push(b"Dy") == ""
    assert stream.stopped == "END"


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        (ByteTokenizer(), [97]),
        (ByteTokenizer(), [SPECIAL]),
        (ByteTokenizer(), [0xFF]),
        (ByteTokenizer(), [258, 259]),
        (ByteTokenizer(), list("\U0001f600".encode())),
        (PieceTokenizer(), list("\U0001f600".encode())),
        (PieceTokenizer(), [256]),
        (PieceTokenizer(), [0xFF]),
        (PieceTokenizer(), [257, SPECIAL]),
    ],
)
def test_a_token_costs_the_same_however_long_the_text_is(tokenizer: ByteTokenizer, tokens: list[int]) -> None:
    stream = TextStream(tokenizer, ("never",))
    tokenizer.num_decoded = 0
    for _ in range(2000):
        stream.push(tokens)
    assert tokenizer.num_decoded <= 60 * 2000 * len(tokens)
