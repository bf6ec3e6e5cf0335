"""The numba backend against the torch backend, which is the truth, on random data.

Tolerances. In float32 both differ from float64 by the rounding of sums of up to a few thousand terms of size 1: 2e-5 of the
largest result holds with room. In bf16 and fp16 the result is rounded to 8 and 11 bits, and bf16 probabilities to 8 bits before
they weigh, which averages out: two units in the last place of the largest result.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from treadle.contracts import KVFormat
from treadle.plan import Work
from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.numba_backend.backend import NumbaAttention
from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec, LayerAttention
from treadle_plugins.attention.torch_backend import TorchAttention
from treadle_plugins.execute.torch_executor.packing import Limits, pack

TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-7, "float16": 2**-10}
SPEC = AttentionSpec(
    device="cpu",
    dtype="bfloat16",
    kv_format=KVFormat(),
    block_size=16,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
)
Shapes = Sequence[tuple[int, int]]  # (tokens before this step, tokens of this step) of each sequence


def mixed_shapes(block_size: int) -> Shapes:
    """Decode, prefill, chunks and drafted tokens together, with contexts around the borders of blocks, tiles and segments."""
    b = block_size
    return [
        (0, 1),
        (0, b - 1),
        (0, b),
        (0, 2 * b + 1),
        (b - 1, 1),
        (b, 1),
        (2 * b - 1, 2),
        (63, 1),
        (64, 1),
        (255, 1),
        (256, 1),
        (200, 120),
        (700, 5),
        (1, 40),
    ]


class Pool:
    """A poisoned pool with scattered tables, filled by a history and then a step of random tokens."""

    def __init__(self, spec: AttentionSpec, shapes: Shapes, seed: int = 0) -> None:
        self.spec, self.shapes = spec, shapes
        self.needed = [-(-(start + count) // spec.block_size) for start, count in shapes]
        self.num_blocks = sum(self.needed) + 3
        free = list(range(self.num_blocks))
        random.Random(seed).shuffle(free)  # noqa: S311  # only has to look scattered
        self.tables = [tuple(free.pop() for _ in range(count)) for count in self.needed]
        generator = torch.Generator().manual_seed(seed)
        total = sum(start + count for start, count in shapes)
        rows = (spec.num_layers, total, 2 * spec.num_kv_heads + spec.num_heads, spec.head_dim)
        self.tokens = torch.randn(rows, generator=generator).to(spec.torch_dtype)

    def packed(self, shapes: Shapes) -> PackedBatch:
        limits = Limits(vocab_size=10, max_length=1 << 20, num_blocks=self.num_blocks, block_size=self.spec.block_size)
        works = [Work("r", start, (1,) * count, table, None) for (start, count), table in zip(shapes, self.tables, strict=True)]
        return pack(works, [], limits, torch.device("cpu"))

    def rows_of(self, layer: int, spans: Shapes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of tokens `start` to `start + count` of each sequence, as parts of one fused tensor."""
        lengths = [start + count for start, count in self.shapes]
        firsts = [sum(lengths[:n]) for n in range(len(lengths))]
        picked = [torch.arange(first + start, first + start + count) for first, (start, count) in zip(firsts, spans, strict=True)]
        fused = self.tokens[layer, torch.cat(picked)]
        q, k, v = fused.split([self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads], dim=1)
        return q, k, v

    def step(self, backend: AttentionBackend, spans: Shapes, how: LayerAttention) -> torch.Tensor:
        """[layers, tokens, heads, head_dim] of one step."""
        batch, results = self.packed(spans), []
        backend.prepare(batch)
        for layer in range(self.spec.num_layers):
            q, k, v = self.rows_of(layer, spans)
            backend.write(layer, k, v, batch)
            results.append(backend.attend(layer, q, batch, how))
        return torch.stack(results)

    def run(self, backend: AttentionBackend, how: LayerAttention) -> torch.Tensor:
        """The history as one step, then the step itself."""
        backend.allocate(self.num_blocks)
        backend.poison()
        if any(start for start, _ in self.shapes):
            past = [(0, max(1, start)) for start, _ in self.shapes]
            self.step(backend, past, how)
        return self.step(backend, self.shapes, how)


