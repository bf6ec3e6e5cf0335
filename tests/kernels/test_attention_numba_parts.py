"""What surrounds the numba kernels: the cache of compiled ones, threads, tasks, and what a processor offers."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.contracts import KVFormat
from treadle.errors import ConfigError
from treadle.plan import Work
from treadle_plugins.attention.auto import AutoAttentionStrategy
from treadle_plugins.attention.batch import PackedBatch
from treadle_plugins.attention.cpu import CpuAttentionSettings, CpuAttentionStrategy, NumbaAttentionStrategy
from treadle_plugins.attention.numba_backend import compiled, jobs, plan
from treadle_plugins.attention.numba_backend.backend import NumbaAttention
from treadle_plugins.attention.numba_backend.shape import ROWS, SEGMENT, KernelShape
from treadle_plugins.attention.spec import AttentionBackend, AttentionSpec, LayerAttention
from treadle_plugins.attention.torch_backend import TorchAttention
from treadle_plugins.execute.torch_executor.packing import Limits, pack
from treadle_plugins.kernels import cpu, objects, threads

SPEC = AttentionSpec("cpu", "float32", KVFormat(), 16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)


def attended(backend: AttentionBackend) -> torch.Tensor:
    """Results of three sequences, some long enough to be cut."""
    spec: AttentionSpec = backend.spec  # type: ignore[attr-defined]  # both built-in backends have it
    batch = batch_of([(0, 20), (0, 1), (0, 300)])
    generator = torch.Generator().manual_seed(1)
    shapes = ((batch.num_tokens, heads, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))
    q, k, v = (torch.randn(shape, generator=generator).to(spec.torch_dtype) for shape in shapes)
    backend.allocate(40)
    backend.prepare(batch)
    backend.write(0, k, v, batch)
    return backend.attend(0, q, batch, LayerAttention(0.25))


def batch_of(spans: list[tuple[int, int]], common: int = 0) -> PackedBatch:
    """All have their first `common` blocks in common, as far as they have any."""
    tables, first = [], common
    for start, count in spans:
        blocks = -(-(start + count) // SPEC.block_size)
        own = max(0, blocks - common)
        tables.append((*range(min(blocks, common)), *range(first, first + own)))
        first += own
    works = [Work("r", start, (1,) * count, table, None) for (start, count), table in zip(spans, tables, strict=True)]
    return pack(works, [], Limits(10, 1 << 20, first, SPEC.block_size), torch.device("cpu"))


# --- choosing ---------------------------------------------------------------------------------------------------------------


def test_auto_takes_it_first_on_a_cpu() -> None:
    strategy = AutoAttentionStrategy()
    assert isinstance(strategy.attention(SPEC), NumbaAttention)
    assert isinstance(strategy.attention(dataclasses.replace(SPEC, head_dim=20)), TorchAttention)


def test_the_strategy_keeps_kernels_where_it_is_told(tmp_path: Path) -> None:
    strategy = CpuAttentionStrategy(CpuAttentionSettings(cache_dir=tmp_path))
    backend = strategy.attention(SPEC)
    assert backend.name.startswith("cpu (")
    assert "kernels compiled in" in backend.name
    assert len(list(tmp_path.iterdir())) == 1
    assert strategy.attention(SPEC).name.endswith("kernels from the cache)")
    with pytest.raises(ConfigError, match="cpu: head size 20 is no multiple of 16"):
        strategy.attention(dataclasses.replace(SPEC, head_dim=20))


def test_its_former_name_is_accepted_with_one_notice(capfd: pytest.CaptureFixture[str]) -> None:
    strategy = NumbaAttentionStrategy(CpuAttentionSettings())
    assert isinstance(strategy.attention(SPEC), NumbaAttention)
    told = capfd.readouterr()
    assert (told.out + told.err).count("strategy_renamed") == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cuda"}, "device 'cuda' is not 'cpu'"),
        ({"dtype": "float64"}, "precision 'float64'"),
        ({"num_heads": 5}, "5 query heads cannot share 2 KV heads"),
        ({"head_dim": 72}, "head size 72 is no multiple of 16"),
        ({"kv_format": KVFormat(8, 8, scheme="other")}, "scheme 'other'"),
    ],
)
def test_what_it_cannot_do(changes: dict[str, Any], reason: str) -> None:
    assert reason in (NumbaAttention.supports(dataclasses.replace(SPEC, **changes)) or "")


# --- the cache --------------------------------------------------------------------------------------------------------------


def test_kernels_are_loaded_without_numba(tmp_path: Path) -> None:
    NumbaAttention(SPEC, tmp_path)
    script = f"""
