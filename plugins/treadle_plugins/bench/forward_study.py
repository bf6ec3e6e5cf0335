"""Time of a forward pass by number of tokens, attention left out: `python -m treadle_plugins.bench.forward_study`.

Compares transformers' own pass, the same under `torch.compile`, the fused one with oneDNN's products, and the fused one as it is.
On a busy machine take one thread: then what is told is the thread's own time, which neighbours hardly change.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from treadle import Engine, hookimpl

if TYPE_CHECKING:
    import torch

    from treadle_plugins.forward.spec import PackedForward

TOKENS = (1, 8, 24, 64, 512)
ROUNDS = 12
Pass = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], object]
"""Computes token ids, positions and rows."""


class Study:
    """Measures while the engine starts, when the model's own pass is still whole."""

    name = "forward_study"

    def __init__(self, variants: Sequence[str], num_threads: int) -> None:
        self._variants = variants
        self._clock = time.thread_time if num_threads == 1 else time.perf_counter

    @hookimpl
    def forward(self, model: Any, plain: PackedForward) -> PackedForward:
        """Measure, and go on with the fused pass."""
        if "plain" in self._variants:
            self._report("plain", lambda ids, positions, rows: plain(ids, positions, rows, alone))
        if "compiled" in self._variants:
            self._compiled(model)
        from treadle_plugins.forward.fused.build import Weights, build

        if "onednn" in self._variants:
            by_onednn = build(copy.deepcopy(model), plain, weights=Weights.ONEDNN)
            self._report("onednn", lambda ids, positions, rows: by_onednn(ids, positions, rows, alone))

        started = time.perf_counter()
        fused = build(model, plain)
        click.echo(f"fused: built in {time.perf_counter() - started:.1f} s; {dict(fused.describe())}")
        if "fused" in self._variants:
            self._report("fused", lambda ids, positions, rows: fused(ids, positions, rows, alone))
        return fused

    def _compiled(self, model: Any) -> None:
        """With freezing, dynamic shapes, and attention as an operator that the compiler does not look into."""
        import torch
        from torch._inductor import config as inductor
        from transformers import AttentionInterface, AttentionMaskInterface

        def turned(queries: torch.Tensor) -> torch.Tensor:
            return queries.transpose(1, 2).clone(memory_format=torch.contiguous_format)

        schema = "(Tensor queries) -> Tensor"
        attend: Any = torch.library.custom_op("treadle_study::attend", turned, mutates_args=(), schema=schema)
        attend.register_fake(turned)
        AttentionInterface.register("study", lambda _module, queries, *_others, **_named: (attend(queries), None))
        AttentionMaskInterface.register("study", lambda *_others, **_named: None)
        own = model.config._attn_implementation
        model.set_attn_implementation("study")
        with torch.no_grad(), inductor.patch(freezing=True):
            compiled: Any = torch.compile(model, dynamic=True)

            def run(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
                named = {"use_cache": False, "logits_to_keep": rows}
                compiled(input_ids=ids[None], position_ids=positions[None], **named)

            started = time.perf_counter()
            run(*batch(24))
            click.echo(f"compiled: ready after {time.perf_counter() - started:.1f} s")
            self._report("compiled", run)
        model.set_attn_implementation(own)

    def _report(self, name: str, run: Pass) -> None:
        for num_tokens in TOKENS:
            given = batch(num_tokens)
            took = []
            for _ in range(ROUNDS if num_tokens < 100 else 4):
                started = self._clock()
                run(*given)
                took.append(1e3 * (self._clock() - started))
            took.sort()
            click.echo(f"{name}: {num_tokens} tokens, median {took[len(took) // 2]:.1f} ms, smallest {took[0]:.1f} ms")


def batch(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, positions and rows: each token is a sequence of its own, but for a long prefill, which gives one row."""
    import torch

    ids = torch.arange(num_tokens) * 37 % 1000
    rows = torch.arange(num_tokens) if num_tokens < 100 else torch.tensor([num_tokens - 1])
    return ids, torch.arange(num_tokens), rows


def alone(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Attention that costs nothing."""
    return queries


@click.command()
@click.option("--model", default="smollm2-135m-instruct", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--variant", "variants", multiple=True, default=["plain", "fused"], show_default=True)
def main(model: str, dtype: str, threads: int, variants: tuple[str, ...]) -> None:
    """Print a line for each variant (plain, compiled, onednn, fused) and number of tokens."""
    execute = {"strategy": "torch", "device": "cpu", "dtype": dtype, "num_threads": threads}
    with Engine.load(model=model, plugins=[Study(variants, threads)], execute=execute, pool={"num_blocks": 64}):
        pass


if __name__ == "__main__":
    main()
