"""plugin.prefix_stats: how much the prefix cache is worth on this traffic: hit rates, gaps between uses, lifetimes of blocks."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from treadle import Request, Step, hookimpl
from treadle.logs import get_logger

log = get_logger(__name__)
MOST_TIMES = 500
"""Gaps and lifetimes of which the medians are taken: the last ones."""


class PrefixStats:
    """Counts through tell hooks, and reports when the engine stops."""

    def __init__(self) -> None:
        self.num_requests = 0
        """Admissions and resumptions."""
        self.num_hits = 0
        """Of them, those that found at least one block."""
        self.num_tokens = 0
        """Tokens that those requests had to compute or to find."""
        self.num_tokens_found = 0
        self._last_used_s: dict[int, float] = {}
        self._born_s: dict[int, float] = {}
        self._gaps_s: deque[float] = deque(maxlen=MOST_TIMES)
        self._lifetimes_s: deque[float] = deque(maxlen=MOST_TIMES)
        self._num_evicted = 0

    @hookimpl
    def prefix_matched(self, step: Step, request: Request, block_ids: Sequence[int], num_tokens: int) -> None:
        """A match, or none; further matches of a running prefill add to the tokens only."""
        self.num_tokens_found += num_tokens
        if request.is_waiting:
            self.num_requests += 1
            self.num_hits += bool(block_ids)
            self.num_tokens += request.num_tokens
        for block_id in block_ids:
            self._gaps_s.append(step.now - self._last_used_s.get(block_id, step.now))
            self._last_used_s[block_id] = step.now

    @hookimpl
    def blocks_filled(self, step: Step, block_ids: Sequence[int]) -> None:
        """Their life in the index begins."""
        for block_id in block_ids:
            self._born_s[block_id] = self._last_used_s[block_id] = step.now

    @hookimpl
    def blocks_evicted(self, step: Step, block_ids: Sequence[int]) -> None:
        """Their life in the index ends."""
        for block_id in block_ids:
            born_s = self._born_s.pop(block_id, None)
            self._last_used_s.pop(block_id, None)
            if born_s is not None:
                self._num_evicted += 1
                self._lifetimes_s.append(step.now - born_s)

    @hookimpl
    def engine_stopped(self) -> None:
        """Say it all in one event."""
        log.warning("prefix_stats", **self.summary())

    def summary(self) -> dict[str, float]:
        """Rates from 0 to 1, times in seconds."""
        return {
            "requests": self.num_requests,
            "request_hit_rate": self.num_hits / self.num_requests if self.num_requests else 0.0,
            "token_hit_rate": self.num_tokens_found / self.num_tokens if self.num_tokens else 0.0,
            "median_reuse_gap_s": statistics.median(self._gaps_s) if self._gaps_s else 0.0,
            "median_lifetime_s": statistics.median(self._lifetimes_s) if self._lifetimes_s else 0.0,
            "evicted": self._num_evicted,
        }