import sys
from pathlib import Path
from treadle.contracts import KVFormat
from treadle_plugins.attention.numba_backend.backend import NumbaAttention
from treadle_plugins.attention.spec import AttentionSpec
spec = AttentionSpec("cpu", "float32", KVFormat(), 16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
print(NumbaAttention(spec, Path({str(tmp_path)!r})).name, "numba" in sys.modules)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    assert run.stdout.strip().endswith("kernels from the cache) False")


def test_a_damaged_file_is_compiled_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = attended(NumbaAttention(SPEC, tmp_path))
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for damage in (b"", content[:-100], content[:1000] + b"x" + content[1001:]):
        file.write_bytes(damage)
        assert torch.equal(attended(NumbaAttention(SPEC, tmp_path)), right)
        assert NumbaAttention(SPEC, tmp_path).name.endswith("kernels from the cache)")
    assert "kernels_damaged" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert torch.isfinite(attended(NumbaAttention(SPEC, blocked))).all()
    assert "kernels_not_kept" in capsys.readouterr().err


def test_the_cache_is_asked_for_this_very_code(tmp_path: Path) -> None:
    shape = KernelShape("float32", 16, cpu.host())
    keys = {compiled._key(shape), compiled._key(dataclasses.replace(shape, head_dim=32))}
    keys.add(compiled._key(dataclasses.replace(shape, cpu=dataclasses.replace(shape.cpu, features="+other"))))
    assert len(keys) == 3


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert objects.default_cache_dir() == tmp_path / "treadle" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert objects.default_cache_dir() == Path.home() / ".cache" / "treadle" / "kernels"


# --- threads ----------------------------------------------------------------------------------------------------------------


def test_torch_s_own_threads_are_used() -> None:
    found = threads.Threads()
    assert found.count == torch.get_num_threads()
    assert found.name.endswith("shared with torch")


def test_without_a_runtime_one_thread_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(threads, "_LIBRARIES", ("libnone*",))
    backend = NumbaAttention(SPEC)
    assert "one thread" in backend.name
    assert "kernels_run_on_one_thread" in capsys.readouterr().err
    alone = attended(backend)
    monkeypatch.undo()
    assert torch.equal(alone, attended(NumbaAttention(SPEC)))


# --- processors -------------------------------------------------------------------------------------------------------------


def lesser(**changes: Any) -> cpu.Cpu:
    """This processor with less to it: what is left still runs here."""
    return dataclasses.replace(cpu.host(), **changes)


LESSER: dict[str, dict[str, Any]] = {
    "no dots": {"has_bf16_dot": False, "has_byte_dot": False},
    "8 lanes": {"lanes": 8, "registers": 16, "has_bf16_dot": False, "has_byte_dot": False},
    "4 lanes": {"lanes": 4, "registers": 32, "has_bf16_dot": False, "has_byte_dot": False},
    "no fma": {"lanes": 4, "registers": 16, "has_fma": False, "has_bf16_dot": False, "has_byte_dot": False},
}
PACKED = KVFormat(8, 4, 16, 16, value_symmetric=False, rotation=16)


def lesser_cases() -> list[Any]:
    """Kernels of their own each, so not all by default."""
    by_default = {("no dots", PACKED, "bfloat16"), ("8 lanes", KVFormat(), "bfloat16"), ("8 lanes", PACKED, "float32")}
    by_default |= {("4 lanes", PACKED, "float16"), ("no fma", KVFormat(), "float32")}
    cases = itertools.product(LESSER, (KVFormat(), PACKED), ("float32", "bfloat16", "float16"))
    return [
        pytest.param(*case, id=f"{case[0]}-{case[1].name}-{case[2]}", marks=[] if case in by_default else [pytest.mark.slow])
        for case in cases
    ]


@pytest.mark.parametrize(("processor", "form", "dtype"), lesser_cases())
def test_lesser_processors(monkeypatch: pytest.MonkeyPatch, processor: str, form: KVFormat, dtype: str) -> None:
    monkeypatch.setattr("treadle_plugins.attention.numba_backend.backend.host", lambda: lesser(**LESSER[processor]))
    spec = dataclasses.replace(SPEC, dtype=dtype, kv_format=form, head_dim=32)
    got, right = attended(NumbaAttention(spec)), attended(TorchAttention(spec))
    tolerance = {"float32": 2e-5, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    assert (got.double() - right.double()).abs().max() <= tolerance * right.double().abs().max()


def test_processors_are_told_apart() -> None:
    new, old = (22, 0, 0), (15, 0, 0)
    wide = {"avx512f": True, "avx512bw": True, "avx512vl": True, "avx2": True, "fma": True}
    assert (
        cpu.describe("a", wide | {"avx512bf16": True, "avx512vnni": True}, "", new).summary == "a, 16 lanes, bf16 dot, byte dot"
    )
    assert cpu.describe("b", wide | {"avx512bf16": True}, "", old).summary == "b, 16 lanes"
    assert cpu.describe("c", {"avx2": True, "fma": True}, "", new).summary == "c, 8 lanes"
    arm = cpu.describe("d", {"neon": True}, "", new)
    assert (arm.lanes, arm.registers, arm.has_fma) == (4, 32, True)


# --- tasks ------------------------------------------------------------------------------------------------------------------


Row = tuple[int, int]
"""A token of the step, and a query head."""


def rows_of(task: list[int]) -> list[Row]:
    """The rows of a task, or of a set, in the order in which their states lie."""
    tokens = range(task[jobs.TOKEN], task[jobs.TOKEN] + task[jobs.COUNT])
    return list(itertools.product(tokens, range(task[jobs.QUERY_HEAD], task[jobs.QUERY_HEAD] + task[jobs.GROUP])))


def covered(made: plan.Plan) -> dict[Row, set[int]]:
    """For each row, the segments that some task computes; each once."""
    seen: dict[Row, set[int]] = {}
    for task in made.tasks.tolist():
        assert task[jobs.COUNT] * task[jobs.GROUP] <= ROWS
        for row in rows_of(task):
            segments = set(range(task[jobs.FROM], task[jobs.TO]))
            assert not segments & seen.setdefault(row, set())
            seen[row] |= segments
    return seen


def joined(made: plan.Plan) -> dict[Row, list[int]]:
    """For each row of a set, the segments that are joined, in this order: each counted for the set by who computes it."""
    states: dict[int, tuple[Row, int]] = {}
    counted: list[list[int]] = [[] for _ in made.sets]
    for task in made.tasks.tolist():
        if task[jobs.NUM_SETS]:
            assert task[jobs.TO] == task[jobs.FROM] + 1
            for place, row in enumerate(rows_of(task), task[jobs.STATES]):
                assert place not in states
                states[place] = row, task[jobs.FROM]
            sets = made.sets[task[jobs.SET] : task[jobs.SET] + task[jobs.NUM_SETS]].tolist()
            assert list(itertools.chain.from_iterable(map(rows_of, sets))) == rows_of(task)
            assert all(parts[jobs.HEAD] == task[jobs.HEAD] for parts in sets)
            for number in range(len(sets)):
                counted[task[jobs.SET] + number].append(task[jobs.FROM])
    assert sorted(states) == list(range(made.num_states))
    found: dict[Row, list[int]] = {}
    for parts, segments in zip(made.sets.tolist(), counted, strict=True):
        places = made.places[parts[jobs.FIRST_PLACE] : parts[jobs.FIRST_PLACE] + parts[jobs.NUM_PARTS]].tolist()
        for index, row in enumerate(rows_of(parts)):
            assert all(states[place + index][0] == row for place in places)
            found[row] = [states[place + index][1] for place in places]
            assert found[row] == sorted(segments)
    return found


SPANS = [(5000, 1), (0, 700), (100, 3), (0, 1)]
SHARING = [(600 + 9 * n, 1) for n in range(30)] + [
    (530, 1),
    (511, 1),
    (512, 3),
    (800, 2),
    (2000, 1),
    (300, 40),
    (300, 1),
    (255, 1),
]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (9, 3), (71, 1)])
@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("common", [0, 16, 40])
def test_tasks_cover_all_there_is_to_see_once(
    num_heads: int, num_kv_heads: int, num_threads: int, window: int | None, common: int
) -> None:
    spans = SPANS + SHARING if common else SPANS
    batch = batch_of(spans, common)
    made = plan.make(batch, plan.Heads(num_heads, num_kv_heads), window, num_threads)
    seen, joins = covered(made), joined(made)
    assert len(seen) == batch.num_tokens * num_heads
    assert all(seen[row] == set(segments) for row, segments in joins.items())
    for index, (start, count) in enumerate(spans):
        for token in range(count):
            first = 0 if window is None else max(0, start + token + 1 - window)
            needed = set(range(first // SEGMENT, (start + token) // SEGMENT + 1))
            assert needed <= seen[batch.bounds[index] + token, num_heads - 1]


def shared_tasks(made: plan.Plan) -> list[tuple[int, int, int]]:
    """First token, tokens and segment of tasks for several sequences, of the first head."""
    several = (task for task in made.tasks.tolist() if task[jobs.NUM_SETS] > 1 and task[jobs.QUERY_HEAD] == 0)
    return sorted((task[jobs.TOKEN], task[jobs.COUNT], task[jobs.FROM]) for task in several)


def test_what_neighbours_share_is_computed_once() -> None:
    heads = plan.Heads(9, 3)
    assert shared_tasks(plan.make(batch_of([(600, 1)] * 24, 32), heads, None, 1)) == [
        (first, 12, segment) for first in (0, 12) for segment in (0, 1)
    ]
    uneven = batch_of([(600, 1), (600, 1), (500, 1), (0, 30), (600, 3), (600, 2), (200, 1), (600, 1), (511, 1)], 40)
    assert shared_tasks(plan.make(uneven, heads, None, 1)) == [(0, 2, 1), (0, 3, 0), (33, 5, 0), (33, 5, 1), (39, 2, 0)]


@pytest.mark.parametrize(
    ("spans", "common", "how"),
    [
        ([(600, 1)] * 3, 0, {}),
        ([(600, 1)] * 3, 15, {}),
        ([(255, 1)] * 3, 15, {}),
        ([(600, 1), (0, 9), (600, 1)], 40, {}),
        ([(8000, 1)] * 3, 16, {}),
        ([(600, 40)] * 3, 16, {}),
        ([(600, 1)] * 3, 40, {"window": 10_000}),
        ([(600, 1)] * 3, 40, {"has_slopes": True}),
        ([(600, 1)] * 3, 40, {"heads": plan.Heads(25, 1)}),
    ],
)
def test_where_nothing_can_be_shared_or_little(spans: list[tuple[int, int]], common: int, how: dict[str, Any]) -> None:
    ways: dict[str, Any] = {"heads": plan.Heads(9, 3), "window": None, "num_threads": 1} | how
    made = plan.make(batch_of(spans, common), **ways)
    assert not shared_tasks(made)
    assert not len(made.sets)


def test_one_long_sequence_keeps_all_threads_busy() -> None:
    made = plan.make(batch_of([(4000, 1)]), plan.Heads(1, 1), None, 4)
    assert len(made.tasks) == -(-4001 // SEGMENT)
    assert made.num_states == len(made.tasks)
    alone = plan.make(batch_of([(4000, 1)]), plan.Heads(1, 1), None, 1)
    assert len(alone.tasks) == 1
