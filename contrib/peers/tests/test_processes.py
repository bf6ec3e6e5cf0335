from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted import Scripted

import machine
from processes import EngineFailed, EngineProcess
from workloads import Job


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineProcess]:
    flaw = getattr(request, "param", "")
    process = EngineProcess(Scripted("scripted", "", None, ("--flaw", flaw)), 1, 64, tmp_path / "log")
    yield process
    process.close()


def test_an_engine_loads_and_answers_although_it_prints(started: EngineProcess) -> None:
    loaded = started.wait_until_loaded()
    assert loaded["facts"] == {"scripted": 1}
    assert loaded["load_peak_rss_bytes"] > 1 << 20
    wall_s, answers, memory = started.serve([Job([7, 7], 3), Job([7], 2)], 24)
    assert [answer.tokens for answer in answers] == [[2, 3, 4], [1, 2]]
    assert wall_s >= 0.005
    assert memory == {"weights": 1 << 20}
    assert "chatter" in started.log.read_text()


def test_between_its_turns_it_is_stopped(started: EngineProcess) -> None:
    with started.awake():
        started.wait_until_loaded()
    time.sleep(0.05)
    assert Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    with started.awake():
        assert started.serve([Job([7], 1)], 1)[1][0].tokens == [1]


@pytest.mark.parametrize(
    ("started", "message"),
    [("short", "gave 2 tokens where 3"), ("raises", "no such operation"), ("ends", "ended; its log")],
    indirect=["started"],
)
def test_what_fails_says_why(started: EngineProcess, message: str) -> None:
    started.wait_until_loaded()
    with pytest.raises(EngineFailed, match=message):
        started.serve([Job([7], 3)], 1)


def test_a_tree_of_processes_is_watched(started: EngineProcess) -> None:
    started.wait_until_loaded()
    with machine.watching(started.pid, 0.005) as usage:
        started.serve([Job([7], 30)], 1)
    assert usage.peak_rss_bytes > 1 << 20
    assert started.pid in machine.tree(started.pid)


def test_the_machine_is_described_and_measured() -> None:
    assert machine.facts()["cpus"] >= 1
    assert machine.Yardstick().measure()["copy_gb_s"] > 0
