"""What `treadle generate` is asked for: prompts from arguments, files and standard input, read no faster than they are served."""

from __future__ import annotations

import json
import os
import select
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, BinaryIO

from treadle import SamplingParams
from treadle.errors import InvalidRequest, TreadleError, nearest

PIECE_BYTES = 1 << 16
PROMPT_KEYS = ("prompt", "tokens", "messages")
REQUEST_KEYS = ("id", "n", "priority", "timeout_s", "cache_salt", "labels")
SAMPLING_KEYS = tuple(f.name for f in fields(SamplingParams))
ALL_KEYS = PROMPT_KEYS + REQUEST_KEYS + SAMPLING_KEYS
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Defaults:
    """What holds for requests that do not say otherwise."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    priority: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True)
class Ask:
    """One request as it was asked for. Exactly one of `text`, `tokens` and `messages` is set."""

    where: str
    """File and line, or what else the prompt came from; for errors."""
    id: str | int
    params: SamplingParams
    text: str | None = None
    tokens: list[int] | None = None
    messages: Messages | None = None
    n: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Priority, time-out, salt and labels, as `Engine.submit` takes them."""


@dataclass(frozen=True)
class Problem:
    """A request that is wrong before anyone looks at its prompt."""

    where: str
    id: str | int
    error: str


Item = Ask | Problem | None
"""None: nothing is there to read at the moment."""


# --- plain text -----------------------------------------------------------------------------------------------------------


def ask_text(text: str, where: str, defaults: Defaults) -> Ask:
    """A request for plain text. Raises InvalidRequest."""
    if not text:
        raise InvalidRequest(f"{where}: the prompt is empty; give some text")
    params = SamplingParams.from_mapping(dict(defaults.sampling), "the command's options")
    options = {"priority": defaults.priority, "timeout_s": defaults.timeout_s}
    return Ask(where, where, params, text=text, n=defaults.n, options=options)


def read_text(stream: BinaryIO, where: str) -> str:
    """All of a stream, without the line end behind it. Raises TreadleError when it cannot be read, or is no UTF-8."""
    try:
        return stream.read().decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}; convert it first") from None
    except OSError as error:
        raise TreadleError(f"cannot read {where}: {error.strerror}") from error


# --- JSON lines -----------------------------------------------------------------------------------------------------------


def read_jsonl(stream: BinaryIO, where: str, defaults: Defaults, wait_s: Callable[[], float]) -> Iterator[Item]:
    """A request, or what is wrong with it, for each line that is not blank. Never reads further than it is asked for.

    `wait_s`: seconds that may be spent waiting for a line that is not there yet; None comes out when they have passed.
    """
    number = 0
    for line in poll_lines(stream, where, wait_s):
        if line is None:
            yield None
            continue
        number += 1
        if line.strip():
            yield parse_line(line, f"{where}:{number}", defaults)


def parse_line(line: bytes, where: str, defaults: Defaults) -> Ask | Problem:
    """One line. What is wrong with it is said in the answer, so that the others can go on."""
    name: str | int = where
    try:
        values = _object(line)
        name = _take(values, "id", where, (str, int), "a text or a whole number")
        return _ask(values, where, name, defaults)
    except InvalidRequest as error:
        return Problem(where, name, f"{where}: {error}")


