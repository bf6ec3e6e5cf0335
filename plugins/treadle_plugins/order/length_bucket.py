"""order.length_bucket: requests of like length start together, after a small wait for company."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator

from pydantic import Field

from treadle import NotBefore, Open, Request, Step, StrategySettings, hookimpl
from treadle_plugins.order.waiting_queue import WaitingQueue


class LengthBucketSettings(StrategySettings):
    """The buckets, and how long each waits."""

    limits: tuple[int, ...] = (64, 256, 1024, 4096)
    """Longest prompt of each bucket; longer ones share a last one."""
    min_batch: int = Field(default=4, ge=1)
    """Requests that make a bucket ripe at once."""
    wait_ms: float = Field(default=10.0, ge=0)
    """Milliseconds after which a bucket is ripe with fewer. A request is kept back no longer than this for company."""


class LengthBucket:
    """Ripe buckets in the order of their oldest request; a bucket that is not ripe yet is left waiting."""

    Settings = LengthBucketSettings

    def __init__(self, settings: LengthBucketSettings) -> None:
        self._settings = settings
        self._limits = sorted(settings.limits)
        self._buckets = [WaitingQueue() for _ in range(len(self._limits) + 1)]

    @hookimpl(wrapper=True)
    def gate(self, step: Step) -> Generator[None, Open | NotBefore | None, Open | NotBefore | None]:
        """Closed while no bucket is ripe."""
        answer = yield
        ripe = [self._ripe_s(bucket) for bucket in self._buckets if len(bucket)]
        if isinstance(answer, NotBefore) or not ripe or min(ripe) <= step.now:
            return answer
        return NotBefore(min(ripe))

    @hookimpl
    def order(self, step: Step) -> Iterator[Request]:
        """The ripe ones."""
        ripe = [b for b in self._buckets if len(b) and self._ripe_s(b) <= step.now]
        for bucket in sorted(ripe, key=_oldest_s):
            yield from bucket

    @hookimpl
    def request_queued(self, request: Request) -> None:
        """Into its bucket."""
        self._bucket_of(request).add(request, request.arrival_s)

    @hookimpl
    def request_preempted(self, request: Request) -> None:
        """Back into its bucket, at its old place."""
        self._bucket_of(request).add(request, request.arrival_s)

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        """Out of its bucket."""
        self._bucket_of(request).discard(request)

    @hookimpl
    def request_resumed(self, request: Request) -> None:
        """Out of its bucket."""
        self._bucket_of(request).discard(request)

    @hookimpl
    def request_finished(self, request: Request) -> None:
        """Out of its bucket, if it waited."""
        self._bucket_of(request).discard(request)

    def _bucket_of(self, request: Request) -> WaitingQueue:
        return self._buckets[bisect_left(self._limits, request.prompt_length)]

    def _ripe_s(self, bucket: WaitingQueue) -> float:
        """When the bucket's requests may start."""
        oldest_s = _oldest_s(bucket)
        return oldest_s if len(bucket) >= self._settings.min_batch else oldest_s + self._settings.wait_ms / 1000


def _oldest_s(bucket: WaitingQueue) -> float:
    first = bucket.first()
    return first.arrival_s if first is not None else float("inf")
