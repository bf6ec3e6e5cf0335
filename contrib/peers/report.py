"""Tables from a file of results: `python report.py FILE...` prints them again, also for several runs together."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from figures import METRICS, Metric, Record, Spread, Turns, is_disturbed
from workloads import WORKLOADS

COLUMNS = (
    ("output tok/s", "tokens_per_s", 1),
    ("wall s", "wall_s", 2),
    ("TTFT mean ms", "ttft_mean_ms", 0),
    ("TTFT p50 ms", "ttft_p50_ms", 0),
    ("TTFT p95 ms", "ttft_p95_ms", 0),
    ("TPOT mean ms", "tpot_mean_ms", 2),
    ("peak RSS MB", "peak_rss_mb", 0),
)
NONE = "-"


def report(records: Sequence[Record]) -> str:
    """The whole report, as Markdown."""
    turns = Turns(records)
    if not turns.records:
        return "Nothing was measured."
    parts = [_conditions(records, turns), _engines(records)]
    parts += [_workload(turns, name) for name in WORKLOADS if any(r["workload"] == name for r in turns.records)]
    parts += [_memory(turns), _ratios(turns)]
    return "\n\n".join(part for part in parts if part)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = "-|-".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in [text[0]]) + f"\n|-{rule}-|\n" + "\n".join(f"| {line} |" for line in text[1:])


def _conditions(records: Sequence[Record], turns: Turns) -> str:
    begun = [record for record in records if record["kind"] == "begun"]
    lines = []
    for record in begun:
        machine = record["machine"]
        share = "" if record["share"] == 1 else f", only {record['share']:.0%} of the requests of W1 and W2: not comparable"
        lines.append(
            f"{record['date']}, commit {record['commit']}: {machine['processor']}, {machine['cpus']} CPUs, "
            f"{machine['memory_gib']} GiB; "
            f"{record['threads']} threads, {record['pool_tokens']} pool tokens, {record['rounds']} rounds{share}. "
            f"Prompts from {record['corpus']}."
        )
    lines += [f"Left out: {r['engine']}: {r['why']}" for r in records if r["kind"] == "left out"]
    copy = Spread.of(r["machine"]["copy_gb_s"] for r in turns.records)
    loop = Spread.of(r["machine"]["loop_ms"] for r in turns.records)
    disturbed = sum(map(is_disturbed, turns.records))
    lines.append(
        f"Before the turns: copy {copy.text(1)} GB/s, fixed loop {loop.text(1)} ms. In {disturbed} of {len(turns.records)} turns "
        "others took more than 5 % of the CPU time."
    )
    return "\n".join(lines)


def _engines(records: Sequence[Record]) -> str:
    loaded = {record["engine"]: record for record in records if record["kind"] == "loaded"}
    lines = []
    for name, record in loaded.items():
        facts = ", ".join(f"{key} {value}" for key, value in record["facts"].items() if value)
        loading = f"loaded in {record['load_s']:.1f} s, with {record['load_peak_rss_mb']:,.0f} MB at most"
        lines.append(f"- {name}: {facts}; {loading}")
    return "**Engines**\n\n" + "\n".join(lines)


def _workload(turns: Turns, workload: str) -> str:
    rows = []
    for name in [*turns.names(peers=False), *turns.names(peers=True)]:
        found = turns.of(workload, name)
        if not found:
            continue
        agreed = turns.agreement(workload, name)
        figures = [Spread.of(r[key] for r in found.values()).text(digits) for _, key, digits in COLUMNS]
        disturbed = sum(map(is_disturbed, found.values()))
        rows.append([name, *figures, NONE if agreed is None else f"{agreed:.0%}", f"{len(found)} ({disturbed})"])
    header = ["engine", *(title for title, _, _ in COLUMNS), "same start", "turns (disturbed)"]
    return f"**{workload}**, {WORKLOADS[workload].title}: median (least-most)\n\n" + table(header, rows)


def _memory(turns: Turns) -> str:
    """What Treadle's peak on W1 is made of."""
    rows = []
    for name in turns.names(peers=False):
        for record in list(turns.of("W1", name).values())[-1:]:
            parts = {part: size / (1 << 20) for part, size in record["memory"].items() if size}
            rest = record["peak_rss_mb"] - sum(parts.values())
            rows.append([name, *(f"{parts.get(part, 0):,.0f}" for part in ("weights", "kv_pool", "swap_space")), f"{rest:,.0f}"])
    if not rows:
        return ""
    header = ["engine", "weights MB", "KV pool MB", "swap space MB", "rest of peak RSS MB: libraries, buffers, books"]
    return "**Memory on W1, by part** (pages of the pool that were never touched count as pool, not as resident)\n\n" + table(
        header, rows
    )


def _ratios(turns: Turns) -> str:
    variants, peers = turns.names(peers=False), turns.names(peers=True)
    if not variants or (not peers and len(variants) < 2):
        return ""
    rows = [
        _ratio_row(turns, metric, name, [*peers, *variants])
        for metric in METRICS
        for name in variants
        if turns.of(metric.workload, name)
    ]
    header = ["figure", "engine", "over the best peer", "goal", *(f"/ {name}" for name in [*peers, *variants])]
    return "**Ratios**: engine over each other, paired turn by turn; median (least-most)\n\n" + table(header, rows)


def _ratio_row(turns: Turns, metric: Metric, name: str, others: Sequence[str]) -> list[str]:
    best = turns.best_peer(metric)
    over_best = None if best is None else turns.ratio(metric, name, best)
    against = "none" if over_best is None else f"{over_best.text()} {best}"
    goal = NONE
    if metric.goal is not None:
        met = None if over_best is None else metric.is_met(over_best.median)
        goal = f"{'>=' if metric.more_is_better else '<='} {metric.goal:g}" + {None: "", True: ": met", False: ": not met"}[met]
    cells = [None if other == name else turns.ratio(metric, name, other) for other in others]
    return [metric.title, name, against, goal, *(NONE if cell is None else cell.text() for cell in cells)]


def read(paths: Iterable[Path]) -> list[Record]:
    """All records of files of results. Rounds of later files count on from those of earlier ones."""
    records: list[Record] = []
    for number, path in enumerate(paths):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if record["kind"] == "turn":
                record["round"] += number * 1_000_000
            records.append(record)
    return records


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: report.py FILE...")
    print(report(read(map(Path, sys.argv[1:]))))