def _object(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except RecursionError:
        raise InvalidRequest("the line is nested too deeply") from None
    except ValueError as error:  # of JSON, or of the encoding
        raise InvalidRequest(f"the line is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequest(f'the line holds {_short(values)}, not an object such as {{"prompt": "Hello"}}')
    return values


def _ask(values: dict[str, Any], where: str, name: str | int, defaults: Defaults) -> Ask:
    for key in values:
        if key not in ALL_KEYS:
            raise InvalidRequest(f"unknown key {key!r}; {nearest(key, ALL_KEYS)}")
    given = [key for key in PROMPT_KEYS if key in values]
    if len(given) != 1:
        raise InvalidRequest(f"give one of {', '.join(PROMPT_KEYS)}; the line has {' and '.join(given) or 'none of them'}")
    text = _take(values, "prompt", None, (str,), "a text")
    tokens = _take(values, "tokens", None, (list,), "a list of token ids")
    messages = _take(values, "messages", None, (list,), 'a list of {"role": ..., "content": ...}')
    if not (text or tokens or messages):
        raise InvalidRequest(f"{given[0]} is empty; give at least one token")
    _check_messages(messages or [])
    n = _take(values, "n", defaults.n, (int,), "a whole number of at least 1")
    if n < 1:
        raise InvalidRequest(f"n={n} is not a whole number of at least 1")
    options = _options(values, defaults)
    _check_sampling(values)
    params = SamplingParams.from_mapping({**defaults.sampling, **values}, "this line and the command's options")
    return Ask(where, name, params, text, tokens, messages, n, options)


def _options(values: dict[str, Any], defaults: Defaults) -> dict[str, Any]:
    labels = _take(values, "labels", {}, (dict,), "an object of texts")
    if not all(isinstance(value, str) for value in labels.values()):
        raise InvalidRequest(f"labels={_short(labels)} is not an object of texts")
    return {
        "priority": _take(values, "priority", defaults.priority, (int,), "a whole number"),
        "timeout_s": _take(values, "timeout_s", defaults.timeout_s, (int, float), "a time in seconds"),
        "cache_salt": _take(values, "cache_salt", None, (str,), "a text"),
        "labels": labels,
    }


def _take(values: dict[str, Any], key: str, default: Any, types: tuple[type, ...], what: str) -> Any:
    """Take `key` out of `values`; null counts as left out for what may be left out."""
    value = values.pop(key, None)
    if value is None:
        return default
    if not isinstance(value, types) or isinstance(value, bool):
        raise InvalidRequest(f"{key}={_short(value)} is not {what}")
    return value


def _check_messages(messages: Iterable[Any]) -> None:
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InvalidRequest(f'messages[{place}]={_short(message)} is not {{"role": text, "content": text}}')


def _check_sampling(values: Mapping[str, Any]) -> None:
    """Refuse values of a wrong JSON type; their ranges are checked by SamplingParams."""
    for key, types, what in (
        ("stop", (str, list), "a text or a list of texts"),
        ("stop_token_ids", (list,), "a list of token ids"),
        ("ignore_eos", (bool,), "true or false"),
    ):
        if key in values and not isinstance(values[key], types):
            raise InvalidRequest(f"{key}={_short(values[key])} is not {what}")


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


# --- lines that may not be there yet --------------------------------------------------------------------------------------


def poll_lines(stream: BinaryIO, where: str, wait_s: Callable[[], float]) -> Iterator[bytes | None]:
    """Lines without their ends. Of a pipe or terminal None comes out when a line is not there within `wait_s()` seconds.

    Requests that are under way must go on while whoever writes the next line thinks about it, or waits for our answer.
    """
    descriptor = _slow_descriptor(stream)
    try:
        if descriptor is None:
            for line in stream:
                yield line.rstrip(b"\r\n")
        else:
            yield from _poll(descriptor, wait_s)
    except OSError as error:
        raise TreadleError(f"cannot read {where}: {error.strerror}") from error


def _slow_descriptor(stream: BinaryIO) -> int | None:
    """The descriptor of a stream that may make us wait; None for files and for streams in memory."""
    try:
        descriptor = stream.fileno()
    except OSError:  # io.UnsupportedOperation: a stream in memory
        return None
    return None if stat.S_ISREG(os.fstat(descriptor).st_mode) else descriptor


def _poll(descriptor: int, wait_s: Callable[[], float]) -> Iterator[bytes | None]:
    rest = bytearray()
    while True:
        if not select.select([descriptor], [], [], wait_s())[0]:
            yield None
            continue
        piece = os.read(descriptor, PIECE_BYTES)
        if not piece:
            break
        *ended, tail = piece.split(b"\n")
        for part in ended:
            line = bytes(rest) + part
            rest.clear()
            yield line.removesuffix(b"\r")
        rest += tail
    if rest:
        yield bytes(rest)
