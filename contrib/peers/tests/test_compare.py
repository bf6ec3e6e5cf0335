from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import Scripted

import catalogue
import compare
import report
from figures import Turns


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEERS_HOME", str(tmp_path))
    return tmp_path


def test_peers_that_are_not_installed_say_how_to_install_them(empty_home: Path) -> None:
    for engine in catalogue.peers():
        why = engine.why_missing()
        assert why is not None
        assert f"setup_peers.py {engine.install}" in why


def test_without_the_model_nothing_is_run(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([]) == 1
    assert "setup_peers.py" in capsys.readouterr().err


def test_what_is_left_out_is_said_and_recorded(empty_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = compare.Results(empty_home / "results.jsonl")
    for engine in catalogue.peers():
        results.leave_out(engine.name, str(engine.why_missing()))
    results.close()
    assert capsys.readouterr().out.count("not installed") == len(catalogue.peers())
    assert [record["kind"] for record in report.read([results.path])] == ["left out"] * len(catalogue.peers())


def test_a_round_asks_every_engine_and_goes_on_without_those_that_fail(
    empty_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_home / "model").mkdir()
    (empty_home / "model" / "corpus.json").write_text(json.dumps({"source": "numbers", "ids": list(range(5000))}))
    given = compare.parse(["--rounds", "2", "--workloads", "W3", "--out", str(tmp_path / "out" / "results.jsonl")])
    given.engines = [
        Scripted(name, "", install, ("--flaw", flaw), empty_home)
        for name, install, flaw in [("treadle", None, ""), ("good", "vllm", ""), ("bad", "vllm", "short")]
    ]
    catalogue.INSTALLS["vllm"].python.parent.mkdir(parents=True)
    catalogue.INSTALLS["vllm"].python.touch()
    catalogue.INSTALLS["vllm"].write_receipt()
    assert compare.run(given) == 0
    printed = capsys.readouterr().out
    assert "left out: bad: bad gave" in printed
    assert "| W3 time per output token |" in printed
    turns = Turns(report.read([given.out]))
    assert [len(turns.of("W3", name)) for name in ("treadle", "good", "bad")] == [6, 6, 0]
    assert turns.agreement("W3", "treadle") == 1


def test_variants_of_treadle_have_names_and_settings() -> None:
    given = compare.parse(["--peers", "none", "--treadle", "treadle", "--treadle", "slow attention=torch prefix=none"])
    assert [engine.name for engine in given.engines] == ["treadle", "slow"]
    assert given.engines[1].arguments == ("--set", "attention=torch", "--set", "prefix=none")
    assert not any(engine.is_peer for engine in given.engines)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--peers", "vlm"], "unknown peer 'vlm'; known are vllm"),
        (["--workloads", "W4"], "unknown workload 'W4'"),
        (["--treadle", "prefix=none"], "not a name followed by settings"),
        (["--treadle", "a", "--treadle", "a x=1"], "two engines have one name"),
        (["--share", "0"], "--share 0.0 must be above 0"),
    ],
)
def test_wrong_arguments_say_what_would_work(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse(argv)
    assert message in capsys.readouterr().err


def test_only_vllm_gets_its_libraries_in_front(empty_home: Path) -> None:
    vllm, openvino, *_ = catalogue.peers()
    library = empty_home / "tcmalloc" / "lib" / catalogue.TCMALLOC
    library.parent.mkdir(parents=True)
    library.touch()
    assert vllm.environment(2)["LD_PRELOAD"] == str(library)
    assert "LD_PRELOAD" not in openvino.environment(2)
    assert "PYTHONPATH" not in openvino.environment(2)
