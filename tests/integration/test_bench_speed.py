"""`treadle bench-speed` on a tiny model: every part is measured, written down and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.reference import save_tiny  # noqa: E402
from treadle.cli import cli  # noqa: E402  # after the skips
from treadle_plugins.bench import speed  # noqa: E402

SMALL = {
    "BATCHES": (1, 3),
    "CONTEXTS": (20, 40),
    "QUEUES": (5, 50),
    "BLOCKS": (100, 300),
    "ROOFLINE_BATCHES": (1, 2),
    "ROOFLINE_CONTEXT": 16,
    "PREFILL_TOKENS": 30,
    "CODEC_BATCH": 2,
    "CODEC_CONTEXT": 32,
    "CODECS": {"none": {"strategy": "none"}, "int8": {"strategy": "int8"}},
    "STEPS": 3,
}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("speed")
    save_tiny("llama", folder / "model")
    settings = [f"model={folder / 'model'}", "attention=torch", "execute.dtype=float32"]
    arguments = [item for setting in settings for item in ("--set", setting)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(speed, name, value)
        answer = CliRunner().invoke(cli, ["bench-speed", "--folder", str(folder), *arguments])
    assert answer.exit_code == 0, answer.output
    return answer, json.loads((folder / "speed.json").read_text("utf-8")), folder


def test_every_point_is_measured(result: Any) -> None:
    _, points, _ = result
    found = {(point["part"], point["what"], point["at"]) for point in points}
    assert found >= {("roofline", "decode", 1), ("roofline", "decode", 2), ("roofline", "prefill", 30)}
    assert found >= {("codecs", "none", 2), ("codecs", "int8", 2)}
    assert found >= {("growth", "batch, context 16", 3), ("growth", "context, batch 1", 40)}
    assert found >= {("queue", "waiting, batch 24", 50), ("queue", "blocks, batch 24", 300)}
    assert all(point["step_ms"] > point["forward_ms"] >= 0 for point in points)
    assert all(point["forward_ms"] > 0 for point in points if point["part"] != "queue")
    assert all((point["bound_ms"] > 0) == (point["part"] == "roofline") for point in points)


def test_a_line_for_each_point(result: Any) -> None:
    answer, points, _ = result
    lines = [line for line in answer.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(points)
    assert {line.count("|") for line in lines} == {8}


def test_growth_is_drawn(result: Any) -> None:
    pytest.importorskip("matplotlib")
    *_, folder = result
    assert (folder / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "growth.svg").read_text("utf-8").count("ms a step") == 4


def test_a_full_pool_stays_full() -> None:
    """What is measured there is eviction, so there has to be some in most sizes."""
    assert len(speed.step_in_a_full_pool_ms(120)) >= 32
