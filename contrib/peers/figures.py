"""From answers to figures, and from the figures of many turns to ratios with intervals."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from serving import Answer
from workloads import Job

Record = dict[str, Any]
START = 8
"""Output tokens by which engines are compared: rounding parts them later on."""
BUSY_SHARE = 0.05
"""A turn is disturbed when others took more than this share of the CPU time that there was."""


def measure(jobs: Sequence[Job], answers: Sequence[Answer], wall_s: float) -> dict[str, float]:
    """The figures of one turn. Times to first token count from the moment at which all jobs were handed over."""
    first_ms = sorted(answer.first_s * 1e3 for answer in answers)
    each_ms = [(a.last_s - a.first_s) * 1e3 / (len(a.tokens) - 1) for a in answers if len(a.tokens) > 1]
    num_tokens = sum(job.max_tokens for job in jobs)
    return {
        "wall_s": wall_s,
        "output_tokens": num_tokens,
        "tokens_per_s": num_tokens / wall_s,
        "ttft_mean_ms": statistics.fmean(first_ms),
        "ttft_p50_ms": statistics.median(first_ms),
        "ttft_p95_ms": first_ms[min(len(first_ms) - 1, int(0.95 * len(first_ms)))],
        "tpot_mean_ms": statistics.fmean(each_ms) if each_ms else 0.0,
    }


def starts(answers: Sequence[Answer]) -> list[list[int]]:
    """The first tokens of each answer."""
    return [answer.tokens[:START] for answer in answers]


class Spread(NamedTuple):
    """Median, least and most of several values."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError for no values."""
        known = list(values)
        if not known:
            raise ValueError("no values")
        return cls(statistics.median(known), min(known), max(known))

    def text(self, digits: int = 2) -> str:
        """As `median (least-most)`; the median alone where there was one value."""
        if self.least == self.most:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.least:,.{digits}f}-{self.most:,.{digits}f})"


@dataclass(frozen=True)
class Metric:
    """A figure by which engines are compared on one workload."""

    workload: str
    key: str
    title: str
    more_is_better: bool = False
    goal: float | None = None
    """What the ratio to the best peer shall reach, or stay below."""

    def is_met(self, ratio: float) -> bool | None:
        """Whether a ratio reaches the goal; None when there is none."""
        if self.goal is None:
            return None
        return ratio >= self.goal if self.more_is_better else ratio <= self.goal

    def best(self, medians: Mapping[str, float]) -> str:
        """The engine that does best."""
        return (max if self.more_is_better else min)(medians, key=lambda name: medians[name])


METRICS = (
    Metric("W1", "tokens_per_s", "W1 output tokens/s", more_is_better=True, goal=1.5),
    Metric("W1", "peak_rss_mb", "W1 peak memory", goal=1.0),
    Metric("W2", "wall_s", "W2 wall time", goal=0.7),
    Metric("W2", "ttft_p50_ms", "W2 TTFT, median"),
    Metric("W3", "tpot_mean_ms", "W3 time per output token", goal=0.9),
    Metric("W3", "ttft_mean_ms", "W3 TTFT", goal=1.0),
)


class Turns:
    """All turns of a comparison."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = [record for record in records if record["kind"] == "turn"]

    def names(self, *, peers: bool) -> list[str]:
        """Engines in order of appearance: peers, or variants of Treadle."""
        return list(dict.fromkeys(r["engine"] for r in self.records if r["is_peer"] == peers))

    def of(self, workload: str, engine: str) -> dict[tuple[int, int], Record]:
        """An engine's turns on a workload by (round, turn)."""
        return {(r["round"], r["turn"]): r for r in self.records if (r["workload"], r["engine"]) == (workload, engine)}

    def spread(self, workload: str, engine: str, key: str) -> Spread | None:
        """A figure over all turns; None when there are none."""
        found = self.of(workload, engine)
        return Spread.of(record[key] for record in found.values()) if found else None

    def ratio(self, metric: Metric, engine: str, other: str) -> Spread | None:
        """`engine` over `other`, turn by turn: both sides of a ratio come from one turn of one round, minutes apart."""
        ours, theirs = self.of(metric.workload, engine), self.of(metric.workload, other)
        paired = [ours[turn][metric.key] / theirs[turn][metric.key] for turn in ours if turn in theirs]
        return Spread.of(paired) if paired else None

    def best_peer(self, metric: Metric) -> str | None:
        """The peer with the best median."""
        spreads = {name: self.spread(metric.workload, name, metric.key) for name in self.names(peers=True)}
        medians = {name: spread.median for name, spread in spreads.items() if spread is not None}
        return metric.best(medians) if medians else None

    def agreement(self, workload: str, engine: str) -> float | None:
        """Share of requests that start as most peers start them; None without peers."""
        usual = self._usual_starts(workload)
        mine = [
            (place, tuple(start))
            for turn, record in self.of(workload, engine).items()
            for place, start in (((*turn, number), start) for number, start in enumerate(record["starts"]))
        ]
        judged = [start == usual[place] for place, start in mine if place in usual]
        return statistics.fmean(judged) if judged else None

    def _usual_starts(self, workload: str) -> dict[tuple[int, int, int], tuple[int, ...]]:
        votes: dict[tuple[int, int, int], Counter[tuple[int, ...]]] = defaultdict(Counter)
        for record in self.records:
            if record["is_peer"] and record["workload"] == workload:
                for number, start in enumerate(record["starts"]):
                    votes[record["round"], record["turn"], number][tuple(start)] += 1
        return {place: counts.most_common(1)[0][0] for place, counts in votes.items()}


def is_disturbed(record: Record) -> bool:
    """Whether others took a notable share of the CPU time of a turn."""
    others_s: float = record["others_cpu_s"] + record["stolen_s"]
    available_s: float = record["wall_s"] * record["cpus"]
    return others_s > BUSY_SHARE * available_s
