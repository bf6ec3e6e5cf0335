"""What `treadle generate` writes: a JSON object a completion, progress, and figures."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from array import array
from collections.abc import Iterator
from types import TracebackType
from typing import Any, BinaryIO, TextIO

from treadle import Completion, FinishReason
from treadle.errors import ConfigError, TreadleError
from treadle.plan import TokenLogprobs
from treadle_plugins.commands.generation.batches import MAX_NEW_TOKENS, Result, was_cut
from treadle_plugins.commands.generation.prompts import Ask


class Output:
    """Standard output or a file, written in whole pieces. The file is emptied by `open`, not when it is made."""

    def __init__(self, path: str | None) -> None:
        """Raises ConfigError when the file cannot be written."""
        self.path = path
        try:
            self._stream: BinaryIO = sys.stdout.buffer if path is None else open(path, "ab")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"cannot write {path!r} (from --output): {error.strerror}") from error

    def open(self) -> None:
        """Empty the file: results are about to come."""
        if self.path is not None and stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode):
            self._stream.truncate(0)

    def write(self, text: str) -> None:
        """Write and flush. Half characters, which no encoding has, come out as the JSON escapes that they were."""
        try:
            self._stream.write(text.encode("utf-8", "backslashreplace"))
            self._stream.flush()
        except OSError as error:
            if self.path is None:
                raise
            raise TreadleError(f"cannot write {self.path!r} (from --output): {error.strerror}") from error

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.path is not None:
            self._stream.close()


def rows(result: Result) -> Iterator[dict[str, Any]]:
    """One object for each completion; one with the error for a request that never was one."""
    if result.error is not None:
        yield _row(result, 0, FinishReason.REFUSED, result.error)
    for index, completion in enumerate(result.completions):
        row = _row(result, index, completion.finish_reason, error_of(result, completion))
        row.update(
            text=completion.text,
            token_ids=completion.token_ids,
            num_prompt_tokens=len(completion.prompt_token_ids),
            num_cached_tokens=completion.num_cached_tokens,
            ttft_s=completion.ttft_s,
            tpot_s=completion.tpot_s,
        )
        assert isinstance(result.item, Ask)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(result.item.params, name) is not None:
                row[name] = [_logprobs(entry) for entry in getattr(completion, name)]
        yield row


def _row(result: Result, index: int, reason: FinishReason, error: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {"id": result.item.id, "index": index, "text": None, "token_ids": []}
    row.update(finish_reason=reason.value, error=error)
    row.update(num_prompt_tokens=None, num_cached_tokens=None, ttft_s=None, tpot_s=None)
    return row


def _logprobs(entry: TokenLogprobs) -> dict[str, Any]:
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top": entry.top}


def error_of(result: Result, completion: Completion) -> str | None:
    """Why a request has no whole answer, with the place that it came from."""
    if completion.error is not None:
        return f"{result.item.where}: {completion.error}"
    if completion.finish_reason is FinishReason.TIMEOUT:
        assert isinstance(result.item, Ask)
        return f"{result.item.where}: the time of timeout_s={result.item.options['timeout_s']:g} was up"
    return None


def json_line(row: dict[str, Any]) -> str:
    """The row as a line."""
    return json.dumps(row, ensure_ascii=False) + "\n"


class Figures:
    """Sums over all results, for `--stats` and the exit code."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_completions = 0
        self.num_failed = 0
        self.num_prompt = 0
        self.num_cached = 0
        self.num_generated = 0
        self.num_preempted = 0
        self.num_cut = 0
        """Completions that would have gone on, had anyone asked for more than MAX_NEW_TOKENS."""
        self._ttft_s = array("d")
        self._tpot_s = array("d")
        self._first_s: float | None = None
        self._last_s = 0.0

    def add(self, result: Result) -> None:
        """Count a result."""
        self.num_requests += 1
        self.num_failed += result.error is not None or any(error_of(result, c) for c in result.completions)
        for completion in result.completions:
            self._add(completion)
            self.num_cut += isinstance(result.item, Ask) and was_cut(result.item, completion)

    def _add(self, completion: Completion) -> None:
        self.num_completions += 1
        self.num_prompt += len(completion.prompt_token_ids)
        self.num_cached += completion.num_cached_tokens
        self.num_generated += len(completion.token_ids)
        self.num_preempted += completion.num_preempted
        for value, values in ((completion.ttft_s, self._ttft_s), (completion.tpot_s, self._tpot_s)):
            if value is not None:
                values.append(value)
        self._first_s = completion.arrival_s if self._first_s is None else min(self._first_s, completion.arrival_s)
        self._last_s = max(self._last_s, completion.finished_s)

    @property
    def elapsed_s(self) -> float:
        """From the first arrival to the last end, by the engine's clock."""
        return 0.0 if self._first_s is None else self._last_s - self._first_s

    def note(self) -> str | None:
        """What to tell of answers that were cut; None when none was."""
        if not self.num_cut:
            return None
        answers = "1 answer was" if self.num_cut == 1 else f"{self.num_cut} answers were"
        return f"note: {answers} cut at {MAX_NEW_TOKENS} new tokens (finish_reason length); --max-tokens lets more come"

    def table(self) -> str:
        """The figures, for people."""
        rate = f"{self.num_generated / self.elapsed_s:.1f}" if self.elapsed_s > 0 else "-"
        facts = [
            ("requests", f"{self.num_requests}, of which {self.num_failed} failed"),
            ("completions", str(self.num_completions)),
            ("prompt tokens", f"{self.num_prompt}, of which {self.num_cached} cached"),
            ("generated tokens", f"{self.num_generated} in {self.elapsed_s:.2f} s: {rate} a second"),
            ("time to first token", _percentiles(self._ttft_s, "s", 1.0)),
            ("time per output token", _percentiles(self._tpot_s, "ms", 1e3)),
            ("preemptions", str(self.num_preempted)),
        ]
        return "\n".join(f"{name:22} {value}" for name, value in facts)


def _percentiles(values: array[float], unit: str, scale: float) -> str:
    """p50 and p99 by nearest rank."""
    if not values:
        return "-"
    ranked = sorted(values)
    p50, p99 = (ranked[max(0, -(-len(ranked) * percent // 100) - 1)] * scale for percent in (50, 99))
    return f"p50 {p50:.3f} {unit}, p99 {p99:.3f} {unit}"


class Progress:
    """A line on standard error: how many requests are done, and how fast tokens come. Redrawn in place on a terminal."""

    def __init__(self, total: int | None, figures: Figures, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total = total
        self._figures = figures
        self._in_place = self._stream.isatty()
        self._every_s = 0.1 if self._in_place else 5.0
        self._drawn_s = self._started_s = time.monotonic()

    def tick(self) -> None:
        """Draw, unless that was just done."""
        if time.monotonic() - self._drawn_s >= self._every_s:
            self._draw()

    def finish(self) -> None:
        """Draw the end."""
        self._draw()
        if self._in_place:
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        line = self._line(self._drawn_s - self._started_s)
        self._stream.write(f"\r\x1b[K{line}" if self._in_place else f"{line}\n")
        self._stream.flush()

    def _line(self, elapsed_s: float) -> str:
        done = self._figures.num_requests
        rate = f"{self._figures.num_generated / elapsed_s:.0f} tokens/s" if elapsed_s > 0 else ""
        failed = f", {self._figures.num_failed} failed" if self._figures.num_failed else ""
        if self._total is None:
            return f"{done} done, {rate}{failed}"
        filled = 30 * done // self._total if self._total else 30
        return f"[{'#' * filled:30}] {done}/{self._total}, {rate}{failed}"
