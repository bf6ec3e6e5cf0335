"""The fused forward pass of the default model gives the plain one's tokens and, but for rounding, its logits."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from support.reference import LogitsRecorder  # noqa: E402
from treadle import Engine, SamplingParams  # noqa: E402  # after the skips
from treadle_plugins.execute.torch_executor import families, interface  # noqa: E402
from treadle_plugins.execute.torch_executor.passes import PlainForward  # noqa: E402
from treadle_plugins.forward.fused.build import build  # noqa: E402
from treadle_plugins.forward.fused.linear import cannot_pack  # noqa: E402
from treadle_plugins.models.load import LoadedModel  # noqa: E402

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(cannot_pack(torch.float32) is not None, reason="no oneDNN in this torch"),
]

PROMPTS = ("The capital of France is", "1, 1, 2, 3, 5, 8,", "def fibonacci(n):\n    ", "Once upon a time " * 20)


def answers(forward: str, dtype: str) -> tuple[list[tuple[int, ...]], Any, dict[str, int]]:
    """Tokens, the logits that chose them, and the memory that the engine takes."""
    recorder = LogitsRecorder()
    choice = {"strategy": "torch", "dtype": dtype, "forward": forward}
    with Engine.load(plugins=[recorder], execute=choice, attention="torch", prefix="none", pool={"num_blocks": 64}) as engine:
        handles = [engine.submit(prompt, SamplingParams(max_tokens=12)) for prompt in PROMPTS]
        engine.drain()
        memory = dict(engine.info.memory())
        return [handle.result().token_ids for handle in handles], torch.cat([recorder.of(h.id) for h in handles]), memory


@pytest.fixture(scope="module")
def plain() -> tuple[list[tuple[int, ...]], Any, dict[str, int]]:
    return answers("plain", "float32")


# transformers' own logits lie up to 8e-5 from those in float64, where they reach 42; oneDNN rounds up to twice as much
@pytest.mark.parametrize(("forward", "most"), [("auto", 1e-4), ("fused", 4e-4)])
def test_float32_differs_by_rounding_alone(plain: Any, forward: str, most: float) -> None:
    tokens, logits, memory = answers(forward, "float32")
    difference = float((logits - plain[1]).abs().max())
    print(f"{forward}: logits differ by at most {difference:.2g}; weights {memory['weights']:,} bytes")
    assert tokens == plain[0]
    assert difference < most
    assert memory["weights"] <= 1.01 * plain[2]["weights"]


@pytest.mark.skipif(cannot_pack(torch.bfloat16) is not None, reason="this processor does not multiply bfloat16")
def test_bf16_is_no_worse_than_transformers(default_reference: LoadedModel) -> None:
    """Error of the logits against float32, each token alone, so that attention plays no part."""
    exact = default_reference.model
    half = copy.deepcopy(exact).bfloat16()
    context = interface.ForwardContext()
    interface.register()
    families.connect(half, context)
    interface.bind(half, context)
    plain = PlainForward(half, context)
    ids = torch.arange(100, 40100, 400)
    positions = torch.zeros_like(ids)

    def alone(layer: int, queries: Any, keys: Any, values: Any) -> Any:
        return values.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)

    with torch.inference_mode():
        truth = exact(input_ids=ids[:, None]).logits[:, 0]
        own = plain(ids, positions, torch.arange(len(ids)), alone).float()
        fused = build(half, plain)
        logits = fused(ids, positions, torch.arange(len(ids)), alone).float()
    error, allowed = float((logits - truth).norm() / truth.norm()), float((own - truth).norm() / truth.norm())
    print(f"relative error in bfloat16 {error:.4f}, transformers' own {allowed:.4f}")
    assert error <= 1.05 * allowed


def test_packing_leaves_no_second_copy(default_reference: LoadedModel) -> None:
    model = copy.deepcopy(default_reference.model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    fused = build(model, PlainForward(model, interface.ForwardContext()))
    gc.collect()
    left = sum(parameter.nbytes for name, parameter in model.named_parameters() if parameter.dim() > 1)
    print(f"weights {weights:,} bytes, packed {fused.weight_bytes():,}, left in the model {left:,}")
    assert left == 0
    assert weights <= fused.weight_bytes() <= 1.001 * weights
