"""The log of blocks: what it keeps, that a replay of it finds nothing in a sound run, and everything that is planted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from treadle import SamplingParams
from treadle.blocks import IntegrityError
from treadle.errors import ConfigError, TreadleError
from treadle.testing import FakeExecutor, drain_checked, make_engine
from treadle.testing.faults import FailingExecutor, RandomVictims
from treadle.testing.traffic import serve, shared_prefix_traffic
from treadle_plugins.observe.block_entries import Entry, Header, Log, Numbered, entry_line, header_line, read_log
from treadle_plugins.observe.block_log import BlockLog, BlockLogSettings
from treadle_plugins.observe.block_replay import PoolReplay, first_divergence
from treadle_plugins.observe.blocks_command import blocks

VERBS = {
    "allocated", "shared", "reused", "filled", "released", "cached", "evicted", "freed", "swapped_out", "swapped_in",
    "swap_released", "step", "stopped",
}  # fmt: skip


def record(path: Path, *, num_requests: int = 60, seed: int = 0, executor: FakeExecutor | None = None, **settings: Any) -> Log:
    """A run with swap, preemption, eviction and reuse, cancelled requests among them."""
    plugin = BlockLog(BlockLogSettings(path=path, **settings))
    executor = executor or FakeExecutor(num_swap_blocks=6)
    with make_engine(plugin, RandomVictims(seed, may_swap=True), executor=executor, num_blocks=8, order="priority") as engine:
        serve(engine, shared_prefix_traffic(num_requests, seed=seed))
        late = [engine.submit([number] * 40, SamplingParams(max_tokens=60)) for number in range(4)]
        for _ in range(30):
            engine.step()
        for handle in late:
            handle.cancel()
        drain_checked(engine)
    return read_log(path)


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Nothing was dropped from it."""
    return record(tmp_path_factory.mktemp("log") / "blocks.jsonl", num_requests=200, length=1_000_000)


def test_a_long_run_does_not_diverge(long_log: Log) -> None:
    assert first_divergence(long_log) is None
    assert {item.entry.verb for item in long_log.entries} >= VERBS - {"swap_released"}
    assert [item.number for item in long_log.entries] == list(range(len(long_log.entries)))


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("length", [2, 50, 400])
def test_a_ring_that_wrapped_is_replayed_from_its_snapshot(seed: int, length: int, tmp_path: Path) -> None:
    log = record(tmp_path / "b.jsonl", seed=seed, length=length)
    assert log.snapshot is not None
    assert log.entries[0].number == log.snapshot["entry"] > 0
    assert log.entries[-1].entry.verb == "stopped"
    assert len(log.entries) <= length + 150, "a step's entries stay together"
    assert first_divergence(log) is None


@pytest.mark.parametrize("site", ["swap_out", "swap_in", "write"])
def test_a_failed_pass_is_told_so_that_the_replay_goes_on(site: Any, tmp_path: Path) -> None:
    executor = FailingExecutor(site, 5, num_swap_blocks=6)
    log = record(tmp_path / "b.jsonl", executor=executor, length=1_000_000)
    assert executor.num_failed
    assert first_divergence(log) is None


def test_a_stream_has_everything(long_log: Log, tmp_path: Path) -> None:
    assert record(tmp_path / "b.jsonl", num_requests=200, stream=True, length=10) == long_log


def test_an_entry_survives_its_line(long_log: Log, tmp_path: Path) -> None:
    path = tmp_path / "again.jsonl"
    path.write_text("\n".join([header_line(long_log.header), *(entry_line(*item) for item in long_log.entries)]))
    assert read_log(path) == long_log


def planted(log: Log, verb: str) -> tuple[list[Numbered], int]:
    """The log with one wrong entry of that verb in its second half; the entry's place."""
    half = len(log.entries) // 2
    pool = PoolReplay(log.header)
    assert pool.replay(log.entries[:half]) is None
    for place in range(half, len(log.entries)):
        entry = log.entries[place].entry
        wrong = spoilt(pool, entry) if entry.verb == verb else None
        if wrong is not None:
            entries = list(log.entries)
            entries[place] = Numbered(log.entries[place].number, wrong)
            return entries, place
        pool.apply(entry)
    raise AssertionError(f"nothing was {verb}")


def spoilt(pool: PoolReplay, entry: Entry) -> Entry | None:
    """An entry that cannot be true; None where none can be made of the blocks that there are."""
    state = pool.snapshot()
    used = [int(block) for block in state["used"]]
    if entry.verb == "step":
        return entry._replace(counts=(entry.counts[0] + 1, *entry.counts[1:]))
    if entry.verb in ("filled", "released", "swapped_out", "swapped_in"):
        return entry._replace(sequence=1_000_000)
    if entry.verb in ("shared", "evicted"):
        wrong = [block for block in range(8) if block not in state["indexed"]]
    else:
        wrong = [block for block in used if block not in entry.blocks]
    return entry._replace(blocks=(wrong[0],)) if wrong else None


