"""Entries of the block log, and the lines in which they are written.

{"verb": "header", "version": 1, "num_blocks": 64, "num_swap_blocks": 0}
{"verb": "snapshot", "entry": 5000, "used": {"3": [1, 2]}, "indexed": [3, 4], "swapped": {}}       when older entries are gone
{"entry": 5000, "step": 700, "verb": "allocated", "request": "r9", "sequence": 9, "blocks": [7, 8]}
{"entry": 5001, "step": 700, "verb": "step", "counts": [60, 3, 1]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from treadle.errors import TreadleError

VERSION = 1


class Entry(NamedTuple):
    """One thing that happened to blocks."""

    verb: str
    """`allocated`, `shared`, `filled`, `released`, `evicted`, and what follows from them: `reused`, `cached`, `freed`;
    `swapped_out`, `swapped_in`, `swap_released`; `step` ends a step, `stopped` the engine."""
    step: int
    request: str = ""
    """The request's id, which may be given again."""
    sequence: int = 0
    """The request's number, which is not."""
    blocks: tuple[int, ...] = ()
    """Of the pool; of swap space for `swap_released`."""
    copies: tuple[tuple[int, int], ...] = ()
    """Sources and targets."""
    counts: tuple[int, ...] = ()
    """Free, used and cached blocks, as the engine reported them."""


@dataclass(frozen=True)
class Header:
    """What the entries are about."""

    num_blocks: int
    num_swap_blocks: int


class Numbered(NamedTuple):
    """An entry, and its number in the log since the engine's start."""

    number: int
    entry: Entry


@dataclass(frozen=True)
class Log:
    """A log, read back."""

    header: Header
    snapshot: Mapping[str, Any] | None
    """State of the pool before the first entry; None where that is the engine's start."""
    entries: list[Numbered]


def header_line(header: Header) -> str:
    """Its line."""
    return json.dumps({"verb": "header", "version": VERSION, **vars(header)})


def entry_line(number: int, entry: Entry) -> str:
    """Its line: what is empty is left out."""
    values = {name: value for name, value in entry._asdict().items() if value not in ((), "", 0)}
    return json.dumps({"entry": number, "step": entry.step, "verb": entry.verb, **values})


def read_log(path: Path) -> Log:
    """A log from its file. Raises TreadleError that names the file and the line."""
    try:
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    except (OSError, UnicodeDecodeError) as error:
        raise TreadleError(f"cannot read the block log {str(path)!r}: {error}") from error
    header, snapshot = None, None
    entries = []
    for number, line in lines:
        values = _parse(line, f"{path}:{number}")
        if values["verb"] == "header":
            header = _header(values, path)
        elif values["verb"] == "snapshot":
            snapshot = values
        else:
            entries.append(_numbered(values, f"{path}:{number}"))
    if header is None:
        raise TreadleError(f"{path} has no header: it is no block log, or the engine never started")
    return Log(header, snapshot, entries)


def _parse(line: str, origin: str) -> dict[str, Any]:
    try:
        values = dict(json.loads(line))
        return {**values, "verb": str(values["verb"])}
    except (KeyError, TypeError, ValueError) as error:
        raise _no_entry(origin, error) from None


def _no_entry(origin: str, error: Exception) -> TreadleError:
    return TreadleError(f"{origin} is no entry of a block log ({error}); plugins = ['block_log'] writes one")


def _header(values: Mapping[str, Any], path: Path) -> Header:
    if values.get("version") != VERSION:
        raise TreadleError(f"{path} is a block log of version {values.get('version')}, and this Treadle reads version {VERSION}")
    return Header(int(values["num_blocks"]), int(values["num_swap_blocks"]))


def _numbered(values: dict[str, Any], origin: str) -> Numbered:
    try:
        number = int(values.pop("entry"))
        copies = tuple((int(source), int(target)) for source, target in values.pop("copies", ()))
        blocks, counts = (tuple(map(int, values.pop(name, ()))) for name in ("blocks", "counts"))
        return Numbered(number, Entry(**values, blocks=blocks, copies=copies, counts=counts))
    except (KeyError, TypeError, ValueError) as error:
        raise _no_entry(origin, error) from None


def numbered(start: int, entries: list[Entry]) -> Iterator[Numbered]:
    """Entries, counted from `start`."""
    return map(Numbered._make, enumerate(entries, start))
