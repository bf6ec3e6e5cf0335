"""Memory that cannot be had and copies that fail half-way, in the torch executor with a tiny model.

Every operation of torch is a site: it allocates what it answers, or copies. The n-th one of a copy, of a whole pass or of opening
the pool fails as torch does when memory runs out; what it was to write is spoiled first, so that who relies on it is wrong.
"""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402  # after the skips

from support.reference import ModelCache, save_tiny  # noqa: E402
from support.tiny import VOCAB_SIZE  # noqa: E402
from treadle import Engine, Handle, SamplingParams  # noqa: E402  # after the skips
from treadle.errors import ConfigError, ExecutionError, ModelError  # noqa: E402
from treadle.testing import drain_checked  # noqa: E402
from treadle.testing.traffic import Tally  # noqa: E402
from treadle_plugins.attention.torch_backend import TorchAttention  # noqa: E402
from treadle_plugins.execute.torch_executor import host_memory  # noqa: E402
from treadle_plugins.execute.torch_executor.executor import TorchExecutor  # noqa: E402
from treadle_plugins.execute.torch_executor.swap import SwapSpace  # noqa: E402
from treadle_plugins.models import load as loading  # noqa: E402

BLOCK_SIZE = 16
CODECS: dict[str, dict[str, Any]] = {"whole": {"strategy": "none"}, "int8": {"strategy": "int8"}}
each_codec = pytest.mark.parametrize("codec", CODECS)
each_way = pytest.mark.parametrize("way", ["copy_out", "copy_in"])


class FailingOps(TorchDispatchMode):
    """The n-th operation within fails, once; None: each one."""

    def __init__(self, at: int | None, message: str = "injected: cannot have memory") -> None:
        super().__init__()
        self._at, self._message = at, message
        self.num_ops = self.num_failed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        if self._at is not None and self.num_ops != self._at:
            return func(*args, **(kwargs or {}))
        self.num_failed += 1
        self._spoil(func, args)
        raise torch.OutOfMemoryError(self._message)

    def _spoil(self, func: Any, args: Any) -> None:
        """The worst that a write may leave behind when it ends half-way: finite, and wrong."""
        if func.overloadpacket in (torch.ops.aten.index_put_, torch.ops.aten.copy_):
            func(*args[:-1], torch.full_like(args[-1], 77))

    def around(self, function: Any) -> Any:
        """`function`, in which operations count until the one that fails: counting is slow."""

        def failing(*args: Any, **options: Any) -> Any:
            with nullcontext() if self._at is not None and self.num_failed else self:
                return function(*args, **options)

        return failing


class Tiny(NamedTuple):
    """A model on the disk, and what it answers when nothing fails."""

    folder: Path
    shelf: ModelCache
    truths: dict[str, list[tuple[int, ...]]]

    def engine(self, codec: str, *plugins: object, **values: Any) -> Engine:
        settings: dict[str, Any] = {
            "model": str(self.folder),
            "execute": {"strategy": "torch", "dtype": "float32", "forward": "plain"},
            "attention": "torch",
            "allocate": {"block_size": BLOCK_SIZE},
            "pool": {"num_blocks": 6, "swap_memory": "200KiB"},
            "preempt": {"strategy": "swap", "partial": True},
            "quantize": CODECS[codec],
        }
        with self.shelf.in_use():
            return Engine.load(plugins=plugins, **(settings | values))

    def truth(self, codec: str) -> list[tuple[int, ...]]:
        """From a pool in which nobody is in anybody's way."""
        if codec not in self.truths:
            with self.engine(codec, pool={"num_blocks": 100}, preempt="recompute", prefix="none") as engine:
                handles = submit(engine)
                drain_checked(engine)
                self.truths[codec] = [handle.result().raise_for_error().token_ids for handle in handles]
        return self.truths[codec]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return Tiny(folder, ModelCache(), {})