@pytest.mark.parametrize("verb", sorted(VERBS - {"swap_released", "stopped"}))
def test_a_planted_entry_is_found(verb: str, long_log: Log) -> None:
    entries, place = planted(long_log, verb)
    found = first_divergence(Log(long_log.header, None, entries))
    assert found is not None
    assert found[0] is entries[place], found


def test_each_contradiction_is_named() -> None:
    taken = Entry("allocated", 1, "a", 1, (0, 1))
    filled = Entry("filled", 1, "a", 1, (0,))
    released = Entry("released", 2, "a", 1, (0, 1))
    for entries, problem in (
        ([taken, Entry("allocated", 1, "b", 2, (1,))], "block 1 is allocated, and it is used by request 1"),
        ([taken, Entry("shared", 1, "b", 2, (1,))], "block 1 is shared, and it is not indexed"),
        ([taken, Entry("released", 1, "b", 2, (1,))], "block 1 is released by request 2, and it is used by request 1"),
        ([taken, Entry("freed", 1, blocks=(1,))], "block 1 is freed, and it is used by request 1"),
        ([taken, released, Entry("freed", 2, blocks=(1, 0)), Entry("freed", 2, blocks=(0,))], "block 0 is freed, and it is free"),
        ([taken, released, Entry("allocated", 2, "b", 2, (2,))], "block 0 should have been freed before this"),
        ([taken, filled, released, Entry("freed", 2, blocks=(0,))], "block 0 is freed, and it is cached"),
        ([taken, filled, Entry("filled", 1, "a", 1, (0,))], "block 0 is filled, and it is indexed already"),
        ([taken, Entry("evicted", 1, blocks=(0,))], "block 0 is evicted, and it is not indexed"),
        ([taken, Entry("swapped_out", 1, "a", 1, copies=((2, 0),))], "block 2 is swapped_out by request 1, and it is free"),
        ([taken, Entry("swapped_out", 1, "a", 1, copies=((1, 0), (0, 0)))], "swap block 0 is written"),
        ([taken, Entry("swapped_in", 1, "a", 1, copies=((0, 1),))], "swap block 0 holds nothing of request 1"),
        ([taken, Entry("swap_released", 1, "a", 1, (0,))], "swap block 0 holds nothing of request 1"),
        ([taken, Entry("step", 1, counts=(3, 2, 0))], r"\(3, 2, 0\) by the engine's count, \(2, 2, 0\) by what was told"),
        ([taken, Entry("stopped", 1)], r"blocks \[0, 1\] .* were never released"),
        ([Entry("allocated", 1, "a", 1, (4,))], "there is no block 4"),
        ([Entry("eaten", 1)], "'eaten' is no verb"),
    ):
        numbered = [Numbered(number, entry) for number, entry in enumerate(entries)]
        found = first_divergence(Log(Header(4, 1), None, numbered))
        assert found is not None, problem
        assert found[0] is numbered[-1]
        with pytest.raises(Exception, match=problem):
            raise found[1]


def test_an_integrity_error_carries_the_last_entries_and_writes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    engine = make_engine(BlockLog(BlockLogSettings(path=path)), num_blocks=8)
    engine.submit([1] * 40, SamplingParams(max_tokens=4), request_id="mine")
    engine.step()
    engine.check_integrity()
    engine.kv_cache.pool.take([7])
    with pytest.raises(IntegrityError, match="block 7: count 1, held by 0") as raised:
        engine.check_integrity()
    text = str(raised.value)
    assert '"verb": "allocated", "request": "mine"' in text
    assert f"treadle blocks replay {path}" in text
    assert read_log(path).entries[0].entry.verb == "allocated"
    # the engine's own count tells where it was: nothing was told between this step and the one before
    engine.step()
    engine.step()
    with pytest.raises(IntegrityError):
        engine.check_integrity()
    engine.close()


def test_the_command_shows_the_entries_around(long_log: Log, tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    entries, place = planted(long_log, "allocated")
    path.write_text("\n".join([header_line(long_log.header), *(entry_line(*item) for item in entries)]))
    result = CliRunner().invoke(blocks, ["replay", str(path)])
    assert result.exit_code == 1, result.output
    first, *shown = result.output.splitlines()
    assert f"entry {entries[place].number} contradicts those before it: block" in first
    marked = [line for line in shown if line.startswith("> ")]
    assert marked == [f"> {entry_line(*entries[place])}"]
    assert 2 <= len(shown) <= 12
    path.write_text("\n".join([header_line(long_log.header), *(entry_line(*item) for item in long_log.entries)]))
    result = CliRunner().invoke(blocks, ["replay", str(path)])
    assert result.exit_code == 0, result.output
    assert "no divergence" in result.output


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"verb": "header"}', '{"verb": "freed"}'])
def test_a_file_that_is_no_log_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(text)
    with pytest.raises(TreadleError, match=r"b\.jsonl"):
        read_log(path)
    path.write_text(json.dumps({"verb": "header", "version": 9, "num_blocks": 1, "num_swap_blocks": 0}))
    with pytest.raises(TreadleError, match="version 9"):
        read_log(path)


def test_a_log_that_cannot_be_written_is_an_error_at_start_up(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name another file"):
        make_engine(BlockLog(BlockLogSettings(path=tmp_path / "none" / "b.jsonl")))
