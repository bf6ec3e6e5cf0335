"""`treadle bench-speed`: steps of the configured model against what the machine allows, and how their time grows.

Parts, each with a table; `growth` and `queue` are drawn as well:

    roofline   decode at batches 1 to 64 and prefill of 512 tokens, beside the time that memory and matrix units need at least
    codecs     decode at a context of 2,048 tokens and batch 16, by KV codec
    growth     decode by batch and by context
    queue      the core alone, on the simulated executor: by waiting requests and by blocks of the pool
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from treadle import Engine, SamplingParams, hookimpl
from treadle.cli import Common, common_options
from treadle.settings import load
from treadle_plugins.bench.core_cost import decode_step_ms, make_engine
from treadle_plugins.bench.passes import Passes

BATCHES = (1, 2, 4, 8, 16, 24, 32, 64)
CONTEXTS = (128, 512, 2048, 4096, 8000)
QUEUES = (10, 100, 1000, 10_000, 100_000)
BLOCKS = (100, 1000, 10_000, 100_000)
ROOFLINE_BATCHES = (1, 8, 24, 64)
ROOFLINE_CONTEXT, PREFILL_TOKENS = 256, 512
CODEC_BATCH, CODEC_CONTEXT = 16, 2048
CODECS: Mapping[str, Mapping[str, Any]] = {
    "none": {"strategy": "none"},
    "int8": {"strategy": "int8"},
    "mixed (K8V4)": {"strategy": "mixed"},
    "int4": {"strategy": "int4"},
}
PARTS = ("roofline", "codecs", "growth", "queue")
STEPS = 24


@dataclass(frozen=True)
class Point:
    """Milliseconds of a step, medians."""

    part: str
    what: str
    at: int
    """Batch, context, waiting requests or blocks."""
    step_ms: float
    forward_ms: float = 0.0
    """Of it in the forward pass, attention included."""
    bound_ms: float = 0.0
    """What the machine needs at least."""


class Machine:
    """What this machine does in the same run: bytes read and products a second, on the threads that torch has."""

    def __init__(self, dtype_bytes: int) -> None:
        """In float32 for 4 bytes, else in bfloat16."""
        import torch

        numbers = torch.ones(64 << 20, dtype=torch.float32)  # 256 MiB: more than any cache
        self.read_gb_s = numbers.nbytes / _least(numbers.sum) / 1e9
        self.dtype = "float32" if dtype_bytes == 4 else "bfloat16"
        left, right = (torch.randn(2048, 2048).to(getattr(torch, self.dtype)) for _ in range(2))
        self.gflop_s = 2 * 2048**3 / _least(lambda: left @ right) / 1e9
        self.threads = torch.get_num_threads()

    def bound_ms(self, num_bytes: float, flop: float) -> float:
        """The larger of the times that reading and multiplying take."""
        return 1e3 * max(num_bytes / self.read_gb_s / 1e9, flop / self.gflop_s / 1e9)


class Weights:
    """A plugin that counts a model's weights before they are packed: `layers` meet each token, `head` those that give logits."""

    name = "weights"

    def __init__(self) -> None:
        self.layers = self.head = 0

    @hookimpl(tryfirst=True)  # before others replace layers
    def prepare_model(self, model: Any) -> None:
        """Count. An embedding is looked up, not multiplied; where it is the head's own, it is that."""
        head, embedding = (part.weight for part in (model.get_output_embeddings(), model.get_input_embeddings()))
        self.head = head.numel()
        looked_up = 0 if embedding is head else embedding.numel()
        self.layers = sum(parameter.numel() for parameter in model.parameters()) - self.head - looked_up


