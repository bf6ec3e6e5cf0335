"""The driver's end of the pipe: an engine's process that is loaded once, stopped between its turns, and asked one at a time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
from catalogue import Engine
from serving import Answer
from workloads import Job

LONGEST_LOAD_S = 900.0
"""vLLM compiles for minutes when it is loaded for the first time."""
LONGEST_ANSWER_S = 900.0


class EngineFailed(Exception):
    """An engine ended, was silent for too long, or answered with an error. Its log says more."""


class EngineProcess:
    """One engine. Stopped by a signal whenever it is not asked anything, so that idle threads take no time from others."""

    def __init__(self, engine: Engine, threads: int, pool_tokens: int, log: Path) -> None:
        self.engine = engine
        self.log = log
        self._unread = b""
        with log.open("wb") as output:
            self._process = subprocess.Popen(  # noqa: S603  # our own scripts
                engine.command(threads, pool_tokens),
                env=engine.environment(threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self._is_stopped = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_loaded(self) -> dict[str, Any]:
        """Facts about the engine, seconds and peak memory of loading."""
        loaded = self._receive(LONGEST_LOAD_S)
        return {**loaded, "load_peak_rss_bytes": machine.peak_rss_since_start(self.pid)}

    def serve(self, jobs: Sequence[Job], at_once: int) -> tuple[float, list[Answer], dict[str, int]]:
        """Seconds, answers, and bytes by part. Raises EngineFailed, also for an answer of the wrong length."""
        self._send({"jobs": [asdict(job) for job in jobs], "at_once": at_once})
        reply = self._receive(LONGEST_ANSWER_S)
        answers = [Answer(**answer) for answer in reply["answers"]]
        for job, answer in zip(jobs, answers, strict=True):
            if len(answer.tokens) != job.max_tokens:
                raise EngineFailed(f"{self.engine.name} gave {len(answer.tokens)} tokens where {job.max_tokens} were asked for")
        return reply["wall_s"], answers, reply["memory"]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the process run within the block."""
        self._resume()
        try:
            yield
        finally:
            self._stop()

    def close(self) -> None:
        """End the process and all that it started."""
        if self._process.poll() is None:
            self._resume()
            os.killpg(self.pid, signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGSTOP)
            self._is_stopped = True

    def _resume(self) -> None:
        if self._is_stopped:
            os.killpg(self.pid, signal.SIGCONT)
            self._is_stopped = False

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None

    def _receive(self, most_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + most_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise self._failure(f"was silent for {most_s:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                raise self._failure("ended")
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"{self.engine.name} failed: {reply['error']}; its log is {self.log}")
        return reply

    def _failure(self, what: str) -> EngineFailed:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
        return EngineFailed("\n  ".join([f"{self.engine.name} {what}; its log {self.log} ends with:", *lines]))
