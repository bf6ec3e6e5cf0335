"""`treadle generate` as a process: input that comes late, Ctrl-C, and readers that leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from treadle_plugins.commands.generation.interrupts import Interrupt
from treadle_plugins.commands.generation.prompts import poll_lines

PLUGINS = Path(__file__).parent / "cli_plugins"
CONFIG = 'execute = "simulated"\nplugins = ["cli_fakes:{fake}"]\npool.num_blocks = 200\nallocate.block_size = 16\n'


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGINS), *sys.path]))
    monkeypatch.chdir(tmp_path)
    configure(monkeypatch, "Fake")
    # a shell that starts the tests in the background has them ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def configure(monkeypatch: pytest.MonkeyPatch, fake: str) -> None:
    Path("fake.toml").write_text(CONFIG.format(fake=fake))
    monkeypatch.setenv("TREADLE_CONFIG", "fake.toml")


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def lines(*requests: object) -> str:
    return "".join((request if isinstance(request, str) else json.dumps(request)) + "\n" for request in requests)


# --- lines that come late, and Ctrl-C -------------------------------------------------------------------------------------


def test_lines_of_a_pipe_come_as_they_are_written() -> None:
    read, write = os.pipe()
    with open(read, "rb") as stream:
        found = poll_lines(stream, "pipe", lambda: 0.0)
        assert next(found) is None
        os.write(write, b"one\r\ntw")
        assert next(found) == b"one"
        assert next(found) is None
        os.write(write, b"o\n\nlast")
        assert [next(found), next(found), next(found)] == [b"two", b"", None]
        os.close(write)
        assert list(found) == [b"last"]


def start(*args: str, **pipes: Any) -> subprocess.Popen[str]:
    # a parent that ignores Ctrl-C, as a shell's background does, would hand that on
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from treadle.cli import main; main()"
    return subprocess.Popen(  # noqa: S603  # our own program
        [sys.executable, "-c", program, "generate", *args],
        stdin=subprocess.PIPE,
        stdout=pipes.get("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def in_(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def out(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def test_whoever_waits_for_each_answer_gets_it() -> None:
    with start("--jsonl", "--max-tokens", "2") as process:
        for number in range(3):
            in_(process).write(json.dumps({"prompt": f"p{number}", "id": number}) + "\n")
            assert json.loads(out(process).readline())["id"] == number
        in_(process).close()
        assert process.wait(20) == 0


def test_ctrl_c_writes_what_was_finished_in_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, "Slow")
    text = lines(*({"prompt": f"p{n}", "id": n, "max_tokens": 2 if n % 2 == 0 else 500} for n in range(50)))
    with start("--jsonl", "--output", "out.jsonl", "--stats") as process:
        in_(process).write(text)
        in_(process).flush()
        wait_for(lambda: Path("out.jsonl").exists() and Path("out.jsonl").stat().st_size > 0)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "interrupted" in stderr
    assert "completions" in stderr
    found = rows(Path("out.jsonl").read_text())
    assert found[0]["id"] == 0
    assert len(found) > 1
    assert all(row["id"] % 2 == 0 and row["finish_reason"] == "length" for row in found)


def test_ctrl_c_while_text_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, "Slow")
    with start("Hello", "--max-tokens", "500") as process:
        first = out(process).read(3)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert (first + stdout).endswith("\n")
    assert len(first + stdout) < 400


def test_a_second_ctrl_c_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, "Slow")
    with start("Hello", "--max-tokens", "500") as process:
        out(process).read(3)
        for _ in range(20):
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert process.returncode in (130, -signal.SIGINT)
    assert process.returncode == 130 or not stderr


def test_a_reader_that_leaves_early_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, "Slow")
    with start("Hello", "--max-tokens", "300") as process:
        out(process).read(2)
        out(process).close()
        assert process.wait(20) == 1
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def wait_for(reached: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.02)


def test_the_first_is_a_flag_and_the_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        interrupt.soften()
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
    assert signal.getsignal(signal.SIGINT) is before


def test_before_anyone_looks_it_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt():
        signal.raise_signal(signal.SIGINT)


def tear(interrupt: Interrupt) -> None:
    with interrupt:
        interrupt.soften()
        signal.raise_signal(signal.SIGINT)
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise ValueError("the books are torn")


def test_what_the_second_breaks_is_hidden_by_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        tear(Interrupt())
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_that_are_ignored_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
