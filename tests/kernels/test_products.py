"""Matrix products in bfloat16 by our own kernel: against float64, and the same bits whatever rows are computed beside.

A product is summed up in float32 and rounded once, to 8 bits: 2 ** -8 of a result, and as much of the largest for sums that
cancel, which is far above what float32 loses and far below what a wrong or missing element makes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from treadle_plugins.forward.fused import blocked, linear, products  # noqa: E402  # after the skips
from treadle_plugins.forward.fused.blocked import BlockedLinear, Products  # noqa: E402
from treadle_plugins.forward.fused.linear import Activation, PackedLinear  # noqa: E402
from treadle_plugins.forward.fused.report import Report  # noqa: E402
from treadle_plugins.kernels import cpu  # noqa: E402

needs_dot = pytest.mark.skipif(not cpu.host().has_bf16_dot, reason="this processor does not multiply pairs of bfloat16")
SWISH = Activation(torch.nn.functional.silu, "swish")
SHAPES = [(16, 32), (48, 32), (960, 576), (576, 1536)]
ROWS = [1, 2, 3, 5, 8, 11, 13, 17, 22, 24, 25, 49, 96, 97, 200]


@pytest.fixture(scope="module")
def kernel() -> Products:
    return Products()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(got: torch.Tensor, right: torch.Tensor) -> bool:
    assert got.dtype == torch.bfloat16
    error = (got.double() - right).abs()
    return bool((error <= 2**-8 * right.abs() + 2**-10 * right.abs().max()).all())


@needs_dot
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_all_endings_against_float64(kernel: Products, num_out: int, num_in: int, with_bias: bool) -> None:
    weight, gate, bias = numbers(num_out, num_in), numbers(num_out, num_in, seed=1), numbers(num_out, seed=2)
    layer = BlockedLinear(weight, bias if with_bias else None, kernel)
    gates = BlockedLinear(gate, None, kernel)
    for rows in ROWS:
        x, other = numbers(rows, num_in, seed=3), numbers(rows, num_out, seed=4)
        right = x.double() @ weight.double().t() + (bias.double() if with_bias else 0.0)
        gated = x.double() @ gate.double().t()
        assert close(layer(x), right)
        assert close(layer.plus(x, other), right + other.double())
        assert close(layer.times(x, other), right * other.double())
        assert close(layer.activated(x, SWISH), right * right.sigmoid())
        assert close(layer.gated(x, gates), right * gated * gated.sigmoid())
        torch.testing.assert_close(layer.sums(x).double(), right, rtol=1e-6, atol=1e-4)


@needs_dot
def test_a_row_has_the_same_bits_whatever_is_beside_it(kernel: Products) -> None:
    layer = BlockedLinear(numbers(960, 576), numbers(960, seed=2), kernel)
    x = numbers(200, 576, seed=3)
    together = layer(x)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), together[:rows])
        assert torch.equal(layer(x[200 - rows :]), together[200 - rows :])
        assert torch.equal(layer.sums(x[:rows]).bfloat16(), together[:rows])


@needs_dot
def test_rows_that_lie_apart_or_columns_that_do(kernel: Products) -> None:
    layer = BlockedLinear(numbers(48, 64), None, kernel)
    wide, other = numbers(7, 200), numbers(7, 100, seed=5)
    assert torch.equal(layer(wide[:, 10:74]), layer(wide[:, 10:74].contiguous()))
    assert torch.equal(layer(wide[:, ::3][:, :64]), layer(wide[:, ::3][:, :64].contiguous()))
    assert torch.equal(layer.plus(wide[:, :64], other[:, 3:51]), layer.plus(wide[:, :64], other[:, 3:51].contiguous()))
    assert torch.equal(
        layer.times(wide[:, :64], other[:, ::2][:, :48]), layer.times(wide[:, :64], other[:, ::2][:, :48].contiguous())
    )
    assert layer(wide[:0, :64]).shape == (0, 48)


@needs_dot
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_spoil_nothing_else(kernel: Products, spoiled: float) -> None:
    layer, gates = BlockedLinear(numbers(48, 64), None, kernel), BlockedLinear(numbers(48, 64, seed=1), None, kernel)
    x = numbers(30, 64, seed=3)
    good = layer(x), layer.gated(x, gates)
    x[17, 5] = spoiled
    for got, before in zip((layer(x), layer.gated(x, gates)), good, strict=True):
        assert not got[17].isfinite().all()
        assert torch.equal(got[:17], before[:17])
        assert torch.equal(got[18:], before[18:])


@needs_dot
def test_swish_far_from_zero(kernel: Products) -> None:
    layer = BlockedLinear(torch.eye(32).bfloat16(), None, kernel)
    x = torch.tensor([-300.0, -90.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 90.0] * 4).bfloat16()[None]
    assert close(layer.activated(x, SWISH), torch.nn.functional.silu(x.double()))


@needs_dot
def test_the_weight_is_kept_once_and_can_be_read(kernel: Products) -> None:
    weight = numbers(48, 64)
    layer = BlockedLinear(weight, None, kernel)
    assert layer.nbytes == weight.nbytes
    assert torch.equal(layer.pieces.transpose(1, 2).reshape(48, 64), weight)


@needs_dot
def test_the_kernel_is_kept_on_disk(tmp_path: Path) -> None:
    assert "compiled in" in Products(tmp_path).name
    again = Products(tmp_path)
    assert again.name.endswith("kernels from the cache)")
    assert close(
        BlockedLinear(numbers(16, 32), None, again)(numbers(3, 32)), numbers(3, 32).double() @ numbers(16, 32).double().t()
    )


@pytest.mark.parametrize(("num_out", "num_in"), [(16, 32), (960, 576), (49152, 576), (160, 64)])
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_a_plan_covers_all_rows_and_blocks_once(num_out: int, num_in: int, num_threads: int) -> None:
    for rows in (*ROWS, 2048):
        plan = blocked._plan(rows, num_out, num_in, num_threads)
        tiles = [list(plan.tiles[at : at + products.TILE_WORDS]) for at in range(0, len(plan.tiles), products.TILE_WORDS)]
        seen: set[tuple[int, int]] = set()
        for number in range(plan.words[0]):
            first, count, *blocks = plan.items[number * products.ITEM_WORDS : (number + 1) * products.ITEM_WORDS]
            own = tiles[first : first + count]
            packed = 0
            for row, held, size, at in own:
                assert held <= products.SIZES[size]
                assert at == packed
                packed += products.SIZES[size] * num_in * 2
                pieces = {(r, block) for r in range(row, row + held, max(1, held - 1)) for block in range(*blocks)}
                assert not pieces & seen
                seen |= pieces
            assert products.PACKED + packed <= plan.scratch_bytes
            assert blocks[0] < blocks[1]
        assert [row for row, *_ in tiles] == [sum(held for _, held, *_ in tiles[:place]) for place in range(len(tiles))]
        assert sum(held for _, held, *_ in tiles) == rows
        assert {block for _, block in seen} == set(range(num_out // products.BLOCK))


def test_weights_that_are_not_for_it_are_packed_by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocked.blocked(numbers(40, 64), None) is None
    assert blocked.blocked(numbers(48, 48), None) is None
    assert blocked.blocked(numbers(48, 64).float(), None) is None
    assert isinstance(linear.pack(numbers(48, 64), None, Report(own_products=False)), PackedLinear)
    monkeypatch.setattr(blocked, "host_products", lambda: None)
    assert isinstance(linear.pack(numbers(48, 64), None, Report()), PackedLinear)


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("dot", [True, False])
def test_processors_that_do_better_with_onednn(monkeypatch: pytest.MonkeyPatch, tiles: bool, dot: bool) -> None:
    """With tiles (AMX) oneDNN multiplies, but for logits, which it would round."""
    base = cpu.host()
    monkeypatch.setattr(cpu, "host", lambda: dataclasses.replace(base, has_tiles=tiles, has_bf16_dot=dot and base.has_bf16_dot))
    for cached in (blocked.host_products, blocked.beats_onednn):
        cached.cache_clear()
    try:
        assert (blocked.host_products() is not None) == (dot and base.has_bf16_dot)
        ours = linear.pack(numbers(48, 64), None, Report())
        assert isinstance(ours, BlockedLinear) == (dot and base.has_bf16_dot and not tiles)
    finally:
        for cached in (blocked.host_products, blocked.beats_onednn):
            cached.cache_clear()
