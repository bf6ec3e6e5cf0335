"""Attention over quantized storage: equal to attention over dequantized rows, whatever lies in unused slots."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from support.formats import formats, table
from treadle.contracts import KeyBalance, KVFormat, ModelInfo, StaticChannels
from treadle.plan import Work
from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.layout import unreadable
from treadle_plugins.attention.reference import requantized_keys, requantized_values
from treadle_plugins.attention.spec import AttentionSpec, LayerAttention
from treadle_plugins.attention.torch_backend import TorchAttention
from treadle_plugins.execute.torch_executor.packing import Limits, pack

LAYERS, HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 3, 2, 32, 16, 48


SHAPE = LAYERS, HEADS, DIM
FORMATS = formats(SHAPE, fine=8, coarse=16)
SHAPES = [(0, 1), (0, 16), (0, 33), (7, 1), (31, 2), (20, 40)]
each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())


def spec_of(form: KVFormat, dtype: str = "float32") -> AttentionSpec:
    return AttentionSpec("cpu", dtype, form, BLOCK_SIZE, LAYERS, num_heads=6, num_kv_heads=HEADS, head_dim=DIM)


def packed(shapes: list[tuple[int, int]], tables: list[tuple[int, ...]]) -> PackedBatch:
    works = [Work("r", start, (1,) * count, blocks, None) for (start, count), blocks in zip(shapes, tables, strict=True)]
    return pack(works, [], Limits(10, 1024, NUM_BLOCKS, BLOCK_SIZE), torch.device("cpu"))


def scattered(shapes: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    free = list(range(NUM_BLOCKS))
    random.Random(1).shuffle(free)  # noqa: S311  # only has to look scattered
    return [tuple(free.pop() for _ in range(-(-(start + count) // BLOCK_SIZE))) for start, count in shapes]


def random_rows(num_tokens: int, seed: int, dtype: str = "float32") -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, with an outlier channel, and values."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(num_tokens, HEADS, DIM, generator=generator) for _ in range(2))
    keys[:, 0, 3] += 6.0
    return keys.to(getattr(torch, dtype)), values.to(getattr(torch, dtype))


def attention_by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, how: LayerAttention) -> torch.Tensor:
    """[queries, heads, head_dim] over [keys, kv_heads, head_dim] in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * how.scale
    if how.soft_cap is not None:
        scores = how.soft_cap * torch.tanh(scores / how.soft_cap)
    distance = torch.arange(start, start + len(q))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) & (distance < (how.window or 10**9))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)


@each_format
@pytest.mark.parametrize(
    "how",
    [LayerAttention(0.18), LayerAttention(0.18, window=20), LayerAttention(0.3, soft_cap=4.0)],
    ids=["plain", "window", "cap"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 3e-2)])
def test_equal_to_attention_over_dequantized_rows(form: KVFormat, how: LayerAttention, dtype: str, tolerance: float) -> None:
    if how.soft_cap is not None and form.key_balance is not None and form.key_balance.centers is not None:
        pytest.skip("refused: scores that are capped must be whole")
    backend = TorchAttention(spec_of(form, dtype))
    backend.allocate(NUM_BLOCKS)
    backend.poison()
    tables = scattered(SHAPES)
    history, batch = packed([(0, max(1, start)) for start, _ in SHAPES], tables), packed(SHAPES, tables)
    for layer in range(LAYERS):
        old, new = random_rows(history.num_tokens, layer, dtype), random_rows(batch.num_tokens, 10 + layer, dtype)
        queries = torch.randn(batch.num_tokens, 6, DIM, generator=torch.Generator().manual_seed(99)).to(old[0].dtype)
        backend.prepare(history)
        backend.write(layer, *old, history)
        backend.prepare(batch)
        backend.write(layer, *new, batch)
        got = backend.attend(layer, queries, batch, how)
        assert got.dtype == queries.dtype
        for n, (start, _) in enumerate(SHAPES):
            before = slice(history.bounds[n], history.bounds[n] + start)
            now = slice(batch.bounds[n], batch.bounds[n + 1])
            k = requantized_keys(form, layer, torch.cat([old[0][before], new[0][now]]))
            v = requantized_values(form, layer, torch.cat([old[1][before], new[1][now]]))
            exact = attention_by_hand(queries[now], k, v, start, how)
            assert (got[now].double() - exact).abs().max() < tolerance


