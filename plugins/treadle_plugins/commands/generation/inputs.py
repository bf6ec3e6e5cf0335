"""Where prompts come from: arguments, files and standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import BinaryIO

from treadle.errors import InvalidRequest, TreadleError
from treadle_plugins.commands.generation.prompts import Ask, Defaults, Item, Problem, ask_text, read_jsonl, read_text

STDIN = "-"


@dataclass(frozen=True)
class Inputs:
    """Where prompts come from."""

    texts: tuple[str, ...]
    files: tuple[str, ...]
    """`-` is standard input."""
    jsonl: bool
    defaults: Defaults

    @property
    def single(self) -> bool:
        """Whether there is but one completion, to be streamed as text."""
        return not self.jsonl and self.defaults.n == 1 and len(self.texts) + len(self.files) == 1

    @property
    def total(self) -> int | None:
        """The number of requests; None when it cannot be known before they are read."""
        if not self.jsonl:
            return len(self.texts) + len(self.files)
        if not all(os.path.isfile(file) for file in self.files):
            return None
        return len(self.texts) + sum(_count_lines(file) for file in self.files)

    def ask(self) -> Ask:
        """The single request. Raises InvalidRequest."""
        if self.texts:
            return ask_text(self.texts[0], "argument 1", self.defaults)
        return self._text_of(self.files[0])

    def items(self, wait_s: Callable[[], float]) -> Iterator[Item]:
        """All requests, read as they are asked for."""
        for number, text in enumerate(self.texts, 1):
            yield _item(f"argument {number}", lambda: ask_text(text, f"argument {number}", self.defaults))  # noqa: B023
        for file in self.files:
            if self.jsonl:
                with _opened(file) as stream:
                    yield from read_jsonl(stream, _name(file), self.defaults, wait_s)
            else:
                yield _item(_name(file), lambda: self._text_of(file))  # noqa: B023  # called at once, as above

    def _text_of(self, file: str) -> Ask:
        with _opened(file) as stream:
            return ask_text(read_text(stream, _name(file)), _name(file), self.defaults)


def _item(where: str, ask: Callable[[], Ask]) -> Item:
    """The request, or what is wrong with it."""
    try:
        return ask()
    except InvalidRequest as error:
        return Problem(where, where, str(error))


def _opened(file: str) -> AbstractContextManager[BinaryIO]:
    """The stream of a file or of standard input, as a context."""
    if file == STDIN:
        return nullcontext(sys.stdin.buffer)
    try:
        return open(file, "rb")
    except OSError as error:
        raise TreadleError(f"cannot read {file}: {error.strerror}") from error


def _name(file: str) -> str:
    return "standard input" if file == STDIN else file


def _count_lines(file: str) -> int:
    with open(file, "rb") as stream:
        return sum(1 for line in stream if line.strip())
