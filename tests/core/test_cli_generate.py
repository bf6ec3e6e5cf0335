"""`treadle generate` with the fake executor: what goes in, what comes out, and how it ends."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from treadle.cli import cli
from treadle_plugins.commands.generation.prompts import Ask, Defaults, Problem, parse_line
from treadle_plugins.commands.generation.results import Figures, Progress

PLUGINS = Path(__file__).parent / "cli_plugins"
CONFIG = 'execute = "simulated"\nplugins = ["cli_fakes:{fake}"]\npool.num_blocks = 200\nallocate.block_size = 16\n'
KEYS = {
    "id", "index", "text", "token_ids", "finish_reason", "error", "num_prompt_tokens", "num_cached_tokens", "ttft_s", "tpot_s",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGINS), *sys.path]))
    monkeypatch.chdir(tmp_path)
    configure(monkeypatch, "Fake")


def configure(monkeypatch: pytest.MonkeyPatch, fake: str) -> None:
    Path("fake.toml").write_text(CONFIG.format(fake=fake))
    monkeypatch.setenv("TREADLE_CONFIG", "fake.toml")


def run(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["generate", *args], input=stdin)


def rows(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all(set(row) >= KEYS for row in found)
    return found


def lines(*requests: object) -> str:
    return "".join((request if isinstance(request, str) else json.dumps(request)) + "\n" for request in requests)


# --- one prompt -----------------------------------------------------------------------------------------------------------


def test_one_prompt_is_text() -> None:
    result = run("Hello", "--max-tokens", "5")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout) == 6
    assert result.stdout.endswith("\n")


def test_the_same_prompt_from_everywhere_gives_the_same_text() -> None:
    Path("prompt.txt").write_text("Hello\n")
    from_argument = run("Hello", "--max-tokens", "5").stdout
    assert run("--file", "prompt.txt", "--max-tokens", "5").stdout == from_argument
    assert run("--max-tokens", "5", stdin="Hello\n").stdout == from_argument
    assert run("-", "--max-tokens", "5", stdin=b"\xef\xbb\xbfHello\r\n").stdout == from_argument
    assert run("--file", "-", "--max-tokens", "5", stdin="Hello").stdout == from_argument


def test_chat_raw_and_system() -> None:
    chat = run("Hello", "--max-tokens", "5").stdout
    assert run("Hello", "--max-tokens", "5", "--chat").stdout == chat
    raw = run("Hello", "--max-tokens", "5", "--raw").stdout
    system = run("Hello", "--max-tokens", "5", "--system", "Be brief.").stdout
    assert len({chat, raw, system}) == 3
    conflict = run("Hello", "--raw", "--system", "Be brief.")
    assert conflict.exit_code == 2
    assert "--system" in conflict.stderr


def test_a_model_without_chat_template_continues_and_refuses_to_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = run("Hello", "--max-tokens", "5", "--raw").stdout
    configure(monkeypatch, "Chatless")
    assert run("Hello", "--max-tokens", "5").stdout == raw
    for option in (("--chat",), ("--system", "Be brief.")):
        result = run("Hello", "--max-tokens", "5", *option)
        assert result.exit_code == 1
        assert f"error: {option[0]} needs a chat template" in result.stderr


def test_sampling_options_reach_the_request() -> None:
    stats = ("--max-tokens", "6", "-n", "1", "--jsonl")
    greedy = rows(run("Hello", *stats).stdout)[0]
    sampled = rows(run("Hello", *stats, "--temperature", "1", "--top-k", "9", "--top-p", "0.9", "--seed", "0").stdout)[0]
    again = rows(run("Hello", *stats, "--temperature", "1", "--top-k", "9", "--top-p", "0.9", "--seed", "0").stdout)[0]
    assert sampled["token_ids"] == again["token_ids"]
    assert greedy["finish_reason"] == "length"
    stop = greedy["token_ids"][2]
    stopped = rows(run("Hello", *stats, "--stop-token-id", str(stop)).stdout)[0]
    assert stopped["token_ids"] == greedy["token_ids"][:3]
    assert stopped["finish_reason"] == "stop"
    by_text = rows(run("Hello", *stats, "--stop", greedy["text"][1:3]).stdout)[0]
    assert by_text["text"] == greedy["text"][:1]


def test_an_answer_ends_after_512_tokens_and_one_line_says_so() -> None:
    result = run("Hi")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout) == 513
    assert result.stderr.splitlines()[-1] == (
        "note: 1 answer was cut at 512 new tokens (finish_reason length); --max-tokens lets more come"
    )
    several = run("--jsonl", "Hi", "Ho", "--stats", stdin="")
    assert [len(row["token_ids"]) for row in rows(several.stdout)] == [512, 512]
    assert {row["finish_reason"] for row in rows(several.stdout)} == {"length"}
    assert several.stderr.count("note: 2 answers were cut at 512 new tokens") == 1


def test_whoever_asks_gets_more_or_less_and_no_note() -> None:
    for most in (3, 540):
        result = run("--raw", "Hi", "--max-tokens", str(most))
        assert (len(result.stdout), result.stderr) == (most + 1, "")
    asked = lines({"tokens": [1, 2], "max_tokens": 530}, {"tokens": [1, 2], "min_tokens": 520})
    by_line = rows(run("--jsonl", stdin=asked).stdout)
    assert [len(row["token_ids"]) for row in by_line] == [530, 520]


def test_a_long_prompt_gets_what_the_model_holds_and_no_note() -> None:
    """The model holds 600 tokens: the default may not make a request too large."""
    result = run("--jsonl", stdin=lines({"tokens": [1] * 595}, {"tokens": [1] * 600}))
    short, refused = rows(result.stdout)
    assert (len(short["token_ids"]), short["finish_reason"]) == (5, "length")
    assert "at least one output token needs 601 tokens" in refused["error"]
    assert "note:" not in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("",), "argument 1: the prompt is empty"),
        (("Hello", "--temperature", "-1"), "temperature=-1.0"),
        (("Hello", "--top-k", "5"), "contradicts temperature=0"),
        (("Hello", "--min-tokens", "5", "--max-tokens", "4"), "min_tokens=5 is more than max_tokens=4"),
        (("Hello", "-n", "0"), "'-n'"),
        (("--file", "nowhere.txt"), "nowhere.txt"),
        (("-", "-"), "more than once"),
        (("Hello", "--output", "no/folder.txt"), "cannot write 'no/folder.txt' (from --output)"),
    ],
)
def test_wrong_usage_is_2_and_says_what(args: tuple[str, ...], said: str) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_empty_standard_input_is_an_error() -> None:
    result = run(stdin="")
    assert result.exit_code == 2
    assert "standard input: the prompt is empty" in result.stderr


def test_a_file_that_is_no_text() -> None:
    Path("photo.jpg").write_bytes(b"\xff\xd8\xff")
    result = run("--file", "photo.jpg")
    assert result.exit_code == 2
    assert "photo.jpg is not UTF-8 text: invalid start byte at byte 0" in result.stderr


def test_what_fails_at_run_time_is_1() -> None:
    result = run("x" * 1000, "--max-tokens", "5")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: argument 1: prompt of 1007 tokens")
    timed = run("Hello", "--max-tokens", "500", "--timeout", "0.01")
    assert timed.exit_code == 1
    assert "timeout_s=0.01 was up" in timed.stderr
    assert len(timed.stdout) > 1


def test_output_never_eats_its_input() -> None:
    Path("prompt.txt").write_text("Hello")
    result = run("--file", "prompt.txt", "--output", "prompt.txt")
    assert result.exit_code == 2
    assert Path("prompt.txt").read_text() == "Hello"


def test_output_replaces_a_file_but_only_when_there_is_something_to_write() -> None:
    Path("out.txt").write_text("what was there before, and longer than the answer")
    assert run("Hello", "--output", "out.txt", "--set", "admit=nonsense").exit_code == 2
    assert Path("out.txt").read_text().startswith("what was there")
    result = run("Hello", "--max-tokens", "5", "--output", "out.txt")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert len(Path("out.txt").read_text()) == 6


# --- several --------------------------------------------------------------------------------------------------------------


def test_several_prompts_are_a_line_each_in_order() -> None:
    Path("prompt.txt").write_text("third")
    result = run("first", "", "second", "--file", "prompt.txt", "--max-tokens", "3")
    assert result.exit_code == 1
    found = rows(result.stdout)
    assert [row["id"] for row in found] == ["argument 1", "argument 2", "argument 3", "prompt.txt"]
    assert found[1]["error"] == "argument 2: the prompt is empty; give some text"
    assert [len(row["token_ids"]) for row in found] == [3, 0, 3, 3]


def test_n_completions_have_an_index_each() -> None:
    found = rows(run("Hello", "-n", "3", "--temperature", "1", "--seed", "1", "--max-tokens", "3").stdout)
    assert [(row["id"], row["index"]) for row in found] == [("argument 1", 0), ("argument 1", 1), ("argument 1", 2)]
    assert len({tuple(row["token_ids"]) for row in found}) == 3


def test_jsonl_takes_text_tokens_and_messages_with_options_of_their_own() -> None:
    text = lines(
        {"prompt": "Hello", "id": "a"},
        {"tokens": [1, 2, 3], "id": 7, "max_tokens": 2, "priority": 3, "timeout_s": 9.5, "labels": {"tenant": "x"}},
        "",
        {"messages": [{"role": "user", "content": "Hello"}], "n": 2, "temperature": 1.0, "seed": 3, "logprobs": 0},
        {"prompt": "Hello", "cache_salt": "mine", "max_tokens": None, "stop": "a", "stop_token_ids": [5], "ignore_eos": True},
    )
    result = run("--jsonl", "--max-tokens", "4", stdin=text)
    assert result.exit_code == 0, result.stdout
    found = rows(result.stdout)
    assert [row["id"] for row in found] == ["a", 7, "standard input:4", "standard input:4", "standard input:5"]
    assert [len(row["token_ids"]) for row in found[:4]] == [4, 2, 4, 4]
    assert found[0]["num_prompt_tokens"] == len("_<user>Hello")
    assert found[1]["num_prompt_tokens"] == 3
    assert "logprobs" in found[2]
    assert found[2]["token_ids"] != found[3]["token_ids"]
    assert all(row["ttft_s"] > 0 for row in found)


WRONG = [
    ("{", "not JSON"),
    ("[1]", "not an object"),
    ('{"prompt": "a", "prompts": "b"}', "unknown key 'prompts'; did you mean 'prompt'?"),
    ("{}", "none of them"),
    ('{"prompt": "a", "tokens": [1]}', "prompt and tokens"),
    ('{"prompt": ""}', "prompt is empty"),
    ('{"tokens": []}', "tokens is empty"),
    ('{"messages": []}', "messages is empty"),
    ('{"prompt": 3}', "prompt=3 is not a text"),
    ('{"messages": ["hi"]}', 'messages[0]="hi"'),
    ('{"messages": [{"role": "user"}]}', "messages[0]="),
    ('{"prompt": "a", "n": 0}', "n=0"),
    ('{"prompt": "a", "n": true}', "n=true"),
    ('{"prompt": "a", "n": 99}', "raise --ahead"),
    ('{"prompt": "a", "priority": "high"}', 'priority="high" is not a whole number'),
    ('{"prompt": "a", "timeout_s": -1}', "timeout_s=-1"),
    ('{"prompt": "a", "labels": {"a": 1}}', "labels="),
    ('{"prompt": "a", "id": [1]}', "id=[1]"),
    ('{"prompt": "a", "stop": 5}', "stop=5"),
    ('{"prompt": "a", "ignore_eos": "yes"}', 'ignore_eos="yes"'),
    ('{"prompt": "a", "temperature": NaN}', "temperature=nan"),
    ('{"prompt": "a", "top_k": 3}', "contradicts temperature=0"),
    ('{"tokens": [5000]}', "prompt token 5000"),
    ('{"tokens": ["a"]}', "prompt token 'a'"),
    ('{"tokens": ' + str([1] * 700) + "}", "holds 600"),
    ("[" * 100000, "nested too deeply"),
]


def test_wrong_lines_say_where_and_the_others_go_on() -> None:
    good = '{"prompt": "good", "id": "good"}'
    Path("in.jsonl").write_text(lines(*(line for wrong, _ in WRONG for line in (wrong, good))))
    result = run("--jsonl", "--file", "in.jsonl", "--max-tokens", "2", "--ahead", "16")
    assert result.exit_code == 1
    found = rows(result.stdout)
    assert len(found) == 2 * len(WRONG)
    for place, (row, (_, said)) in enumerate(zip(found[::2], WRONG, strict=True)):
        assert row["error"].startswith(f"in.jsonl:{2 * place + 1}: "), row
        assert said in row["error"], row
        assert row["finish_reason"] == "refused"
        assert "Traceback" not in row["error"]
    assert all(row["id"] == "good" and row["error"] is None and len(row["token_ids"]) == 2 for row in found[1::2])


def test_half_characters_in_and_out() -> None:
    result = run("--jsonl", "--max-tokens", "2", stdin='{"prompt": "a", "id": "\\ud800"}\n')
    assert result.exit_code == 0
    assert rows(result.stdout)[0]["id"] == "\ud800"


def test_bytes_that_are_no_text_are_one_lines_problem() -> None:
    result = run("--jsonl", "--max-tokens", "2", stdin=b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "\xff"}\r\n{"prompt": "b"}')
    found = rows(result.stdout)
    assert [row["error"] is None for row in found] == [True, False, True]
    assert "utf-8" in found[1]["error"]


def test_an_id_survives_what_is_wrong_with_its_request() -> None:
    problem = parse_line(b'{"id": "x", "promt": 1}', "f:1", Defaults())
    assert isinstance(problem, Problem)
    assert problem.id == "x"
    ask = parse_line(b'{"prompt": "a", "seed": 4}', "f:1", Defaults({"temperature": 2.0}, n=2, priority=1))
    assert isinstance(ask, Ask)
    assert (ask.params.seed, ask.params.temperature, ask.n, ask.options["priority"]) == (4, 2.0, 2, 1)


def test_input_is_read_no_further_than_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []

    def endless(*_: object) -> Iterator[bytes | None]:
        for number in range(300):
            numbers.append(number)
            yield json.dumps({"prompt": f"p{number}"}).encode()

    written: list[int] = []

    class Watched(io.BytesIO):
        def write(self, piece: Any) -> int:
            written.append(len(numbers) - len(written))
            return super().write(piece)

    monkeypatch.setattr("treadle_plugins.commands.generation.prompts.poll_lines", endless)
    monkeypatch.setattr("treadle_plugins.commands.generation.results.open", lambda *_: Watched(), raising=False)
    monkeypatch.setattr("treadle_plugins.commands.generation.results.Output.open", lambda _: None)
    result = run("--jsonl", "--max-tokens", "2", "--ahead", "8", "--output", "watched", stdin="")
    assert result.exit_code == 0, result.output
    assert len(written) == 300
    assert max(written) <= 8


def test_a_failing_engine_writes_what_was_finished_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, "Broken")
    text = lines(*({"prompt": f"p{n}", "max_tokens": 1 if n < 4 else 50} for n in range(100)))
    result = run("--jsonl", "--ahead", "8", stdin=text)
    assert result.exit_code == 1
    found = rows(result.stdout)
    assert [row["error"] for row in found[:4]] == [None] * 4
    assert "the floor gave way" in result.stderr
    assert "Traceback" not in result.stderr


# --- figures and progress -------------------------------------------------------------------------------------------------


def test_stats_go_to_standard_error() -> None:
    result = run("--jsonl", "--stats", stdin=lines(*[{"prompt": "Hello there, " * 4, "max_tokens": 5}] * 4, "{"))
    assert len(rows(result.stdout)) == 5
    table = dict(line.split(maxsplit=1) for line in result.stderr.splitlines() if not line.startswith("time"))
    assert table["requests"] == "5, of which 1 failed"
    assert table["completions"] == "4"
    assert table["prompt"].startswith("tokens ")
    assert "of which 0" not in table["prompt"]
    assert "20 in" in table["generated"]
    assert "time to first token    p50 0.00" in result.stderr


def test_progress_is_shown_where_asked_for() -> None:
    Path("in.jsonl").write_text(lines(*[{"prompt": "Hello", "max_tokens": 2}] * 3))
    quiet = run("--jsonl", "--file", "in.jsonl")
    assert quiet.stderr == ""
    shown = run("--jsonl", "--file", "in.jsonl", "--progress")
    assert "] 3/3, " in shown.stderr
    assert "tokens/s" in shown.stderr
    piped = run("--jsonl", "--progress", stdin=Path("in.jsonl").read_text())
    assert "3 done, " in piped.stderr


def test_progress_redraws_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    Progress(10, Figures(), terminal).finish()
    assert terminal.getvalue().startswith("\r\x1b[K[")
    assert terminal.getvalue().endswith("\n")
