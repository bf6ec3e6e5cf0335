"""plugin.block_log: everything that happens to a block, kept in a ring, written as JSON lines, added to any integrity error.

    chunks    [ dropped ... ][ older half ][ newer half ]        `length` entries are kept; when the newer half is full, the older
                             ^                                   one is dropped: replayed into the snapshot from which a reader
                             snapshot                            of the log begins

`treadle blocks replay FILE` finds the first entry that contradicts those before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from pydantic import Field

from treadle import EngineInfo, Request, Step, StrategySettings, hookimpl
from treadle.blocks import IntegrityError
from treadle.errors import ConfigError
from treadle.logs import get_logger
from treadle.plan import BlockCopy
from treadle_plugins.observe.block_entries import Entry, Header, Numbered, entry_line, header_line, numbered
from treadle_plugins.observe.block_replay import PoolReplay

log = get_logger(__name__)
ATTACHED = 30
"""Entries that an integrity error shows; the file has them all."""


class BlockLogSettings(StrategySettings):
    """How much is kept, and where it goes."""

    path: Path = Path("blocks.jsonl")
    """The file. It is overwritten when the engine stops, and when its books contradict themselves."""
    length: int = Field(default=20_000, ge=2)
    """Entries that are kept; the older half is dropped at a time, at the end of a step."""
    stream: bool = False
    """Write every entry to the file at the end of its step, from the engine's start on, so that nothing is dropped."""


