from __future__ import annotations

from typing import Any

import pytest

import figures
import report
from figures import METRICS, Metric, Spread, Turns
from serving import Answer
from workloads import Job


def turn(engine: str, speed: float, number: int = 0, *, is_peer: bool = True, **changed: Any) -> figures.Record:
    """A turn of W1 whose speed and start are all that matters."""
    values = dict.fromkeys(("wall_s", "ttft_mean_ms", "ttft_p50_ms", "ttft_p95_ms", "tpot_mean_ms", "peak_rss_mb"), 10.0)
    state = {"copy_gb_s": 9.0, "loop_ms": 30.0, "load_1min": 0.1}
    fixed = {"kind": "turn", "workload": "W1", "turn": 0, "memory": {}, "machine": state, "starts": [[1, 2], [3, 4]], "cpus": 2}
    usage = {"others_cpu_s": 0.0, "stolen_s": 0.0, "cpu_s": 1.0}
    return {"engine": engine, "is_peer": is_peer, "round": number, "tokens_per_s": speed, **values, **fixed, **usage, **changed}


def test_a_turn_is_measured() -> None:
    jobs = [Job([1], 3), Job([2], 1)]
    measured = figures.measure(jobs, [Answer([5, 6, 7], 0.1, 0.3), Answer([8], 0.2, 0.2)], 0.5)
    assert measured["tokens_per_s"] == 8
    assert measured["tpot_mean_ms"] == pytest.approx(100)
    assert measured["ttft_mean_ms"] == pytest.approx(150)
    assert measured["ttft_p95_ms"] == pytest.approx(200)


def test_an_answer_keeps_when_its_first_and_last_tokens_came() -> None:
    answer = Answer()
    for tokens, now_s in ([], 1.0), ([4], 2.0), ([5, 6], 3.0):
        answer.add(tokens, now_s)
    assert answer == Answer([4, 5, 6], 2.0, 3.0)


def test_ratios_are_paired_by_round() -> None:
    turns = Turns(
        [turn("ours", 20, 0, is_peer=False), turn("slow", 10, 0), turn("ours", 10, 1, is_peer=False), turn("slow", 4, 1)]
    )
    assert turns.ratio(METRICS[0], "ours", "slow") == Spread(2.25, 2.0, 2.5)


def test_a_turn_that_only_one_of_two_took_counts_for_no_ratio() -> None:
    turns = Turns([turn("ours", 20, 0, is_peer=False), turn("ours", 99, 1, is_peer=False), turn("slow", 10, 0)])
    assert turns.ratio(METRICS[0], "ours", "slow") == Spread(2.0, 2.0, 2.0)
    assert turns.ratio(METRICS[0], "ours", "absent") is None


def test_the_best_peer_is_the_fastest_or_the_smallest() -> None:
    records = [turn("a", 10, peak_rss_mb=5), turn("b", 20, peak_rss_mb=9), turn("ours", 99, is_peer=False, peak_rss_mb=1)]
    assert [Turns(records).best_peer(metric) for metric in METRICS[:2]] == ["b", "a"]
    assert Turns(records[2:]).best_peer(METRICS[0]) is None


@pytest.mark.parametrize(("metric", "ratio", "met"), [(METRICS[0], 1.5, True), (METRICS[0], 1.4, False), (METRICS[2], 0.7, True)])
def test_goals(metric: Metric, ratio: float, met: bool) -> None:
    assert metric.is_met(ratio) is met


def test_agreement_is_with_what_most_peers_say() -> None:
    records = [turn("a", 1), turn("b", 1), turn("c", 1, starts=[[9, 9], [3, 4]]), turn("ours", 1, is_peer=False)]
    assert [Turns(records).agreement("W1", name) for name in ("a", "c", "ours")] == [1.0, 0.5, 1.0]
    assert Turns(records[3:]).agreement("W1", "ours") is None


def test_a_turn_is_disturbed_by_others_and_by_the_host() -> None:
    assert not figures.is_disturbed(turn("a", 1))
    assert figures.is_disturbed(turn("a", 1, others_cpu_s=1.5))
    assert figures.is_disturbed(turn("a", 1, stolen_s=1.5))


def test_the_report_names_goals_gaps_and_parts() -> None:
    begun = {
        "kind": "begun",
        "date": "today",
        "commit": "abc",
        "machine": {"processor": "P", "cpus": 2, "memory_gib": 8},
        "threads": 2,
        "pool_tokens": 64,
        "rounds": 1,
        "share": 0.5,
        "corpus": "numbers",
    }
    left_out = {"kind": "left out", "engine": "c", "why": "not installed"}
    ours = turn("ours", 12, is_peer=False, memory={"weights": 4 << 20})
    text = report.report([begun, left_out, ours, turn("a", 10)])
    assert "Left out: c: not installed" in text
    assert "not comparable" in text
    assert ">= 1.5: not met" in text
    assert "1.20 a" in text
    assert "| ours   | 4" in text


def test_nothing_measured_is_said() -> None:
    assert report.report([]) == "Nothing was measured."
