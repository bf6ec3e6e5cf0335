"""`treadle generate` with the default model, as a user types it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from support.examples import QUESTION
from treadle.cli import cli

pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.model


def test_it_answers_a_question_as_text() -> None:
    result = CliRunner().invoke(cli, ["generate", QUESTION, "--max-tokens", "24"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "The capital of France is Paris.\n"


def test_jsonl_streams_agree_with_the_text_and_share_prefixes() -> None:
    requests = [
        {"prompt": QUESTION, "id": "plain"},
        {"messages": [{"role": "user", "content": QUESTION}], "id": "messages"},
        {"prompt": "", "id": "empty"},
        {"tokens": [1, 2, 10**9], "id": "outside"},
    ]
    text = "".join(json.dumps(request) + "\n" for request in requests)
    result = CliRunner().invoke(cli, ["generate", "--jsonl", "--max-tokens", "8", "--stats"], input=text)
    assert result.exit_code == 1
    plain, messages, empty, outside = (json.loads(line) for line in result.stdout.splitlines())
    assert "Paris" in plain["text"]
    assert plain["token_ids"] == messages["token_ids"]
    assert empty["error"] == "standard input:3: prompt is empty; give at least one token"
    assert "vocabulary" in outside["error"]
    assert "of which 2 failed" in result.stderr


def test_raw_continues_the_text() -> None:
    result = CliRunner().invoke(cli, ["generate", "--raw", "The capital of France is", "--max-tokens", "4"])
    assert result.exit_code == 0, result.stderr
    assert "Paris" in result.stdout