class Ring:
    """The last entries, and the state of the pool before the first of them."""

    def __init__(self, header: Header, length: int) -> None:
        self.header = header
        self._half = max(1, length // 2)
        self._first = 0
        """Number of the first entry that is kept."""
        self._snapshot: dict[str, Any] | None = None
        """State before it; None where it is the first of all."""
        self._older: list[Entry] = []
        self._newer: list[Entry] = []
        self._is_closed = False

    def add(self, entry: Entry) -> None:
        """One more entry."""
        if not self._is_closed:
            self._newer.append(entry)

    def close_step(self) -> None:
        """Drop the older half if the newer one is full. Every block is settled at the end of a step."""
        if len(self._newer) < self._half or self._is_closed:
            return
        pool = PoolReplay.at(self.header, self._snapshot)
        found = pool.replay(numbered(self._first, self._older))
        if found is not None:
            # what led to it must not be lost, so nothing is dropped or added from now on
            self._is_closed = True
            log.error("block_log_diverged", step=found[0].entry.step, entry=found[0].number, problem=str(found[1]))
            return
        self._first += len(self._older)
        self._snapshot = pool.snapshot()
        self._older, self._newer = self._newer, []

    def entries(self) -> list[Numbered]:
        """What is kept."""
        return list(numbered(self._first, self._older + self._newer))

    def last(self, most: int) -> list[Numbered]:
        """The last `most` of them."""
        return self.entries()[-most:]

    def lines(self) -> Iterator[str]:
        """A file's lines: a reader can replay it from the first one."""
        yield header_line(self.header)
        if self._snapshot is not None:
            yield json.dumps({"verb": "snapshot", "entry": self._first, **self._snapshot})
        for item in self.entries():
            yield entry_line(*item)


class BlockLog:
    """Writes down what it is told of blocks."""

    Settings = BlockLogSettings

    def __init__(self, settings: BlockLogSettings) -> None:
        self._settings = settings
        self._ring = Ring(Header(0, 0), settings.length)
        self._stream: IO[str] | None = None
        self._unwritten: list[Entry] = []
        self._num_written = 0
        self._step = 0
        """Number of the last step in which a block changed; 0 once its end is written down."""

    @hookimpl
    def engine_started(self, engine: EngineInfo) -> None:
        """Begin. Raises ConfigError when the file cannot be written."""
        self._ring = Ring(Header(engine.num_blocks, engine.num_swap_blocks), self._settings.length)
        try:
            # a ring leaves the file of the run before alone until it has something to say
            file = self._settings.path.open("w" if self._settings.stream else "a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"plugin.block_log.path={str(self._settings.path)!r} cannot be written: {error.strerror}; name another file"
            ) from error
        if self._settings.stream:
            self._stream = file
            print(header_line(self._ring.header), file=file, flush=True)
        else:
            file.close()

    @hookimpl
    def blocks_allocated(self, step: Step, request: Request, block_ids: Sequence[int]) -> None:
        """Free blocks are used."""
        self._add(Entry("allocated", step.number, request.id, request.sequence, tuple(block_ids)))

    @hookimpl
    def prefix_matched(self, step: Step, request: Request, block_ids: Sequence[int]) -> None:
        """One more holder."""
        if block_ids:
            self._add(Entry("shared", step.number, request.id, request.sequence, tuple(block_ids)))

    @hookimpl
    def blocks_reused(self, step: Step, block_ids: Sequence[int]) -> None:
        """Cached blocks are used."""
        self._add(Entry("reused", step.number, blocks=tuple(block_ids)))

    @hookimpl
    def blocks_filled(self, step: Step, request: Request, block_ids: Sequence[int]) -> None:
        """Used blocks are indexed."""
        self._add(Entry("filled", step.number, request.id, request.sequence, tuple(block_ids)))

    @hookimpl
    def blocks_released(self, step: Step, request: Request, block_ids: Sequence[int]) -> None:
        """One holder fewer."""
        self._add(Entry("released", step.number, request.id, request.sequence, tuple(block_ids)))

    @hookimpl
    def blocks_cached(self, step: Step, block_ids: Sequence[int]) -> None:
        """Indexed blocks lost their last holder."""
        self._add(Entry("cached", step.number, blocks=tuple(block_ids)))

    @hookimpl
    def blocks_evicted(self, step: Step, block_ids: Sequence[int]) -> None:
        """Blocks left the index."""
        self._add(Entry("evicted", step.number, blocks=tuple(block_ids)))

    @hookimpl
    def blocks_freed(self, step: Step, block_ids: Sequence[int]) -> None:
        """Blocks can be allocated."""
        self._add(Entry("freed", step.number, blocks=tuple(block_ids)))

    @hookimpl
    def blocks_swapped_out(self, step: Step, request: Request, copies: Sequence[BlockCopy]) -> None:
        """From the pool to swap space."""
        pairs = tuple((copy.source, copy.target) for copy in copies)
        self._add(Entry("swapped_out", step.number, request.id, request.sequence, copies=pairs))

    @hookimpl
    def blocks_swapped_in(self, step: Step, request: Request, copies: Sequence[BlockCopy]) -> None:
        """From swap space to the pool."""
        pairs = tuple((copy.source, copy.target) for copy in copies)
        self._add(Entry("swapped_in", step.number, request.id, request.sequence, copies=pairs))

    @hookimpl
    def swap_released(self, step: Step, request: Request, swap_ids: Sequence[int]) -> None:
        """Swap space is given back unread."""
        self._add(Entry("swap_released", step.number, request.id, request.sequence, tuple(swap_ids)))

    @hookimpl
    def step_committed(self, step: Step) -> None:
        """How the pool stands by the engine's own count, where anything changed."""
        if self._step:
            pool = step.pool
            self._add(Entry("step", step.number, counts=(pool.num_free, pool.num_used, pool.num_cached)))
            self._step = 0
            self._ring.close_step()
            self._write_stream()

    @hookimpl
    def integrity_broken(self, error: IntegrityError) -> None:
        """Write the file now, and show the last entries in the error."""
        self._write()
        last = "\n".join(f"  {entry_line(*item)}" for item in self._ring.last(ATTACHED))
        path = self._settings.path
        error.attach(f"what was told of blocks last (all in {path}; `treadle blocks replay {path}` looks through it):\n{last}")

    @hookimpl
    def engine_stopped(self) -> None:
        """Write the file."""
        self._add(Entry("stopped", self._step))
        self._write()
        if self._stream is not None:
            self._stream.close()

    def _add(self, entry: Entry) -> None:
        self._step = entry.step
        self._ring.add(entry)
        if self._stream is not None:
            self._unwritten.append(entry)

    def _write(self) -> None:
        if self._settings.stream:
            self._write_stream()
        else:
            self._settings.path.write_text("".join(f"{line}\n" for line in self._ring.lines()), encoding="utf-8")

    def _write_stream(self) -> None:
        if self._stream is not None:
            self._stream.writelines(f"{entry_line(*item)}\n" for item in numbered(self._num_written, self._unwritten))
            self._stream.flush()
            self._num_written += len(self._unwritten)
            self._unwritten.clear()