def assert_close(got: torch.Tensor, right: torch.Tensor, tolerance: float) -> None:
    assert got.dtype == right.dtype
    assert torch.isfinite(got.float()).all()
    assert (got.double() - right.double()).abs().max() <= tolerance * right.double().abs().max()


def check(spec: AttentionSpec, how: LayerAttention, shapes: Shapes | None = None) -> None:
    pool = Pool(spec, shapes or mixed_shapes(spec.block_size))
    assert NumbaAttention.supports(spec) is None
    assert_close(pool.run(NumbaAttention(spec), how), pool.run(TorchAttention(spec), how), TOLERANCE[spec.dtype])


def slopes(num_heads: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-1 - n % 8) for n in range(num_heads))


def sizes() -> list[Any]:
    """Kernels of their own each, which take 4 s to compile, so not all by default."""
    by_default = {"bfloat16": {16, 64, 80, 96, 128}, "float32": {16, 64, 128}, "float16": {64}}
    cases = itertools.product(by_default, (16, 64, 80, 96, 128))
    return [pytest.param(*case, marks=[] if case[1] in by_default[case[0]] else [pytest.mark.slow]) for case in cases]


@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize(("dtype", "head_dim"), sizes())
def test_shapes(dtype: str, head_dim: int, group: int, block_size: int) -> None:
    spec = dataclasses.replace(
        SPEC, dtype=dtype, head_dim=head_dim, num_kv_heads=2, num_heads=2 * group, block_size=block_size, num_layers=1
    )
    check(spec, LayerAttention(head_dim**-0.5))


HOWS = {
    "scale": LayerAttention(1.0),
    "window of 1": LayerAttention(0.125, window=1),
    "window within a tile": LayerAttention(0.125, window=20),
    "window of a tile": LayerAttention(0.125, window=64),
    "window over segments": LayerAttention(0.125, window=300),
    "soft cap": LayerAttention(0.125, soft_cap=2.0),
    "alibi": LayerAttention(0.125, alibi_slopes=slopes(6)),
    "all": LayerAttention(0.25, window=100, soft_cap=1.5, alibi_slopes=slopes(6)),
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS.keys())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ways_to_attend(dtype: str, how: LayerAttention) -> None:
    check(dataclasses.replace(SPEC, dtype=dtype), how)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_contexts(dtype: str) -> None:
    shapes = [(5000, 1), (2047, 1), (1023, 2), (0, 1500), (3000, 200)]
    spec = dataclasses.replace(SPEC, dtype=dtype, block_size=64, num_layers=1)
    check(spec, LayerAttention(0.125), shapes)
    check(spec, LayerAttention(0.125, window=700), shapes)
    check(spec, LayerAttention(0.125), [(9000, 1)])


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (71, 1), (100, 2), (12, 12)])
def test_many_or_few_heads(num_heads: int, num_kv_heads: int) -> None:
    spec = dataclasses.replace(SPEC, num_heads=num_heads, num_kv_heads=num_kv_heads, num_layers=1)
    check(spec, LayerAttention(0.125, alibi_slopes=slopes(num_heads)), [(0, 30), (300, 1), (10, 5)])


