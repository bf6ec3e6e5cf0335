"""The portrait, the prefix statistics, pins, and eviction by cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from treadle import Engine, SamplingParams
from treadle.errors import ConfigError, InvalidRequest, TreadleError
from treadle.settings import load
from treadle.testing import FakeExecutor, drain_checked, make_engine
from treadle_plugins.observe.draw import portrait, read_samples
from treadle_plugins.observe.portrait import Portrait, PortraitSettings
from treadle_plugins.observe.prefix_stats import PrefixStats

FOUR = SamplingParams(max_tokens=4)


def write_portrait(path: Path, **slots: Any) -> list[dict[str, Any]]:
    plugin = Portrait(PortraitSettings(path=path, every_s=0))
    with make_engine(plugin, num_blocks=24, **slots) as engine:
        for n in range(6):
            engine.submit([n % 2] * 40, SamplingParams(max_tokens=20))
        drain_checked(engine)
    return read_samples(path)


@pytest.mark.parametrize(("prefix", "allocate"), [("hash_chain", "paged"), ("none", "contiguous")])
def test_every_block_is_in_one_part_of_the_portrait(prefix: str, allocate: str, tmp_path: Path) -> None:
    samples = write_portrait(tmp_path / "p.jsonl", prefix=prefix, allocate=allocate)
    parts = ("blocks_used", "blocks_wasted", "blocks_reserved", "blocks_cached", "blocks_free")
    for sample in samples:
        assert sum(sample[part] for part in parts) == pytest.approx(sample["blocks_total"])
        assert all(sample[part] >= 0 for part in parts)
    assert [sample["time_s"] for sample in samples] == sorted(sample["time_s"] for sample in samples)
    assert max(sample["num_running"] for sample in samples) > 1
    assert sum(sample["num_tokens"] for sample in samples) > 0
    assert any(sample["blocks_reserved"] for sample in samples) == (allocate == "contiguous")
    assert any(sample["blocks_cached"] for sample in samples) == (prefix == "hash_chain")


def test_memory_is_told_by_part(tmp_path: Path) -> None:
    settings = load(
        environment=False,
        values={
            "execute": "simulated",
            "plugins": ["portrait"],
            "plugin": {"portrait": {"path": str(tmp_path / "p.jsonl"), "every_s": 0}},
        },
    )
    with Engine(settings) as engine:
        engine.submit([1, 2, 3], FOUR)
        engine.drain()
    memory = read_samples(tmp_path / "p.jsonl")[0]["memory"]
    assert memory["kv_pool"] > 2**29
    assert memory["activations"] < memory["kv_pool"]
    assert memory["resident"] > 2**20


def test_the_portrait_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib: pip install 'treadle[bench]'")
    write_portrait(tmp_path / "p.jsonl")
    result = CliRunner().invoke(portrait, [str(tmp_path / "p.jsonl")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "p.svg").read_text()[:1000]


def test_a_file_that_is_no_portrait_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"memory": {}}) + "\nnonsense\n")
    with pytest.raises(TreadleError, match=r"p\.jsonl:2"):
        read_samples(path)
    path.write_text("")
    with pytest.raises(TreadleError, match="no sample"):
        read_samples(path)


def test_a_portrait_that_cannot_be_written_is_an_error_at_start_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name another file"):
        make_engine(Portrait(PortraitSettings(path=tmp_path / "none" / "p.jsonl")))


def test_hit_rates_by_tokens_and_by_requests() -> None:
    stats = PrefixStats()
    with make_engine(stats, num_blocks=8) as engine:
        for prompt in ([7] * 40, [7] * 40, [8] * 40, [7] * 33):
            engine.submit(prompt, FOUR)
            drain_checked(engine)
        assert stats.summary()["request_hit_rate"] == 0.5
        assert stats.summary()["token_hit_rate"] == pytest.approx(64 / 153)
        for n in range(9, 20):
            engine.submit([n] * 60, FOUR)
            drain_checked(engine)
    summary = stats.summary()
    assert summary["evicted"] > 0
    assert 0 < summary["median_lifetime_s"] < 1


def churn(engine: Engine, num_requests: int) -> None:
    for n in range(num_requests):
        engine.submit([100 + n] * 60, FOUR)
        drain_checked(engine)


def test_a_pinned_prompt_outlives_churn_until_its_time_is_over() -> None:
    with make_engine(num_blocks=12) as engine:
        engine.submit([1] * 40, FOUR)
        engine.submit([2] * 40, FOUR, pin_s=0.5)
        drain_checked(engine)
        assert engine.kv_cache.pool.num_pinned == 2
        churn(engine, 10)
        again = [engine.submit([n] * 40, FOUR) for n in (1, 2)]
        drain_checked(engine)
        assert [handle.result().num_cached_tokens for handle in again] == [0, 32]
        engine.clock.wait(engine.clock.now() + 1.0)
        churn(engine, 10)
        assert engine.kv_cache.pool.num_pinned == 0
        late = engine.submit([2] * 40, FOUR)
        drain_checked(engine)
        assert late.result().num_cached_tokens == 0


def test_pins_are_limited_and_yield_where_nobody_could_go_on() -> None:
    with make_engine(num_blocks=8) as engine:
        for n in range(5):
            engine.submit([n] * 20, FOUR, pin_s=1e6)
            drain_checked(engine)
        assert engine.kv_cache.pool.num_pinned == 4
        whole_pool = engine.submit([9] * 100, SamplingParams(max_tokens=29))
        drain_checked(engine)
        assert whole_pool.result().error is None
        assert engine.kv_cache.pool.num_pinned == 0


def test_a_request_that_does_not_share_leaves_and_takes_nothing() -> None:
    with make_engine() as engine:
        private = engine.submit([3] * 40, FOUR, reuse=False)
        drain_checked(engine)
        assert engine.kv_cache.pool.num_cached == 0
        shared = engine.submit([3] * 40, FOUR)
        drain_checked(engine)
        second = engine.submit([3] * 40, FOUR, reuse=False)
        drain_checked(engine)
        assert [h.result().num_cached_tokens for h in (private, shared, second)] == [0, 0, 0]
        with pytest.raises(InvalidRequest, match="pin_s"):
            engine.submit([1], FOUR, reuse=False, pin_s=1.0)


def cached_after_churn(evict: str) -> int:
    """Tokens that a deep, often used conversation finds after many short prompts have passed."""
    with make_engine(executor=FakeExecutor(), num_blocks=16, evict=evict) as engine:
        for _ in range(4):
            engine.submit([5] * 150, FOUR)
            drain_checked(engine)
        for n in range(12):
            engine.submit([50 + n] * 20, FOUR)
            drain_checked(engine)
        last = engine.submit([5] * 150, FOUR)
        drain_checked(engine)
        return last.result().num_cached_tokens


def test_eviction_by_cost_keeps_what_is_deep_and_often_used() -> None:
    assert cached_after_churn("cost_aware") > cached_after_churn("lru")