class Bench:
    """Engines of the configuration, and what was measured with them."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._draw = random.Random(20261130)  # noqa: S311  # prompts, not secrets
        self.points: list[Point] = []

    def roofline(self) -> None:
        """Weights are read once a step and multiplied by each token that meets them; decode reads the KV of its context too."""
        with self._engine(passes := Passes(), sizes := Weights()) as engine:
            machine = Machine(engine.info.model.dtype_bytes)
            rate = f"{machine.gflop_s:.0f} GFLOP/s in {machine.dtype}"
            click.echo(f"{machine.threads} threads: {machine.read_gb_s:.1f} GB/s read, {rate}")
            kv = engine.info.kv_format.bytes_per_token(engine.info.model)
            num_bytes = (sizes.layers + sizes.head) * engine.info.model.dtype_bytes

            def bound_ms(tokens: int, rows: int) -> float:
                return machine.bound_ms(num_bytes, 2 * (sizes.layers * tokens + sizes.head * rows))

            for batch in ROOFLINE_BATCHES:
                taken = self._decode(engine, passes, batch, ROOFLINE_CONTEXT)
                bound = bound_ms(batch, batch) + machine.bound_ms(batch * ROOFLINE_CONTEXT * kv, 0)
                self._add("roofline", "decode", batch, taken, bound)
            taken = [self._prefill(engine, passes) for _ in range(5)]
            self._add("roofline", "prefill", PREFILL_TOKENS, taken, bound_ms(PREFILL_TOKENS, 1))

    def codecs(self) -> None:
        """By codec; engines take turns, as a machine has fast and slow minutes."""
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in CODECS}
        for _ in range(2):
            for name, quantize in CODECS.items():
                with self._engine(passes := Passes(), quantize=quantize) as engine:
                    taken[name] += self._decode(engine, passes, CODEC_BATCH, CODEC_CONTEXT)
        for name, steps in taken.items():
            self._add("codecs", name, CODEC_BATCH, steps)

    def growth(self) -> None:
        """By batch at a short context, by context at batch 1."""
        with self._engine(passes := Passes()) as engine:
            for batch in BATCHES:
                self._add(
                    "growth", f"batch, context {ROOFLINE_CONTEXT}", batch, self._decode(engine, passes, batch, ROOFLINE_CONTEXT)
                )
            for context in CONTEXTS:
                self._add("growth", "context, batch 1", context, self._decode(engine, passes, 1, context))

    def queue(self) -> None:
        """The core's own time."""
        for waiting in QUEUES:
            self._add("queue", "waiting, batch 24", waiting, [(ms, 0.0) for ms in decode_step_ms(24, waiting, 200)])
        for blocks in BLOCKS:
            self._add("queue", "blocks, batch 24", blocks, [(ms, 0.0) for ms in step_in_a_full_pool_ms(blocks)])

    def _engine(self, *plugins: object, **values: Any) -> Engine:
        overrides = ["prefix=none", "pool.memory=1GiB", "admit=continuous", "admit.max_batch_size=64", "budget.max_tokens=2048"]
        return Engine(load(self._common.path, [*self._common.all_overrides, *overrides], values=values), plugins)

    def _decode(self, engine: Engine, passes: Passes, batch: int, context: int) -> list[tuple[float, float]]:
        """Milliseconds of each of STEPS steps, and of forward passes in them, of `batch` requests that are all in decode."""
        params = SamplingParams(max_tokens=STEPS + 40, ignore_eos=True)
        handles = [engine.submit(self._prompt(engine, context), params) for _ in range(batch)]
        while any(not handle.request.num_output for handle in handles):
            engine.step()
        taken = [_timed_step(engine, passes) for _ in range(STEPS)]
        for handle in handles:
            handle.cancel()
        engine.drain()
        return taken

    def _prefill(self, engine: Engine, passes: Passes) -> tuple[float, float]:
        engine.submit(self._prompt(engine, PREFILL_TOKENS), SamplingParams(max_tokens=1))
        return _timed_step(engine, passes)

    def _prompt(self, engine: Engine, length: int) -> list[int]:
        most = min(engine.info.model.vocab_size, 40_000)
        return [self._draw.randrange(1, most) for _ in range(length)]

    def _add(self, part: str, what: str, at: int, taken: Sequence[tuple[float, float]], bound_ms: float = 0.0) -> None:
        step_ms, forward_ms = (statistics.median(times) for times in zip(*taken, strict=True))
        point = Point(part, what, at, step_ms, forward_ms, bound_ms)
        self.points.append(point)
        click.echo(line_of(point))


