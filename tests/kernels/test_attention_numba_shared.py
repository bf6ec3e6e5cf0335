"""Sequences that share blocks, attended together: bit for bit what each gets on its own."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from treadle.contracts import KVFormat
from treadle.plan import Work
from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.numba_backend import jobs, plan
from treadle_plugins.attention.numba_backend.backend import NumbaAttention
from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec, LayerAttention
from treadle_plugins.attention.torch_backend import TorchAttention
from treadle_plugins.execute.torch_executor.packing import Limits, pack

SPEC = AttentionSpec("cpu", "bfloat16", KVFormat(), 16, num_layers=1, num_heads=6, num_kv_heads=2, head_dim=64)
SPECS = {
    "bfloat16": SPEC,
    "float32": dataclasses.replace(SPEC, dtype="float32"),
    "int8": dataclasses.replace(SPEC, kv_format=KVFormat(8, 8)),
}
TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-7}
BLOCK_SIZES, NUMBERS, LENGTHS = (16, 64, 100, 128), (2, 5, 24, 40), (256, 300, 512, 700)
HOW = LayerAttention(0.125)


class Sequence(NamedTuple):
    """Tokens stored before the step, those of the step, and how many of its first blocks are those of the sequence before."""

    start: int
    count: int
    common: int


def batch_with(number: int, length: int, block_size: int, seed: int) -> list[Sequence]:
    """So many decoding sequences that share `length` tokens, and what else there may be in a batch."""
    draw = random.Random(seed)  # noqa: S311  # only has to look irregular
    blocks = length // block_size
    family = [Sequence(length + draw.choice((0, 1, draw.randrange(90), draw.randrange(400))), 1, blocks) for _ in range(number)]
    family[0] = family[0]._replace(common=0)
    few = [Sequence(700 + n, 1, 600 // block_size) for n in range(3)]
    return [
        Sequence(300, 1, 0),
        *family,
        Sequence(length + 2, 3, blocks),
        Sequence(0, 70, 0),
        Sequence(700, 1, 0),
        *few,
        Sequence(900, 1, 300 // block_size),
        Sequence(300, 50, 0),
        Sequence(320, 1, 256 // block_size),
        Sequence(0, 1, 0),
    ]


class Pool:
    """A backend filled with the sequences' tokens, those of the step included."""

    def __init__(self, backend: AttentionBackend, spec: AttentionSpec, sequences: list[Sequence]) -> None:
        self.backend, self.spec = backend, spec
        self.works, self.num_blocks = [], 0
        tables: list[tuple[int, ...]] = [()]
        for start, count, common in sequences:
            own = -(-(start + count) // spec.block_size) - common
            table = (*tables[-1][:common], *range(self.num_blocks, self.num_blocks + own))
            assert len(table) == own + common
            self.num_blocks += own
            tables.append(table)
            self.works.append(Work("r", start, (1,) * count, table, None))
        generator = torch.Generator().manual_seed(1)
        stored = (2, self.num_blocks * spec.block_size, spec.num_kv_heads, spec.head_dim)
        keys, values = torch.randn(stored, generator=generator).to(spec.torch_dtype)
        self.bounds = [sum(len(work.tokens) for work in self.works[:n]) for n in range(len(self.works) + 1)]
        rows = (self.bounds[-1], spec.num_heads, spec.head_dim)
        self.queries = torch.randn(rows, generator=generator).to(spec.torch_dtype)
        backend.allocate(self.num_blocks)
        backend.poison()
        whole = self.packed([Work("r", 0, (1,) * (w.start + len(w.tokens)), w.block_table, None) for w in self.works])
        slots = whole.slot_blocks * spec.block_size + whole.slot_offsets
        backend.prepare(whole)
        backend.write(0, keys[slots], values[slots], whole)  # the same for all whose slot it is

    def packed(self, works: list[Work]) -> PackedBatch:
        return pack(works, [], Limits(10, 1 << 20, self.num_blocks, self.spec.block_size), torch.device("cpu"))

    def together(self, how: LayerAttention) -> torch.Tensor:
        batch = self.packed(self.works)
        self.backend.prepare(batch)
        return self.backend.attend(0, self.queries, batch, how)

    def alone(self, how: LayerAttention) -> torch.Tensor:
        results = []
        for work, first, last in zip(self.works, self.bounds, self.bounds[1:], strict=False):
            batch = self.packed([work])
            self.backend.prepare(batch)
            results.append(self.backend.attend(0, self.queries[first:last], batch, how))
        return torch.cat(results)

    def num_shared(self, num_threads: int) -> int:
        """Tasks for several sequences."""
        heads = plan.Heads(self.spec.num_heads, self.spec.num_kv_heads)
        made = plan.make(self.packed(self.works), heads, None, num_threads)
        return int((made.tasks[:, jobs.NUM_SETS] > 1).sum())


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", SPECS)
def test_sharing_changes_no_bit(name: str, block_size: int, num_threads: int) -> None:
    spec, turn = dataclasses.replace(SPECS[name], block_size=block_size), BLOCK_SIZES.index(block_size)
    backend = NumbaAttention(spec)
    for index, number in enumerate(NUMBERS):
        length = LENGTHS[(index + turn) % len(LENGTHS)]  # over all block sizes, each number meets each length
        pool = Pool(backend, spec, batch_with(number, length, block_size, index))
        assert pool.num_shared(num_threads)
        right = pool.alone(HOW)
        assert torch.isfinite(right.float()).all()
        for _ in range(2):  # counters are as they were
            assert torch.equal(pool.together(HOW), right)


HOWS = {
    "soft cap": LayerAttention(0.125, soft_cap=2.0),
    "window": LayerAttention(0.125, window=400),
    "alibi": LayerAttention(0.125, alibi_slopes=tuple(2.0 ** (-1 - n) for n in range(6))),
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS.keys())
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_ways_to_attend(name: str, how: LayerAttention, num_threads: int) -> None:
    """Layers that attend differently share a pool, and what can be shared in one may not be in the other."""
    spec, sequences = SPECS[name], batch_with(24, 512, 16, 0)
    pool, reference = Pool(NumbaAttention(spec), spec, sequences), Pool(TorchAttention(spec), spec, sequences)
    for which in (HOW, how):
        got, right = pool.together(which), reference.together(which).double()
        assert torch.equal(got, pool.alone(which))
        assert (got.double() - right).abs().max() <= TOLERANCE[spec.dtype] * right.abs().max()


def test_some_share_more_than_others(num_threads: int) -> None:
    sequences = [Sequence(1500 + 7 * n, 1, common) for n, common in enumerate((0, 16, 64, 64, 16, 80, 80, 32, 90, 0, 90))]
    pool = Pool(NumbaAttention(SPEC), SPEC, sequences)
    assert pool.num_shared(num_threads) > 2 * 5
    assert torch.equal(pool.together(HOW), pool.alone(HOW))


def test_a_diverged_sequence_spoils_no_other() -> None:
    pool = Pool(NumbaAttention(SPEC), SPEC, [Sequence(600, 1, 32 * (n > 0)) for n in range(5)])
    right = pool.together(HOW)
    pool.queries[2] = float("nan")
    got = pool.together(HOW)
    assert torch.isnan(got[2]).all()
    others = [0, 1, 3, 4]
    assert torch.equal(got[others], right[others])
