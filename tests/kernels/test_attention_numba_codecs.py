"""The numba backend over packed storage: the bytes are the reference's, and so are the results, up to rounding.

In float32 rows are expanded as the reference expands them: 2e-5 as for whole rows. In bf16 and fp16, on processors that multiply
bytes, queries and weights become numbers of 15 bits for each row and tile, which is finer than the rounding of the result.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

from support.formats import formats
from treadle.contracts import KVFormat
from treadle.plan import Work
from treadle_plugins.attention.numba_backend.backend import NumbaAttention
from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec, LayerAttention
from treadle_plugins.attention.torch_backend import TorchAttention
from treadle_plugins.execute.torch_executor.packing import Limits, pack

LAYERS, HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 3, 2, 64, 32, 60
SHAPES = [(0, 1), (0, 31), (0, 33), (7, 1), (64, 2), (20, 40), (300, 1), (250, 30)]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-7, "float16": 2**-10}


FORMATS = formats((LAYERS, HEADS, DIM), fine=16, coarse=32)
BY_DEFAULT = {
    "bfloat16": {
        "int8",
        "int4 groups",
        "int4 rotated",
        "k8v4",
        "keys only",
        "static, asymmetric",
        "balanced",
        "whole heads",
        "whole layer",
    },
    "float32": {"int8", "int4 groups", "static values, asymmetric", "whole layer"},
    "float16": {"k4v8"},
}
"""Each needs kernels of its own, which take 4 s to compile. The other pairs run with --slow."""


def formats_and_precisions() -> list[Any]:
    return [
        pytest.param(form, dtype, id=f"{dtype}-{name}", marks=[] if name in by_default else [pytest.mark.slow])
        for dtype, by_default in BY_DEFAULT.items()
        for name, form in FORMATS.items()
    ]


def sizes() -> list[Any]:
    by_default = {("bfloat16", 8, 16), ("bfloat16", 2, 48), ("bfloat16", 4, 128), ("float32", 4, 80)}
    cases = itertools.product(("bfloat16", "float32"), (8, 4, 2), (16, 48, 80, 128))
    return [pytest.param(*case, marks=[] if case in by_default else [pytest.mark.slow]) for case in cases]


def spec_of(form: KVFormat, dtype: str) -> AttentionSpec:
    return AttentionSpec("cpu", dtype, form, BLOCK_SIZE, LAYERS, num_heads=6, num_kv_heads=HEADS, head_dim=DIM)


def run(backend: AttentionBackend, spec: AttentionSpec, how: LayerAttention) -> torch.Tensor:
    """A history, then a step, over a poisoned pool with scattered tables; all layers' results of both."""
    generator = torch.Generator().manual_seed(3)
    free = list(range(NUM_BLOCKS))
    random.Random(0).shuffle(free)  # noqa: S311  # only has to look scattered
    tables = [tuple(free.pop() for _ in range(-(-(start + count) // spec.block_size))) for start, count in SHAPES]
    limits = Limits(vocab_size=10, max_length=1 << 20, num_blocks=NUM_BLOCKS, block_size=spec.block_size)
    backend.allocate(NUM_BLOCKS)
    backend.poison()
    results = []
    for spans in ([(0, max(1, start)) for start, _ in SHAPES], SHAPES):
        works = [Work("r", start, (1,) * count, blocks, None) for (start, count), blocks in zip(spans, tables, strict=True)]
        batch = pack(works, [], limits, torch.device("cpu"))
        backend.prepare(batch)
        for layer in range(spec.num_layers):
            heads = spec.num_heads + 2 * spec.num_kv_heads
            rows = torch.randn(batch.num_tokens, heads, spec.head_dim, generator=generator)
            rows[0, -1] = 0.0  # nothing to scale
            rows[1, :, 3] *= 30.0  # an outlier
            q, k, v = rows.to(spec.torch_dtype).split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
            backend.write(layer, k, v, batch)
            results.append(backend.attend(layer, q, batch, how))
    return torch.cat(results)


def assert_as_the_reference(spec: AttentionSpec, how: LayerAttention) -> None:
    assert NumbaAttention.supports(spec) is None
    reference, backend = TorchAttention(spec), NumbaAttention(spec)
    right, got = run(reference, spec, how), run(backend, spec, how)
    for one, two in zip(reference.tensors(), backend.tensors(), strict=True):
        assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))
    assert sum(tensor[0].numel() * tensor.itemsize for tensor in backend.tensors()) == backend.block_bytes()
    assert got.dtype == right.dtype
    assert (got.double() - right.double()).abs().max() <= TOLERANCE[spec.dtype] * right.double().abs().max()


@pytest.mark.parametrize(("form", "dtype"), formats_and_precisions())
def test_bytes_and_results(form: KVFormat, dtype: str) -> None:
    assert_as_the_reference(spec_of(form, dtype), LayerAttention(0.125))


@pytest.mark.parametrize("name", ["int8", "int4 groups"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ways_to_attend(name: str, dtype: str) -> None:
    how = LayerAttention(0.25, window=100, soft_cap=3.0, alibi_slopes=tuple(2.0**-n for n in range(6)))
    assert_as_the_reference(spec_of(FORMATS[name], dtype), how)


@pytest.mark.parametrize(("dtype", "bits", "head_dim"), sizes())
def test_head_sizes(dtype: str, bits: int, head_dim: int) -> None:
    form = KVFormat(bits, bits, key_symmetric=bits == 8, value_symmetric=bits == 8)
    spec = dataclasses.replace(spec_of(form, dtype), head_dim=head_dim, num_layers=1)
    assert_as_the_reference(spec, LayerAttention(head_dim**-0.5))


@pytest.mark.parametrize("block_size", [16, 64, 100])
def test_block_sizes(block_size: int) -> None:
    form = KVFormat(8, 4, value_group=32, value_symmetric=False)
    assert_as_the_reference(
        dataclasses.replace(spec_of(form, "bfloat16"), block_size=block_size, num_layers=1), LayerAttention(0.125)
    )


def test_rows_that_are_no_numbers_spoil_their_own_sequence_only() -> None:
    spec = dataclasses.replace(spec_of(FORMATS["int8"], "bfloat16"), num_layers=1)
    limits = Limits(vocab_size=10, max_length=1 << 20, num_blocks=NUM_BLOCKS, block_size=spec.block_size)
    works = [Work("a", 0, (1,) * 70, (5, 3, 4), None), Work("b", 0, (1,) * 35, (9, 8), None)]
    batch = pack(works, [], limits, torch.device("cpu"))
    backend = NumbaAttention(spec)
    backend.allocate(NUM_BLOCKS)
    torch.manual_seed(0)
    q, k, v = (torch.randn(105, heads, DIM).bfloat16() for heads in (6, HEADS, HEADS))
    results = []
    for spoiled in (None, float("nan"), float("inf")):
        if spoiled is not None:
            k[60], v[60] = spoiled, spoiled
        backend.prepare(batch)
        backend.write(0, k, v, batch)
        results.append(backend.attend(0, q, batch, LayerAttention(0.125)))
    for spoiled_result in results[1:]:
        assert torch.equal(spoiled_result[:60], results[0][:60])
        assert not torch.isfinite(spoiled_result[60:70]).any()
        assert torch.equal(spoiled_result[70:], results[0][70:])


def test_what_it_cannot_read() -> None:
    spec = spec_of(KVFormat(8, 8, key_group=8), "bfloat16")
    assert NumbaAttention.supports(spec) == "keys: groups of 8 are no multiple of 16"
    assert NumbaAttention.supports(spec_of(KVFormat(3, 8), "bfloat16")) == "keys: 3 bits are none of 8, 4, 2"
