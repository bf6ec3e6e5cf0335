"""`treadle codec-table` and `treadle calibrate` on the default model, and on the same with planted outliers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from treadle.cli import cli  # noqa: E402  # after the skips
from treadle_plugins.bench import codec_rows, codec_table  # noqa: E402

pytestmark = pytest.mark.model
ROWS = ("int4 + Hadamard", "int4 + Hadamard, worst eighth kept")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table in two pieces, made from less text than usual."""
    made = tmp_path_factory.mktemp("table")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_rows, "SEQUENCE", 256)
        patch.setattr(codec_rows, "NUM_PROMPTS", 4)
        patch.setattr(codec_rows, "OUTPUT_TOKENS", 8)
        short = {name: (*arguments, "--max-tokens", "512") for name, arguments in codec_table.CALIBRATIONS.items()}
        patch.setattr(codec_table, "CALIBRATIONS", short)
        rows = [item for name in ROWS for item in ("--row", name)]
        command = ["codec-table", "--folder", str(made), "--tokens", "1024"]
        assert CliRunner().invoke(cli, [*command, "--model", "base", "--row", "none"]).exit_code == 0
        result = CliRunner().invoke(cli, [*command, "--model", "planted", *rows])
    assert result.exit_code == 0, result.output
    (made / "output.txt").write_text(result.stdout, encoding="utf-8")
    return made


@pytest.fixture
def rows(folder: Path) -> dict[tuple[str, str], Any]:
    return {(row["model"], row["codec"]): row for row in codec_table.load_rows(folder / "rows.jsonl")}


def planted_heads(num_layers: int, num_kv_heads: int) -> Sequence[tuple[int, int]]:
    """Those whose key projections `plant` changes, in a model of ones."""
    dim = 64

    def ones(heads: int) -> Any:
        weights = [torch.ones(heads * dim)]
        return SimpleNamespace(parameters=lambda: weights)

    layers = [
        SimpleNamespace(self_attn=SimpleNamespace(k_proj=ones(num_kv_heads), q_proj=ones(num_kv_heads)))
        for _ in range(num_layers)
    ]
    config = SimpleNamespace(
        num_hidden_layers=num_layers,
        num_key_value_heads=num_kv_heads,
        num_attention_heads=num_kv_heads,
        hidden_size=dim * num_kv_heads,
    )
    codec_rows.plant(SimpleNamespace(config=config, model=SimpleNamespace(layers=layers)))
    keys = [layer.self_attn.k_proj.parameters()[0].view(num_kv_heads, dim) for layer in layers]
    return [(place, head) for place, rows in enumerate(keys) for head in range(num_kv_heads) if (rows[head] != 1).any()]


def test_planting_leaves_the_function_as_it_is(rows: dict[tuple[str, str], Any]) -> None:
    assert rows["planted", "none"]["perplexity"] == rows["base", "none"]["perplexity"]


def test_planted_outliers_hurt_and_calibrate_finds_them(folder: Path, rows: dict[tuple[str, str], Any]) -> None:
    found = json.loads((folder / "planted-worst.json").read_text("utf-8"))
    named = {tuple(head) for head in (*found["whole_heads"], *found["whole_keys"])}
    assert named >= set(planted_heads(30, 3))
    assert len(named) <= 90 // 8
    hurt, kept = (rows["planted", name]["kl_mean"] for name in ROWS)
    assert kept < hurt / 2


def test_rows_count_the_bytes_of_heads_that_are_kept(rows: dict[tuple[str, str], Any]) -> None:
    plain, kept = (rows["planted", name] for name in ROWS[:2])
    both, keys = map(int, re.findall(r"\d+", kept["whole"]))
    assert plain["bytes_per_token"] == 7200
    assert kept["bytes_per_token"] == 7200 + both * 2 * (128 - 40) + keys * (128 - 40)
    assert kept["pool_tokens"] < plain["pool_tokens"]


def test_the_table_says_it_all(folder: Path) -> None:
    lines = (folder / "output.txt").read_text("utf-8").splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 1 + 1 + 1 + len(ROWS)
    assert sum("+0.00 %" in line for line in table) == 2
    assert any(line.startswith("| planted | int4 + Hadamard, worst eighth kept |") and "| 0.3" in line for line in table)


def test_a_row_that_does_not_exist(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["codec-table", "--folder", str(tmp_path), "--row", "int4 + Hadamart"])
    assert result.exit_code != 0
    assert "no row 'int4 + Hadamart'" in result.stderr
    assert "int4 + Hadamard" in result.stderr


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Too short.", encoding="utf-8")
    result = CliRunner().invoke(cli, ["calibrate", str(text), "--output", str(tmp_path / "out.json")])
    assert result.exit_code != 0
    assert "at least 64 are needed" in result.stderr