@each_format
def test_stored_bytes_do_not_depend_on_chunks_and_neighbours(form: KVFormat) -> None:
    rows = [random_rows(50, layer) for layer in range(LAYERS)]
    table_of_it: tuple[int, ...] = (5, 2, 9, 7)
    beside: tuple[int, ...] = (1, 3)

    def stored(chunks: list[int], with_neighbour: bool) -> list[torch.Tensor]:
        backend = TorchAttention(spec_of(form))
        backend.allocate(12)
        for tensor in backend.tensors():
            tensor.zero_()
        start = 0
        for count in chunks:
            shapes, tables = [(start, count)], [table_of_it]
            others = random_rows(20 if with_neighbour else 0, 77)
            if with_neighbour:
                shapes, tables = [(0, 20), *shapes], [beside, *tables]
            batch = packed(shapes, tables)
            for layer, (keys, values) in enumerate(rows):
                step = slice(start, start + count)
                backend.write(layer, torch.cat([others[0], keys[step]]), torch.cat([others[1], values[step]]), batch)
            start += count
        return [tensor[list(table_of_it)] for tensor in backend.tensors()]

    at_once = stored([50], False)
    for chunks, with_neighbour in (([1] * 50, False), ([16, 16, 18], True), ([7, 40, 3], True), ([50], True)):
        for one, other in zip(at_once, stored(chunks, with_neighbour), strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@each_format
def test_a_copied_block_is_all_of_it(form: KVFormat) -> None:
    backend = TorchAttention(spec_of(form))
    backend.allocate(8)
    backend.poison()
    here, there = packed([(0, 16)], [(3,)]), packed([(15, 1)], [(6,)])
    how, queries = LayerAttention(0.2), torch.randn(16, 6, DIM)
    for layer in range(LAYERS):
        backend.write(layer, *random_rows(16, layer), here)
    for tensor in backend.tensors():
        tensor[6] = tensor[3]
    for layer in range(LAYERS):
        backend.prepare(here)
        original = backend.attend(layer, queries, here, how)[15:]
        backend.prepare(there)
        assert torch.allclose(backend.attend(layer, queries[15:], there, how), original, atol=1e-6)


@each_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_counted(form: KVFormat, dtype: str) -> None:
    backend = TorchAttention(spec_of(form, dtype))
    backend.allocate(5)
    tensors = backend.tensors()
    assert all(len(tensor) == 5 for tensor in tensors)
    assert sum(tensor[0].numel() * tensor.itemsize for tensor in tensors) == backend.block_bytes()
    info = ModelInfo("m", LAYERS, HEADS, DIM, 10, 100, dtype_bytes=getattr(torch, dtype).itemsize)
    assert backend.block_bytes() == form.bytes_per_token(info) * BLOCK_SIZE


@each_format
def test_rows_that_are_no_numbers_spoil_their_own_sequence_only(form: KVFormat) -> None:
    shapes, tables = [(0, 5), (0, 30)], [(1,), (2, 4)]
    batch, how = packed(shapes, tables), LayerAttention(0.2)
    keys, values = random_rows(35, 0)
    queries = torch.randn(35, 6, DIM)
    results = []
    for bad in (None, float("nan"), float("inf")):
        backend = TorchAttention(spec_of(form))
        backend.allocate(6)
        backend.poison()
        if bad is not None:
            keys[2, 1, 4] = values[3, 0, 1] = bad
        backend.prepare(batch)
        backend.write(0, keys, values, batch)
        results.append(backend.attend(0, queries, batch, how)[5:])
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key_bits": 3}, "keys: 3 bits are none of 8, 4, 2"),
        ({"value_bits": 16}, "values: 16 bits"),
        ({"key_bits": 4, "key_group": 24}, "keys: groups of 24 do not divide the head size 32"),
        ({"key_bits": 4, "rotation": 12}, "rotation of 12 is no power of two"),
        ({"key_bits": 4, "rotation": 64}, "rotation of 64 is no power of two that divides the head size 32"),
        ({"key_bits": 4, "scheme": "lattice"}, "KV scheme 'lattice' is not 'linear'"),
        ({"key_bits": 4, "history_dependent": True}, "depends on tokens stored before"),
        ({"key_bits": 8, "key_channels": StaticChannels(table(SHAPE, 1.0)[:2])}, "keys: static scales are not"),
        (
            {"key_bits": 8, "key_balance": KeyBalance(table(SHAPE, 1.0), ((),))},
            "balance of keys is not [3 layers][2 heads][32 channels]",
        ),
    ],
)
def test_what_it_cannot_read(changes: dict[str, Any], reason: str) -> None:
    assert reason in (TorchAttention.supports(spec_of(KVFormat(**changes))) or "")


def test_centers_and_capped_scores_are_refused() -> None:
    form = KVFormat(4, 4, key_balance=KeyBalance(table(SHAPE, 1.0), table(SHAPE, 0.0)))
    spec = dataclasses.replace(spec_of(form), soft_cap=30.0)
    assert "caps its scores" in (unreadable(spec) or "")
    assert unreadable(dataclasses.replace(spec, kv_format=KVFormat(4, 4, key_balance=KeyBalance(table(SHAPE, 1.0))))) is None
