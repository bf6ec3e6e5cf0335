"""Rows to codes and back: error bounds, exact properties, and rows that are no numbers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from treadle_plugins.attention import codecs  # noqa: E402  # after the skip
from treadle_plugins.attention.codecs import FITTED_BITS, Channels, Codec, Turn, hadamard  # noqa: E402

CODECS = [Codec(bits, 32, group, symmetric) for bits in (8, 4, 2) for group in (32, 16, 8) for symmetric in (True, False)]
some_codec = st.sampled_from(CODECS)
magnitudes = st.sampled_from([1e-6, 1e-3, 1.0, 100.0, 1e3])


def rows_of(seed: int, magnitude: float, offset: float = 0.0, num_rows: int = 5) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, 32, generator=generator) + offset) * magnitude


def back_and_forth(codec: Codec, rows: Any) -> Any:
    return codec.decode(codec.encode(rows))


def squared_error(codec: Codec, rows: Any) -> Any:
    """[rows]."""
    return (back_and_forth(codec, rows) - rows).square().sum(-1)


def is_fitted(codec: Codec) -> bool:
    return codec.symmetric and codec.bits <= FITTED_BITS


def largest_step(codec: Codec, rows: Any) -> Any:
    """What lies between two codes of each group, as real numbers would have it: [rows, groups, 1]."""
    grouped = rows.unflatten(-1, (codec.num_groups, codec.group))
    span = grouped.abs().amax(-1) / codec.middle if codec.symmetric else (grouped.amax(-1) - grouped.amin(-1)) / codec.top
    return span[..., None]


@given(some_codec, st.integers(0, 2**32), magnitudes, st.sampled_from([0.0, 3.0, -50.0]))
def test_error_bound(codec: Codec, seed: int, magnitude: float, offset: float) -> None:
    rows = rows_of(seed, magnitude, offset)
    step = largest_step(codec, rows)
    grouped = rows.unflatten(-1, (codec.num_groups, codec.group))
    error = (back_and_forth(codec, rows) - rows).abs().unflatten(-1, (codec.num_groups, codec.group))
    # half a step; up to a whole one at the end opposite to a symmetric extreme; and what half precision costs scales and minima
    near_end = codec.symmetric & (grouped.abs() > (codec.middle - 1) * step)
    most = torch.where(near_end, 1.0, 0.5) * step + grouped.abs().amax(-1, keepdim=True) * 2**-10 + codec.top * 2.0**-24
    if is_fitted(codec):  # single elements may be farther off, all of a group are not
        assert (error.square().sum(-1) <= most.square().sum(-1)).all()
    else:
        assert (error <= most).all()


@given(some_codec, st.integers(0, 2**32), magnitudes)
def test_a_fitted_scale_is_no_worse_than_that_of_the_extreme(codec: Codec, seed: int, magnitude: float) -> None:
    rows = rows_of(seed, magnitude)
    fitted = squared_error(codec, rows)
    with mock.patch.object(codecs, "FITTED_BITS", 0):
        unfitted = squared_error(codec, rows)
    halves = rows.square().sum(-1) * 2**-11  # the fitted scale is rounded to half precision
    assert (fitted <= unfitted * (1 + 2**-6) + halves * 2**-9 + 1e-12).all()
    assert not is_fitted(codec) or magnitude < 1e-3 or fitted.sum() < unfitted.sum()


@given(some_codec, st.integers(0, 2**32), magnitudes)
def test_a_row_is_stored_alike_whatever_stands_beside_it(codec: Codec, seed: int, magnitude: float) -> None:
    rows = hadamard(rows_of(seed, magnitude, num_rows=9), 32)
    together = codec.encode(rows)
    for start in range(9):
        alone = codec.encode(hadamard(rows_of(seed, magnitude, num_rows=9)[start : start + 1], 32))
        for part, whole in zip(alone, together, strict=True):
            assert (part is None) == (whole is None)
            assert part is None or (whole is not None and torch.equal(part[0], whole[start]))


@given(some_codec, st.integers(0, 2**32))
def test_what_was_quantized_stays(codec: Codec, seed: int) -> None:
    once = back_and_forth(codec, rows_of(seed, 1.0))
    step = largest_step(codec, once)
    difference = (back_and_forth(codec, once) - once).abs().unflatten(-1, (codec.num_groups, codec.group))
    assert (difference <= step * 0.51 + 2**-9).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_constant_rows(codec: Codec) -> None:
    for value in (0.0, 1.0, -3.0, 1e-30, 65504.0, 1e-7):
        row = torch.full((1, 32), value)
        error = (back_and_forth(codec, row) - row).abs().max()
        assert error <= abs(value) * 2**-10 + codec.middle * 2.0**-25, value


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_extreme_is_kept_and_all_codes_are_used(codec: Codec) -> None:
    row = torch.linspace(-1.0, 0.9, codec.group).repeat(32 // codec.group)[None]
    stored = codec.encode(row)
    codes = codec.unpack(stored.codes)
    assert codes.min() == 0
    assert codes.max() <= codec.top
    if codec.symmetric and not is_fitted(codec):
        assert codec.decode(stored).min() == -1.0


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_number_spoils_itself_only(codec: Codec, bad: float) -> None:
    rows = rows_of(3, 1.0)
    clean = back_and_forth(codec, rows)
    rows[2, 1] = bad
    got = back_and_forth(codec, rows)
    assert not got[2, 1].isfinite()
    kept = [0, 1, 3, 4]
    assert torch.equal(got[kept], clean[kept])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_finite_rows_stay_finite(codec: Codec) -> None:
    rows = torch.tensor([[1e38, -1e38] * 16, [3e38] * 32, [1e-44] * 32, [0.0, 1e38] * 16])
    assert back_and_forth(codec, rows).isfinite().all()


@given(some_codec, st.integers(0, 2**32))
def test_packing(codec: Codec, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, codec.top + 1, (3, 2, 32), generator=generator, dtype=torch.uint8)
    packed = codec.pack(codes)
    assert packed.shape == (3, 2, codec.row_bytes)
    assert torch.equal(codec.unpack(packed), codes)


def test_four_bits_lie_as_documented() -> None:
    codes = torch.arange(16, dtype=torch.uint8)[None]
    packed = Codec(4, 16, 16).pack(codes)
    assert packed[0].tolist() == [low | (low + 8) << 4 for low in range(8)]


@given(st.sampled_from([1, 2, 8, 32]), st.integers(0, 2**32))
def test_a_rotation_keeps_products_and_undoes_itself(size: int, seed: int) -> None:
    rows = rows_of(seed, 1.0)
    turned = hadamard(rows, size)
    assert torch.allclose(turned @ turned.T, rows @ rows.T, atol=1e-4)
    assert torch.allclose(hadamard(turned, size), rows, atol=1e-5)
    block = torch.zeros(32)
    block[:size] = 1.0
    spread = hadamard(block, size)
    assert spread[0].item() == pytest.approx(size**0.5)
    assert spread[1:].abs().max() < 1e-6


def test_a_rotation_tames_an_outlier() -> None:
    rows = rows_of(0, 1.0, num_rows=200)
    rows[:, 5] = 60.0
    codec = Codec(4, 32, 32)
    plain = (back_and_forth(codec, rows) - rows)[:, 6:].square().mean()
    turned = hadamard(back_and_forth(codec, hadamard(rows, 32)), 32) - rows
    assert turned[:, 6:].square().mean() < plain / 2


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_channels(symmetric: bool) -> None:
    rows = rows_of(1, 1.0, num_rows=64).view(32, 2, 32) * torch.logspace(-2, 2, 32)
    codec = Codec(8, 32, 32, symmetric)
    low, high = rows.amin(0), rows.amax(0)
    channels = Channels(rows.abs().amax(0) / 127 if symmetric else (high - low) / 255, None if symmetric else low)
    stored = codec.encode_static(rows, channels)
    assert stored.scales is None
    assert stored.minima is None
    error = (codec.decode_static(stored, channels) - rows).abs()
    assert (error <= channels.scales * 0.5001 + rows.abs() * 1e-6).all()
    beyond = codec.decode_static(codec.encode_static(rows * 10, channels), channels)
    assert (beyond.abs() <= rows.abs().amax(0) * 1.02 + 1e-6).all()


def test_a_balance_leaves_scores_as_they_are() -> None:
    torch.manual_seed(0)
    factors, centers = torch.rand(2, 32) + 0.1, torch.randn(2, 32) * 5
    turn = Turn(16, factors, centers)
    keys, queries = torch.randn(7, 2, 32) * factors + centers, torch.randn(3, 2, 4, 32)
    exact = torch.einsum("qhgd,khd->hgqk", queries, keys).softmax(-1)
    got = torch.einsum("qhgd,khd->hgqk", turn.queries(queries), turn.rows(keys)).softmax(-1)
    assert torch.allclose(got, exact, atol=1e-5)
    assert torch.equal(Turn(None, None, None).rows(keys), keys)
