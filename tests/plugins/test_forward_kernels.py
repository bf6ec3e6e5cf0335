"""The compiled kernels of the forward pass give what their reference gives."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")
pytest.importorskip("transformers")

from treadle_plugins.forward.fused.compiled import CompiledKernels  # noqa: E402  # after the skips
from treadle_plugins.forward.fused.kernels import Kernels, TorchKernels  # noqa: E402

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # one rounding of bfloat16 is 0.8 %
SHAPES = [(1, 64), (3, 576), (24, 100), (0, 64)]


@pytest.fixture(params=list(TOLERANCE), ids=str)
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def kernels(dtype: Any) -> CompiledKernels:
    return CompiledKernels(dtype)


def close(got: Any, expected: Any) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_norms(kernels: CompiledKernels, dtype: Any, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = (10 * torch.randn(shape) + 3).to(dtype)
    weight, bias = torch.randn(shape[1]), torch.randn(shape[1])
    outs = [torch.empty_like(x) for _ in range(4)]
    both: list[Kernels] = [kernels, TorchKernels()]
    for number, made in enumerate(both):
        made.rms_norm(x, weight, 1e-5, outs[number])
        made.layer_norm(x, weight, bias, 1e-5, outs[2 + number])
    close(outs[0], outs[1])
    close(outs[2], outs[3])


@pytest.mark.parametrize(("num_heads", "head_dim", "others"), [(4, 16, 2), (12, 64, 3), (1, 2, 0)])
def test_rotation(kernels: CompiledKernels, dtype: Any, num_heads: int, head_dim: int, others: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, (num_heads + others) * head_dim).to(dtype)
    angles = torch.randn(5, head_dim // 2)
    expected = x.clone()
    kernels.rotate(x, angles.cos(), angles.sin(), num_heads, head_dim)
    TorchKernels().rotate(expected, angles.cos(), angles.sin(), num_heads, head_dim)
    close(x, expected)


def test_rotation_is_that_of_transformers(dtype: Any) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, angles = torch.randn(5, 3, 16), torch.randn(5, 8)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    expected = apply_rotary_pos_emb(x[None], x[None], cos[None], sin[None], unsqueeze_dim=2)[0][0]
    got = x.flatten(1).to(dtype)
    TorchKernels().rotate(got, angles.cos(), angles.sin(), 3, 16)
    torch.testing.assert_close(got.float().view_as(expected), expected, rtol=0.02, atol=0.03 if dtype == torch.bfloat16 else 1e-5)


def test_a_row_with_nan_stays_nan_and_alone(kernels: CompiledKernels, dtype: Any) -> None:
    x = torch.randn(3, 64).to(dtype)
    x[1, 7] = float("nan")
    out, weight = torch.zeros_like(x), torch.ones(64)
    kernels.rms_norm(x, weight, 1e-5, out)
    assert out.isnan().any(dim=1).tolist() == [False, True, False]
    assert out[1].isnan().all()
    kernels.layer_norm(x, weight, weight, 1e-5, out)
    assert out.isnan().any(dim=1).tolist() == [False, True, False]
    kernels.rotate(x, torch.ones(3, 8), torch.ones(3, 8), 4, 16)
    assert x.isnan().any(dim=1).tolist() == [False, True, False]


def test_infinity_is_no_nan(kernels: CompiledKernels, dtype: Any) -> None:
    x = torch.full((1, 4), 3e38).to(dtype)
    kernels.rotate(x, torch.full((1, 2), 100.0), torch.zeros(1, 2), 1, 4)
    assert x.isinf().all()
