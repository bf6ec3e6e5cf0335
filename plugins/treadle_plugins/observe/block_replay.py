"""The pool, rebuilt from a block log alone: each entry is compared with the state that the entries before it left.

    block      who holds it        indexed   state
      0        request 1, 2        yes       used       allocated to 1, filled by 1, shared by 2
      1        request 1           no        used
      2        -                   yes       cached
      3        -                   no        free

What follows from a verb is told right behind it: a block that its last holder released is `cached` if it is indexed and `freed`
if not, an evicted one that nobody holds is `freed`, a cached one that is shared is `reused`. Until then the block is *unsettled*,
and no other entry may come. A used block may be evicted: its request could not be computed, or a block before it was evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from treadle_plugins.observe.block_entries import Entry, Header, Log, Numbered

SETTLING = ("cached", "freed", "reused")
SHOWN = 12
"""Most entries that are shown beside a divergence."""


class Divergence(Exception):
    """An entry contradicts the state before it."""

    def __init__(self, problem: str, blocks: Iterable[int] = ()) -> None:
        super().__init__(problem)
        self.blocks = frozenset(blocks)
        """Blocks of the pool that it is about."""


class PoolReplay:
    """State of the pool and of swap space, as far as it was told."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._holders: list[set[int]] = [set() for _ in range(header.num_blocks)]
        self._indexed = [False] * header.num_blocks
        self._unsettled: dict[int, str] = {}
        """Block: the verb that must follow."""
        self._swapped: dict[int, int] = {}
        """Block of swap space: the number of the request whose KV is in it."""
        self._num_free = header.num_blocks
        self._num_cached = 0
        self._do: Mapping[str, Callable[[Entry], None]] = {
            "allocated": self._allocated,
            "shared": self._shared,
            "filled": self._filled,
            "released": self._released,
            "evicted": self._evicted,
            "reused": self._settled,
            "cached": self._settled,
            "freed": self._settled,
            "swapped_out": self._swapped_out,
            "swapped_in": self._swapped_in,
            "swap_released": self._swap_released,
            "step": self._step,
            "stopped": self._stopped,
        }

    @property
    def counts(self) -> tuple[int, int, int]:
        """Free, used and cached blocks."""
        return self._num_free, self._header.num_blocks - self._num_free - self._num_cached, self._num_cached

    def snapshot(self) -> dict[str, Any]:
        """The state, as JSON has it. Only where every block is settled."""
        return {
            "used": {str(block): sorted(holders) for block, holders in enumerate(self._holders) if holders},
            "indexed": [block for block, indexed in enumerate(self._indexed) if indexed],
            "swapped": {str(block): sequence for block, sequence in self._swapped.items()},
        }

    @classmethod
    def at(cls, header: Header, snapshot: Mapping[str, Any] | None) -> PoolReplay:
        """The state that a snapshot holds; that of the engine's start without one."""
        pool = cls(header)
        if snapshot is not None:
            for block, holders in snapshot["used"].items():
                pool._holders[int(block)].update(holders)
            for block in snapshot["indexed"]:
                pool._indexed[block] = True
            pool._swapped = {int(block): sequence for block, sequence in snapshot["swapped"].items()}
            pairs = list(zip(pool._holders, pool._indexed, strict=True))
            pool._num_free = sum(not holders and not indexed for holders, indexed in pairs)
            pool._num_cached = sum(not holders and indexed for holders, indexed in pairs)
        return pool

    def apply(self, entry: Entry) -> None:
        """Go on by one entry. Raises Divergence, and the state is of no use then."""
        do = self._do.get(entry.verb)
        if do is None:
            raise Divergence(f"{entry.verb!r} is no verb of this log")
        if self._unsettled and entry.verb not in SETTLING:
            block, verb = next(iter(self._unsettled.items()))
            raise Divergence(f"block {block} should have been {verb} before this", [block])
        if entry.verb != "swap_released":
            for block in entry.blocks:
                self._require(0 <= block < self._header.num_blocks, f"there is no block {block}", block)
        do(entry)

    def replay(self, entries: Iterable[Numbered]) -> tuple[Numbered, Divergence] | None:
        """Go on to the first divergence: its entry, and what is wrong. None when there is none."""
        item = None
        try:
            for item in entries:
                self.apply(item.entry)
        except Divergence as divergence:
            assert item is not None
            return item, divergence
        return None

    # --- verbs ----------------------------------------------------------------------------------------------------------------

    def _allocated(self, entry: Entry) -> None:
        for block in entry.blocks:
            free = not self._holders[block] and not self._indexed[block]
            self._require(free, f"block {block} is allocated, and {self._is(block)}", block)
            self._holders[block].add(entry.sequence)
            self._num_free -= 1

    def _shared(self, entry: Entry) -> None:
        for block in entry.blocks:
            holders = self._holders[block]
            self._require(self._indexed[block], f"block {block} is shared, and it is not indexed: {self._is(block)}", block)
            self._require(entry.sequence not in holders, f"block {block} is shared with who holds it already", block)
            if not holders:
                self._unsettled[block] = "reused"
                self._num_cached -= 1
            holders.add(entry.sequence)

    def _filled(self, entry: Entry) -> None:
        for block in entry.blocks:
            owned = self._holders[block] == {entry.sequence}
            self._require(owned, f"block {block} is filled by request {entry.sequence}, and {self._is(block)}", block)
            self._require(not self._indexed[block], f"block {block} is filled, and it is indexed already", block)
            self._indexed[block] = True

    def _released(self, entry: Entry) -> None:
        for block in entry.blocks:
            holders = self._holders[block]
            held = entry.sequence in holders
            self._require(held, f"block {block} is released by request {entry.sequence}, and {self._is(block)}", block)
            holders.remove(entry.sequence)
            if not holders:
                self._unsettled[block] = "cached" if self._indexed[block] else "freed"

    def _evicted(self, entry: Entry) -> None:
        for block in entry.blocks:
            self._require(self._indexed[block], f"block {block} is evicted, and it is not indexed: {self._is(block)}", block)
            self._indexed[block] = False
            if not self._holders[block]:
                self._unsettled[block] = "freed"
                self._num_cached -= 1

    def _settled(self, entry: Entry) -> None:
        for block in entry.blocks:
            due = self._unsettled.pop(block, None)
            self._require(due == entry.verb, f"block {block} is {entry.verb}, and {self._is(block)}", block)
            self._num_free += due == "freed"
            self._num_cached += due == "cached"

    def _swapped_out(self, entry: Entry) -> None:
        for block, swap_block in entry.copies:
            self._check_copy(entry, block, swap_block)
            taken = swap_block in self._swapped
            self._require(not taken, f"swap block {swap_block} is written, and it holds what a request has swapped out", block)
            self._swapped[swap_block] = entry.sequence

    def _swapped_in(self, entry: Entry) -> None:
        for swap_block, block in entry.copies:
            self._check_copy(entry, block, swap_block)
            self._take_from_swap(entry.sequence, swap_block, block)

    def _swap_released(self, entry: Entry) -> None:
        for swap_block in entry.blocks:
            self._take_from_swap(entry.sequence, swap_block)

    def _step(self, entry: Entry) -> None:
        if entry.counts != self.counts:
            raise Divergence(f"(free, used, cached) are {entry.counts} by the engine's count, {self.counts} by what was told")

    def _stopped(self, entry: Entry) -> None:  # noqa: ARG002  # the signature of a verb
        held = [block for block, holders in enumerate(self._holders) if holders]
        if held or self._swapped:
            what = f"blocks {held} and swap blocks {sorted(self._swapped)}"
            raise Divergence(f"the engine stopped, and {what} of ended requests were never released", held)

    # --- checks ---------------------------------------------------------------------------------------------------------------

    def _check_copy(self, entry: Entry, block: int, swap_block: int) -> None:
        self._require(0 <= block < self._header.num_blocks, f"there is no block {block}", block)
        self._require(0 <= swap_block < self._header.num_swap_blocks, f"there is no swap block {swap_block}", block)
        holds = entry.sequence in self._holders[block]
        self._require(holds, f"block {block} is {entry.verb} by request {entry.sequence}, and {self._is(block)}", block)

    def _take_from_swap(self, sequence: int, swap_block: int, *blocks: int) -> None:
        if self._swapped.pop(swap_block, None) != sequence:
            raise Divergence(f"swap block {swap_block} holds nothing of request {sequence}", blocks)

    def _require(self, holds: bool, problem: str, block: int) -> None:
        if not holds:
            raise Divergence(problem, [block])

    def _is(self, block: int) -> str:
        """The block's state, in words."""
        holders = self._holders[block]
        if holders:
            whom = f"request{'s' if len(holders) > 1 else ''} {', '.join(map(str, sorted(holders)))}"
            return f"it is used by {whom}"
        return "it is cached" if self._indexed[block] else "it is free"


def first_divergence(log: Log) -> tuple[Numbered, Divergence] | None:
    """The first entry that contradicts the state before it, and how; None when there is none."""
    return PoolReplay.at(log.header, log.snapshot).replay(log.entries)


def neighbours(entries: list[Numbered], at: Numbered, blocks: frozenset[int]) -> list[Numbered]:
    """The divergent entry among those that touched the same blocks; where it names none, among those just before and behind."""
    near = [item for item in entries if item is at or not blocks or blocks & touched(item.entry)]
    place = near.index(at)
    first = max(0, place - SHOWN + SHOWN // 3)
    return near[first : place + SHOWN // 3]


def touched(entry: Entry) -> frozenset[int]:
    """Blocks of the pool that an entry is about."""
    if entry.verb == "swap_released":
        return frozenset()
    side = 1 if entry.verb == "swapped_in" else 0
    return frozenset(entry.blocks) | {copy[side] for copy in entry.copies}
