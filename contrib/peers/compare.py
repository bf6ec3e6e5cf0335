"""Run Treadle and its peers on the same workloads in interleaved rounds, and print one table of ratios.

    python compare.py                                                    everything that is installed, 3 rounds
    python compare.py --rounds 5 --peers vllm,openvino --workloads W1,W3
    python compare.py --peers none --treadle treadle --treadle "torch-attention attention=torch"

Each engine's process loads once and is then asked in turn; between its turns it is stopped. Run `setup_peers.py` first.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import catalogue
import figures
import machine
import report
import workloads
from processes import EngineFailed, EngineProcess
from workloads import Corpus


class Results:
    """Records, in memory and as lines of JSON in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[figures.Record] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def add(self, kind: str, **values: Any) -> None:
        """Keep a record; it is on the disk when this returns."""
        record = {"kind": kind, **values}
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No more records."""
        self._file.close()

    def leave_out(self, engine: str, why: str) -> None:
        """Say that an engine takes no part, or no more."""
        print(f"left out: {engine}: {why}", flush=True)
        self.add("left out", engine=engine, why=why)


@dataclass
class Comparison:
    """One run: engines that are loaded, and what they are asked."""

    given: argparse.Namespace
    results: Results
    corpus: Corpus
    yardstick: machine.Yardstick
    running: list[EngineProcess]

    def load(self, engines: Sequence[catalogue.Engine], stack: ExitStack) -> None:
        """Start all engines, one after another, and warm each up."""
        for engine in engines:
            why = engine.why_missing()
            if why is not None:
                self.results.leave_out(engine.name, why)
                continue
            log = self.results.path.with_name(f"{self.results.path.stem}.{engine.name}.log")
            with locked(self.given.lock):
                process = EngineProcess(engine, self.given.threads, self.given.pool_tokens, log)
                stack.callback(process.close)
                self.running.append(process)
                with self._or_left_out(process), process.awake():
                    self._warm_up(process)

    def _warm_up(self, process: EngineProcess) -> None:
        started_s = time.perf_counter()
        loaded = process.wait_until_loaded()
        for jobs, at_once in workloads.make_warm_up(self.corpus):
            process.serve(jobs, at_once)
        name, peak_mb = process.engine.name, loaded.pop("load_peak_rss_bytes") / machine.MIB
        self.results.add("loaded", engine=name, load_peak_rss_mb=peak_mb, **loaded)
        print(f"{name}: loaded in {loaded['load_s']:.1f} s, warm after {time.perf_counter() - started_s:.1f} s", flush=True)

    def play(self, number: int) -> None:
        """One round. The order of the engines moves on by one from round to round."""
        for name in self.given.workloads:
            for turn in range(workloads.WORKLOADS[name].turns):
                shift = (number + turn) % max(1, len(self.running))
                for process in self.running[shift:] + self.running[:shift]:
                    with locked(self.given.lock), self._or_left_out(process), process.awake():
                        self._take_turn(process, name, number, turn)

    def _take_turn(self, process: EngineProcess, name: str, number: int, turn: int) -> None:
        workload = workloads.WORKLOADS[name]
        contents = number * workload.turns + turn
        jobs = workloads.make(name, self.corpus, contents, self.given.share)
        process.serve(workloads.make_nudge(self.corpus, contents), 1)
        state = self.yardstick.measure()
        with machine.watching(process.pid) as usage:
            wall_s, answers, memory = process.serve(jobs, workload.at_once)
        measured = figures.measure(jobs, answers, wall_s)
        self.results.add(
            "turn",
            workload=name,
            engine=process.engine.name,
            is_peer=process.engine.is_peer,
            round=number,
            turn=turn,
            **measured,
            peak_rss_mb=usage.peak_rss_bytes / machine.MIB,
            memory=memory,
            cpus=os.cpu_count(),
            cpu_s=usage.cpu_s,
            others_cpu_s=usage.others_cpu_s,
            stolen_s=usage.stolen_s,
            machine=state,
            starts=figures.starts(answers),
        )
        print(_line(self.results.records[-1]), flush=True)

    @contextmanager
    def _or_left_out(self, process: EngineProcess) -> Iterator[None]:
        """An engine that fails takes no further part; the others go on."""
        try:
            yield
        except EngineFailed as error:
            self.results.leave_out(process.engine.name, str(error))
            process.close()
            self.running = [other for other in self.running if other is not process]


def _line(turn: figures.Record) -> str:
    mark = " (disturbed)" if figures.is_disturbed(turn) else ""
    return (
        f"round {turn['round']} {turn['workload']}.{turn['turn']} {turn['engine']}: {turn['wall_s']:.2f} s, "
        f"{turn['tokens_per_s']:.1f} tok/s, TTFT p50 {turn['ttft_p50_ms']:.0f} ms, TPOT {turn['tpot_mean_ms']:.2f} ms, "
        f"RSS {turn['peak_rss_mb']:.0f} MB; copy {turn['machine']['copy_gb_s']:.1f} GB/s, "
        f"others {turn['others_cpu_s']:.1f} s{mark}"
    )


def commit() -> str:
    """The commit of the checkout that this script lies in, and whether files differ from it."""
    command = ["git", "-C", str(catalogue.HERE), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  # our own command
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no checkout"
    return done.stdout.strip()


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold a lock on a file, so that other jobs on the machine which take the same lock wait. None holds nothing."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = catalogue.peers()
    known = ", ".join(peer.name for peer in peers)
    default = ",".join(peer.name for peer in peers if peer.by_default)
    parser.add_argument("--peers", default=default, help=f"none, or some of {known}; {default} when it is not given")
    parser.add_argument(
        "--treadle", action="append", metavar="'NAME [SETTING=VALUE ...]'", help="a variant of Treadle; may be repeated"
    )
    parser.add_argument("--workloads", default=",".join(workloads.WORKLOADS), help="some of W1,W2,W3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-round", type=int, default=0, help="its number decides the contents of the prompts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pool-tokens", type=int, default=workloads.AT_ONCE * workloads.LONGEST, help="KV pool of every engine")
    parser.add_argument(
        "--share", type=float, default=1.0, help="run only this share of the requests of W1 and W2, for a quick look"
    )
    parser.add_argument("--lock", type=Path, help="hold a lock on this file during each turn")
    parser.add_argument("--out", type=Path, help="where the results go, as lines of JSON")
    given = parser.parse_args(argv)
    given.workloads = given.workloads.split(",")
    unknown = [name for name in given.workloads if name not in workloads.WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}; known are {', '.join(workloads.WORKLOADS)}")
    try:
        given.engines = [catalogue.treadle_variant(text) for text in given.treadle or [catalogue.TREADLE]]
        given.engines += catalogue.choose([] if given.peers == "none" else given.peers.split(","))
    except ValueError as error:
        parser.error(str(error))
    names = [engine.name for engine in given.engines]
    if len(set(names)) < len(names):
        parser.error(f"two engines have one name: {', '.join(names)}; give each --treadle a name of its own")
    if not (0 < given.share <= 1 and given.rounds >= 1):
        parser.error(f"--share {given.share} must be above 0 and at most 1, and --rounds {given.rounds} at least 1")
    return given


def run(given: argparse.Namespace) -> int:
    """Compare and print; 1 when Treadle could not be measured."""
    path = given.out or catalogue.home() / "results" / time.strftime("%Y%m%d-%H%M%S.jsonl")
    corpus = Corpus.read(catalogue.model_folder() / "corpus.json")
    comparison = Comparison(given, Results(path), corpus, machine.Yardstick(), [])
    comparison.results.add(
        "begun",
        date=time.strftime("%Y-%m-%d %H:%M"),
        machine=machine.facts(),
        commit=commit(),
        corpus=f"{corpus.source}, tokens {corpus.digest}",
        **{name: getattr(given, name) for name in ("rounds", "first_round", "threads", "pool_tokens", "share")},
    )
    with ExitStack() as stack:
        stack.callback(comparison.results.close)
        comparison.load(given.engines, stack)
        for number in range(given.first_round, given.first_round + given.rounds):
            comparison.play(number)
    print(f"\n{report.report(comparison.results.records)}\n\nResults: {path}")
    return 0 if figures.Turns(comparison.results.records).names(peers=False) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and compare, where there is a model to compare with."""
    given = parse(argv)
    if not catalogue.model_folder().exists():
        print("the model that all engines run is missing: run setup_peers.py first", file=sys.stderr)
        return 1
    return run(given)


if __name__ == "__main__":
    sys.exit(main())
