"""`treadle bench-baseline` with a few short requests: equal outputs, pools in the order that the policies imply, portraits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from treadle.cli import cli  # after the skips
from treadle_plugins.bench.baseline import POLICIES

pytestmark = pytest.mark.model


def test_the_base_line_is_compared(tmp_path: Path) -> None:
    arguments = ["bench-baseline", "--requests", "4", "--max-tokens", "6", "--folder", str(tmp_path)]
    result = CliRunner().invoke(cli, [*arguments, "--set", "execute.dtype=float32"])
    assert result.exit_code == 0, result.output
    assert "outputs differ between policies for 0 of them" in result.stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if line.startswith("| ")]
    pools = {row[0]: float(row[2]) for row in rows[1:]}
    assert list(pools) == list(POLICIES)
    longest, static, paged, shared = pools.values()
    assert longest > 10 * static
    assert static >= paged > shared
    assert [row["cached_tokens"] > 0 for row in json.loads((tmp_path / "results.json").read_text("utf-8"))] == [False] * 3 + [
        True
    ]
    drawn = CliRunner().invoke(cli, ["portrait", str(tmp_path / "continuous-paged.jsonl"), "--output", str(tmp_path / "a.svg")])
    assert drawn.exit_code == 0, drawn.output