def test_block_sizes_that_divide_no_tile() -> None:
    check(dataclasses.replace(SPEC, block_size=48, num_layers=1), LayerAttention(0.125))
    check(dataclasses.replace(SPEC, block_size=100, num_layers=1), LayerAttention(0.125))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_results_do_not_depend_on_batch_chunks_or_threads(dtype: str) -> None:
    """Bit for bit: a query's result follows from its own row and the stored KV alone."""
    spec = dataclasses.replace(SPEC, dtype=dtype, num_layers=1)
    how, lengths = LayerAttention(0.125, window=900), [1100, 70, 300]
    whole = Pool(spec, [(0, length) for length in lengths])
    backend = NumbaAttention(spec)
    at_once = whole.run(backend, how)[0].split(lengths)
    backend.poison()
    before = torch.get_num_threads()
    try:
        for start, count, threads in ((0, 17, 1), (17, 47, before), (64, 5, 1), (69, 1, before), (70, 1, 1), (71, 200, before)):
            torch.set_num_threads(threads)
            spans = [(min(start, length - 1), max(1, min(count, length - start))) for length in lengths]
            pieces = whole.step(backend, spans, how)[0].split([count for _, count in spans])
            for piece, (first, number), right in zip(pieces, spans, at_once, strict=True):
                assert torch.equal(piece, right[first : first + number])
        alone = Pool(spec, [(0, length) for length in lengths])
        for position in (271, 599, 1099):
            torch.set_num_threads(before)
            whole.step(backend, [(271, 829), (0, 1), (0, 1)], how)
            piece = alone.step(backend, [(position, 1), (0, 1), (0, 1)], how)[0][:1]
            assert torch.equal(piece[0], at_once[0][position])
    finally:
        torch.set_num_threads(before)


def test_layers_that_attend_differently() -> None:
    """One layer needs more room for parts than the one before it; both come again in every step."""
    spec = dataclasses.replace(SPEC, num_layers=2, dtype="float32")
    pool, hows = Pool(spec, [(3000, 1), (40, 1)]), [LayerAttention(0.125, window=16), LayerAttention(0.125)]
    results = []
    for kind in (TorchAttention, NumbaAttention):
        backend: AttentionBackend = kind(spec)
        pool.run(backend, hows[0])
        batch = pool.packed(pool.shapes)
        backend.prepare(batch)
        queries = [pool.rows_of(layer, pool.shapes)[0] for layer in (0, 1)]
        results.append(torch.stack([backend.attend(layer, queries[layer], batch, hows[layer]) for layer in (0, 1, 0, 1)]))
    assert_close(results[1], results[0], TOLERANCE["float32"])


def test_a_diverged_sequence_spoils_no_other() -> None:
    spec = dataclasses.replace(SPEC, num_layers=1, dtype="float32")
    pool = Pool(spec, [(100, 1), (90, 1), (0, 30)])
    right = pool.run(NumbaAttention(spec), LayerAttention(0.125))
    pool.tokens[:, :101] = float("nan")
    got = pool.run(NumbaAttention(spec), LayerAttention(0.125))
    assert torch.isnan(got[:, 0]).all()
    assert torch.equal(got[:, 1:], right[:, 1:])


def test_rows_may_lie_anywhere() -> None:
    """Queries, keys and values as transformers hands them over: heads before tokens."""
    spec = dataclasses.replace(SPEC, num_layers=1)
    pool, how = Pool(spec, [(0, 50), (0, 3)]), LayerAttention(0.125)
    right = pool.run(NumbaAttention(spec), how)
    backend = NumbaAttention(spec)
    backend.allocate(pool.num_blocks)
    batch = pool.packed(pool.shapes)
    q, k, v = (rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in pool.rows_of(0, pool.shapes))
    backend.prepare(batch)
    backend.write(0, k, v.transpose(1, 2).contiguous().transpose(1, 2), batch)
    assert torch.equal(backend.attend(0, q, batch, how), right[0])


def test_blocks_are_stored_as_the_reference_stores_them() -> None:
    pool = Pool(SPEC, [(0, 50), (0, 3)])
    stored = []
    for kind in (TorchAttention, NumbaAttention):
        backend: AttentionBackend = kind(SPEC)
        pool.run(backend, LayerAttention(0.125))
        stored.append([tensor.nan_to_num(7.0) for tensor in backend.tensors()])
        assert sum(tensor[0].numel() * tensor.itemsize for tensor in backend.tensors()) == backend.block_bytes()
    assert all(torch.equal(one, two) for one, two in zip(*stored, strict=True))
