"""Who computes the forward pass: a plugin's answer, else the built-in one, else transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.reference import save_tiny  # noqa: E402
from treadle import Engine, SamplingParams, hookimpl  # noqa: E402  # after the skips
from treadle_plugins.forward.fused.linear import cannot_pack  # noqa: E402
from treadle_plugins.forward.spec import Attend, PackedForward  # noqa: E402

pytestmark = pytest.mark.skipif(cannot_pack(torch.float32) is not None, reason="no oneDNN in this torch")

PROMPT = list(range(7, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", path)
    return path


def answer(folder: Path, *plugins: object, **choice: Any) -> tuple[tuple[int, ...], Mapping[str, str]]:
    execute = {"strategy": "torch", "device": "cpu", "dtype": "float32", **choice}
    pool = {"num_blocks": 8}
    with Engine.load(model=str(folder), plugins=plugins, execute=execute, attention="torch", pool=pool) as engine:
        handle = engine.submit(PROMPT, SamplingParams(max_tokens=10))
        engine.drain()
        return handle.result().token_ids, engine.describe()


class Counting:
    """Wraps the model's own pass."""

    name = "counting"

    def __init__(self) -> None:
        self.num_passes = 0

    @hookimpl
    def forward(self, plain: PackedForward) -> PackedForward:
        owner = self

        class Counted:
            def __call__(self, token_ids: Any, positions: Any, rows: Any, attend: Attend) -> Any:
                owner.num_passes += 1
                return plain(token_ids, positions, rows, attend)

            def describe(self) -> Mapping[str, str]:
                return {"forward": "counted"}

            def weight_bytes(self) -> int:
                return plain.weight_bytes()

        return Counted()


class Halving:
    """Changes the weights before anybody packs them."""

    name = "halving"

    @hookimpl
    def prepare_model(self, model: Any) -> None:
        model.lm_head.weight.data.neg_()


def test_the_built_in_pass_is_fused_unless_told_otherwise(folder: Path) -> None:
    fused, facts = answer(folder)
    plain, plain_facts = answer(folder, forward="plain")
    assert fused == plain
    assert facts["forward"].startswith("fused Llama")
    assert plain_facts["forward"] == "transformers"


def test_a_plugins_pass_stands_in_front(folder: Path) -> None:
    counting = Counting()
    tokens, facts = answer(folder, counting)
    assert facts["forward"] == "counted"
    assert counting.num_passes > 10
    assert tokens == answer(folder, forward="plain")[0]


def test_weights_that_a_plugin_changed_are_those_that_are_packed(folder: Path) -> None:
    changed, facts = answer(folder, Halving())
    assert facts["forward"].startswith("fused Llama")
    assert changed == answer(folder, Halving(), forward="plain")[0]
    assert changed != answer(folder)[0]