def step_in_a_full_pool_ms(num_blocks: int) -> list[float]:
    """Of the core, where every block is cached: each step of 24 requests takes blocks from the eviction order."""
    engine, executor = make_engine(24, num_blocks, ["allocate.block_size=16"])
    with engine:
        share = max(1, num_blocks // 200)
        for place in range(0, num_blocks, share):
            engine.submit([place // share + 1] * (16 * min(share, num_blocks - place) - 1) or [1], SamplingParams(max_tokens=1))
        engine.drain()
        for place in range(24):
            engine.submit([40_000 + place] * 17, SamplingParams(max_tokens=32))
        taken = []
        while engine.busy:
            spent, begin = executor.spent_s, time.perf_counter()
            engine.step()
            taken.append((time.perf_counter() - begin - (executor.spent_s - spent)) * 1e3)
    return taken


def line_of(point: Point) -> str:
    """A row of the table."""
    text = f"| {point.what} | {point.at} | {point.step_ms:.2f} |"
    text += f" {point.forward_ms:.2f} | {100 * (1 - point.forward_ms / point.step_ms):.1f} % |" if point.forward_ms else " | |"
    return text + (f" {point.bound_ms:.2f} | {100 * point.bound_ms / point.step_ms:.0f} % |" if point.bound_ms else " | |")


def draw(points: Sequence[Point]) -> Any:
    """A matplotlib figure with a panel for each thing that grows, both axes logarithmic."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(point.what for point in points if point.part in ("growth", "queue")))
    figure = Figure(figsize=(4 * len(names), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        own = [point for point in points if point.what == name]
        axes.loglog([point.at for point in own], [point.step_ms for point in own], "o-", label="step")
        if all(point.forward_ms for point in own):
            around = [point.step_ms - point.forward_ms for point in own]
            axes.loglog([point.at for point in own], around, "o--", label="of it around the pass")
        axes.set_xlabel(name)
        axes.set_ylabel("ms a step")
        axes.grid(which="both", alpha=0.2)
        axes.legend()
    return figure


def _timed_step(engine: Engine, passes: Passes) -> tuple[float, float]:
    spent_s, begin = passes.spent_s, time.perf_counter()
    engine.step()
    return 1e3 * (time.perf_counter() - begin), 1e3 * (passes.spent_s - spent_s)


def _least(call: Callable[[], object], times: int = 7) -> float:
    """Seconds of the fastest of some calls."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken)


@click.command("bench-speed")
@click.option("--folder", default="speed", type=click.Path(file_okay=False, path_type=Path), help="Where results are written.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only these; all unless given.")
@common_options
@click.pass_obj
def bench_speed(common: Common, folder: Path, parts: Sequence[str]) -> None:
    """Measure steps: against what the machine allows, by codec, and by batch, context, queue and pool.

    The machine has to be quiet. Writes speed.json, and growth.png and growth.svg where matplotlib is installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(common)
    click.echo("| what | at | ms a step | in the forward pass | around it | bound | reached |\n|---|---|---|---|---|---|---|")
    for part in parts or PARTS:
        getattr(bench, part)()
    (folder / "speed.json").write_text(json.dumps([asdict(point) for point in bench.points], indent=1), encoding="utf-8")
    if any(point.part in ("growth", "queue") for point in bench.points):
        try:
            figure = draw(bench.points)
        except ImportError:
            click.echo("no plots: they need matplotlib, which treadle[bench] brings", err=True)
            return
        for kind in ("png", "svg"):
            figure.savefig(folder / f"growth.{kind}", dpi=120)