def submit(engine: Engine, *, all_of_them: bool = True) -> list[Handle]:
    """A group of one prompt; then one that begins alike, and another."""
    draw = random.Random(5)  # noqa: S311  # only has to look varied
    common, own, other = ([draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (20, 7, 30))
    sampled = SamplingParams(max_tokens=24, temperature=0.7, seed=2)
    handles = engine.submit_group(common, sampled, 2)
    if not all_of_them:
        return handles
    handles.append(engine.submit(common[:16] + own, SamplingParams(max_tokens=26)))
    handles.append(engine.submit(other, SamplingParams(max_tokens=20)))
    return handles


def check(tiny: Tiny, codec: str, engine: Engine, handles: list[Handle], most_ended: int = 0) -> None:
    """All but `most_ended` are right, the rest say what failed, nothing is left behind, and who comes next is served."""
    ended = [handle.result().error for handle in handles if handle.result().error is not None]
    assert len(ended) <= most_ended, ended
    for error in ended:
        assert isinstance(error, ExecutionError)
        assert "OutOfMemoryError: injected: cannot have memory" in str(error)
    for handle, expected in zip(handles, tiny.truth(codec), strict=True):
        done = handle.result()
        assert done.token_ids == (expected if done.error is None else expected[: len(done.token_ids)])
    assert engine.kv_cache.swap_space.num_free == engine.kv_cache.swap_space.num_blocks
    again = submit(engine, all_of_them=False)
    drain_checked(engine)
    assert [handle.result().raise_for_error().token_ids for handle in again] == tiny.truth(codec)[:2]


# --- copies and passes ----------------------------------------------------------------------------------------------------------


@each_codec
@each_way
@pytest.mark.parametrize("at", [1, 2, 4, 7, 11, 20])
def test_a_copy_that_fails_half_way_costs_nobody_a_token(
    tiny: Tiny, codec: str, way: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, tally = FailingOps(at), Tally()
    monkeypatch.setattr(SwapSpace, way, ops.around(getattr(SwapSpace, way)))
    with tiny.engine(codec, tally) as engine:
        handles = submit(engine)
        drain_checked(engine)
        assert ops.num_failed == 1
        assert tally["swapped"]
        check(tiny, codec, engine, handles)


@each_codec
@each_way
def test_copies_that_fail_each_time_are_given_up_for_computing_anew(
    tiny: Tiny, codec: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = FailingOps(None)
    monkeypatch.setattr(SwapSpace, way, ops.around(getattr(SwapSpace, way)))
    with tiny.engine(codec) as engine, structlog.testing.capture_logs() as events:
        handles = submit(engine)
        drain_checked(engine)
        assert ops.num_failed > 1
        failed = [event["error"] for event in events if event["event"] == "pass_failed"]
        said = r"ExecutionError: copying \d+ blocks .* host memory failed: OutOfMemoryError"
        assert all(re.match(said, error) for error in failed)
        assert len(failed) == ops.num_failed
        check(tiny, codec, engine, handles)


@each_codec
@pytest.mark.parametrize("at", [1, 40, 180, 777, 2000, 9000])
def test_a_pass_in_which_memory_runs_out_ends_at_most_who_was_computed_alone(
    tiny: Tiny, codec: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = FailingOps(at)
    with tiny.engine(codec) as engine:
        monkeypatch.setattr(TorchExecutor, "run", ops.around(TorchExecutor.run))
        handles = submit(engine)
        drain_checked(engine)
        assert ops.num_failed == 1
        check(tiny, codec, engine, handles, most_ended=1)


@each_codec
@pytest.mark.parametrize("at", [1, 2, 4, 20])
def test_kv_that_turned_to_nan_is_not_kept_for_others(tiny: Tiny, codec: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing raises: the executor tells of it when a token is to be sampled."""
    write, num_calls = TorchAttention.write, 0

    def writes_nan(self: Any, layer: int, keys: Any, values: Any, batch: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        write(self, layer, keys, values.fill_(float("nan")) if num_calls == at else values, batch)

    with tiny.engine(codec, budget={"strategy": "decode_first", "max_tokens": 32}) as engine:
        monkeypatch.setattr(TorchAttention, "write", writes_nan)
        handles = submit(engine)
        drain_checked(engine)
        assert num_calls > at
        errors = [handle.result().error for handle in handles if handle.result().error is not None]
        assert errors
        assert all("NaN" in str(error) for error in errors)
        again = submit(engine)
        drain_checked(engine)
        assert [handle.result().raise_for_error().token_ids for handle in again] == tiny.truth(codec)


# --- start-up -------------------------------------------------------------------------------------------------------------------


POOLS = [({"num_blocks": 6}, "pool.num_blocks"), ({"memory": "100KiB"}, "pool.memory")]


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize(("pool", "lower"), POOLS)
def test_a_pool_that_finds_no_memory(
    tiny: Tiny, at: int, pool: dict[str, Any], lower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = TorchAttention.allocate
    fails = FailingOps(at).around(allocate)
    # the model is tried on two blocks first
    monkeypatch.setattr(TorchAttention, "allocate", lambda *given: (allocate if given[1] == 2 else fails)(*given))
    reason = rf"a KV pool of \d+ blocks, \d+ bytes, on cpu: OutOfMemoryError: injected: cannot have memory; lower {lower}$"
    with pytest.raises(ConfigError, match=rf"no room for {reason}"):
        tiny.engine("int8", pool=pool, preempt="recompute")


@pytest.mark.parametrize("at", [1, 2, 5])
def test_not_even_the_blocks_that_the_model_is_tried_on(tiny: Tiny, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchAttention, "allocate", FailingOps(at).around(TorchAttention.allocate))
    with pytest.raises(
        ConfigError, match=r"the 2 blocks that the model is tried on: OutOfMemoryError.* lower allocate\.block_size"
    ):
        tiny.engine("whole")


@each_codec
@pytest.mark.parametrize("at", [1, 2])
def test_swap_space_that_finds_no_memory(tiny: Tiny, codec: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapSpace, "__init__", FailingOps(at).around(SwapSpace.__init__))
    with pytest.raises(
        ConfigError, match=r"no room for swap space of \d+ blocks, \d+ bytes, in host memory: .*; lower pool.swap_memory$"
    ):
        tiny.engine(codec)


def test_memory_that_python_itself_does_not_find(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(SwapSpace, "__init__", fails)
    with pytest.raises(ConfigError, match=r"MemoryError: no reason given; lower pool\.swap_memory"):
        tiny.engine("whole")


@pytest.mark.parametrize(
    ("pool", "lower"), [({"memory": "3MiB"}, "pool.memory"), ({"num_blocks": 100, "swap_memory": "2MiB"}, "pool.num_blocks")]
)
def test_more_than_the_machine_has_is_refused_though_linux_would_promise_it(
    tiny: Tiny, pool: dict[str, Any], lower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "host_memory", lambda: 2_500_000)
    with pytest.raises(ConfigError, match=rf"this machine has 2500000 bytes; lower {lower} or pool.swap_memory"):
        tiny.engine("whole", pool=pool, preempt="recompute")
    monkeypatch.setattr(host_memory, "host_memory", lambda: None)
    tiny.engine("whole", pool=pool, preempt="recompute").close()


@pytest.mark.parametrize("pool", [{"memory": "100TiB"}, {"num_blocks": 2**60}, {"num_blocks": 4, "swap_memory": "100TiB"}])
def test_absurd_sizes_are_refused(tiny: Tiny, pool: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no room for"):
        tiny.engine("whole", pool=pool, preempt="recompute")


def test_the_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host_memory, "_LIMITS", (str(limit),))
    whole = host_memory.host_memory()
    assert whole is None or whole > 10**8
    limit.write_text("max\n")
    assert host_memory.host_memory() == whole
    limit.write_text("4096\n")
    assert host_memory.host_memory() == 4096


@pytest.mark.parametrize("at", [1, 30, 90])
def test_memory_that_runs_out_while_the_model_is_tried(tiny: Tiny, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchExecutor, "_forward", FailingOps(at).around(TorchExecutor._forward))
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot compute over blocks of KV: OutOfMemoryError: injected"):
        tiny.engine("whole")


@pytest.mark.parametrize("at", [1, 20])
def test_memory_that_runs_out_while_the_model_is_loaded(tiny: Tiny, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load = FailingOps(at).around(loading.AutoModelForCausalLM.from_pretrained)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(ModelError, match=r"cannot be loaded: .*injected: cannot have memory"):
        Engine.load(model=str(tiny.folder), execute={"strategy": "torch", "dtype": "float32", "forward": "plain"})
