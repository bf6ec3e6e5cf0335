"""The backends against attention written out in float64, one query after another."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from treadle.contracts import KVFormat
from treadle.errors import ConfigError
from treadle.plan import Work
from treadle_plugins.attention.batch import PackedBatch, ragged_arange
from treadle_plugins.attention.numba_backend.backend import NumbaAttention
from treadle_plugins.attention.spec import AttentionBackendType, AttentionSpec, LayerAttention, choose
from treadle_plugins.attention.torch_backend import TorchAttention
from treadle_plugins.execute.torch_executor.packing import Limits, pack

BACKENDS: list[AttentionBackendType] = [TorchAttention, NumbaAttention]
BLOCK_SIZE = 16
NUM_BLOCKS = 64
SPEC = AttentionSpec(
    device="cpu",
    dtype="float32",
    kv_format=KVFormat(),
    block_size=BLOCK_SIZE,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
)
LIMITS = Limits(vocab_size=10, max_length=1024, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
# (tokens before this step, tokens of this step)
SHAPES = [(0, 1), (0, 15), (0, 16), (0, 33), (7, 1), (16, 1), (31, 2), (20, 40), (0, 300)]


def packed(shapes: list[tuple[int, int]], tables: list[tuple[int, ...]]) -> PackedBatch:
    works = [Work("r", start, (1,) * count, table, None) for (start, count), table in zip(shapes, tables, strict=True)]
    return pack(works, [], LIMITS, torch.device("cpu"))


def scattered_tables() -> list[tuple[int, ...]]:
    free = list(range(NUM_BLOCKS))
    random.Random(0).shuffle(free)  # noqa: S311  # only has to look scattered
    return [tuple(free.pop() for _ in range(-(-(start + count) // BLOCK_SIZE))) for start, count in SHAPES]


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, how: LayerAttention) -> torch.Tensor:
    """[queries, heads, head_dim] over keys and values [keys, kv_heads, head_dim] in float64."""
    out = torch.empty_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for index in range(len(q)):
        position = start + index
        first = 0 if how.window is None else max(0, position + 1 - how.window)
        for head in range(q.shape[1]):
            keys, values = (x[first : position + 1, head // group].double() for x in (k, v))
            scores = keys @ q[index, head].double() * how.scale
            if how.soft_cap is not None:
                scores = how.soft_cap * torch.tanh(scores / how.soft_cap)
            if how.alibi_slopes is not None:
                scores -= how.alibi_slopes[head] * torch.arange(position - first, -1, -1)
            out[index, head] = scores.softmax(0) @ values
    return out


def run(
    spec: AttentionSpec, how: LayerAttention, kind: AttentionBackendType = TorchAttention
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the backend gives for all SHAPES in one step over a poisoned pool, and what is right."""
    torch.manual_seed(0)
    backend = choose([kind], spec)
    backend.allocate(NUM_BLOCKS)
    backend.poison()
    tables = scattered_tables()
    history = packed([(0, max(1, start)) for start, _ in SHAPES], tables)
    batch = packed(SHAPES, tables)
    exact, got = [], []
    for layer in range(spec.num_layers):
        shape = (spec.num_kv_heads, spec.head_dim)
        old_k, old_v = (torch.randn(history.num_tokens, *shape, dtype=spec.torch_dtype) for _ in range(2))
        new_k, new_v = (torch.randn(batch.num_tokens, *shape, dtype=spec.torch_dtype) for _ in range(2))
        q = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim, dtype=spec.torch_dtype)
        backend.prepare(history)
        backend.write(layer, old_k, old_v, history)
        backend.prepare(batch)
        backend.write(layer, new_k, new_v, batch)
        got.append(backend.attend(layer, q, batch, how))
        for n, (start, _) in enumerate(SHAPES):
            old, new = slice(history.bounds[n], history.bounds[n] + start), slice(batch.bounds[n], batch.bounds[n + 1])
            k, v = torch.cat([old_k[old], new_k[new]]), torch.cat([old_v[old], new_v[new]])
            exact.append(by_hand(q[new], k, v, start, how))
    return torch.cat(got), torch.cat(exact)


SLOPES = tuple(2.0**-n for n in range(6))


@pytest.mark.parametrize(
    "how",
    [
        LayerAttention(0.25),
        LayerAttention(1.0),
        LayerAttention(0.25, window=1),
        LayerAttention(0.25, window=20),
        LayerAttention(0.25, soft_cap=2.0),
        LayerAttention(0.25, alibi_slopes=SLOPES),
        LayerAttention(0.5, window=20, soft_cap=1.5, alibi_slopes=SLOPES),
    ],
    ids=["plain", "scale", "window of 1", "window", "soft cap", "alibi", "all"],
)
@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-6), ("bfloat16", 2e-2), ("float16", 2e-3)])
def test_against_float64(how: LayerAttention, dtype: str, tolerance: float, kind: AttentionBackendType) -> None:
    got, exact = run(dataclasses.replace(SPEC, dtype=dtype), how, kind)
    assert got.dtype == getattr(torch, dtype)
    assert (got.double() - exact).abs().max() < tolerance


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "kind"),
    [(1, 1, 8, TorchAttention)]
    + [(*shape, kind) for shape in ((1, 1, 16), (4, 4, 80), (8, 1, 64), (9, 3, 64)) for kind in BACKENDS],
)
def test_head_shapes(num_heads: int, num_kv_heads: int, head_dim: int, kind: AttentionBackendType) -> None:
    spec = dataclasses.replace(SPEC, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    got, exact = run(spec, LayerAttention(head_dim**-0.5), kind)
    assert (got.double() - exact).abs().max() < 2e-6


def test_blocks_are_laid_out_head_before_token() -> None:
    backend = TorchAttention(SPEC)
    backend.allocate(4)
    batch = packed([(0, 18)], [(2, 1)])
    keys = torch.arange(18 * 2 * 16, dtype=torch.float32).view(18, 2, 16)
    backend.write(1, keys, -keys, batch)
    stored_keys, stored_values = backend.tensors()
    assert stored_keys.shape == (4, 2, 2, BLOCK_SIZE, 16)
    assert torch.equal(stored_keys[2, 1], keys[:16].transpose(0, 1))
    assert torch.equal(stored_keys[1, 1, :, :2], keys[16:].transpose(0, 1))
    assert torch.equal(stored_values[2, 1], -stored_keys[2, 1])
    assert sum(tensor[0].numel() * tensor.itemsize for tensor in backend.tensors()) == backend.block_bytes()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_format": KVFormat(key_bits=3, value_bits=8)}, "keys: 3 bits are none of 8, 4, 2"),
        ({"dtype": "float64"}, "precision 'float64'"),
        ({"num_heads": 5}, "5 query heads cannot share 2 KV heads"),
    ],
)
def test_what_it_cannot_do(changes: dict[str, Any], reason: str) -> None:
    spec = dataclasses.replace(SPEC, **changes)
    assert reason in (TorchAttention.supports(spec) or "")
    with pytest.raises(ConfigError, match="torch: "):
        choose([TorchAttention], spec)


def test_the_first_that_can_is_chosen() -> None:
    class Unable(TorchAttention):
        name = "unable"

        @classmethod
        def supports(cls, spec: AttentionSpec) -> str | None:
            return "it is off"

    assert TorchAttention.supports(SPEC) is None
    assert type(choose([Unable, TorchAttention], SPEC)) is TorchAttention
    with pytest.raises(ConfigError, match="unable: it is off"):
        choose([Unable], SPEC)


def test_ragged_arange() -> None:
    assert ragged_arange(torch.tensor([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert ragged_arange(torch.tensor([], dtype=torch.int64)).tolist() == []
