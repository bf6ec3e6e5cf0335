"""Treadle itself, through public names only: its defaults, the batch size and threads of the comparison, an equal pool."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import treadle

import serving
from workloads import AT_ONCE, Job


class TreadleEngine:
    """An engine stepped by this process."""

    def __init__(self, model: str, threads: int, pool_tokens: int, settings: Sequence[str]) -> None:
        overrides = [
            f"model={model}",
            f"admit.max_batch_size={AT_ONCE}",
            "execute.dtype=bfloat16",
            f"execute.num_threads={threads}",
            *settings,
        ]
        chosen = treadle.load(overrides=overrides, environment=False).choices["allocate"].settings
        if isinstance(chosen, treadle.BlockSettings) and not any(name.startswith("pool.") for name in settings):
            overrides.append(f"pool.num_blocks={-(-pool_tokens // chosen.block_size)}")
        self._engine = treadle.Engine(treadle.load(overrides=overrides, environment=False))
        info = self._engine.info
        self.facts: dict[str, Any] = {
            **{name: version(name) for name in ("treadle", "torch", "transformers", "numba") if _has(name)},
            **self._engine.describe(),
            "kv": info.kv_format.name,
            "pool_tokens": info.num_blocks * info.block_size,
            "settings": list(settings),
        }

    def serve(self, jobs: Sequence[Job], at_once: int) -> list[serving.Answer]:
        """`at_once` is 1 for a single job and else what the engine was loaded with."""
        assert at_once in (AT_ONCE, 1) and (at_once == AT_ONCE or len(jobs) == 1)  # noqa: PT018  # one statement of fact
        started_s = self._engine.clock.now()
        handles = [
            self._engine.submit(job.prompt, treadle.SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)) for job in jobs
        ]
        self._engine.drain()
        return [_answer(handle.completion().raise_for_error(), started_s) for handle in handles]

    def memory(self) -> dict[str, int]:
        return dict(self._engine.info.memory())


def _answer(done: treadle.Completion, started_s: float) -> serving.Answer:
    first_s = done.finished_s if done.first_token_s is None else done.first_token_s
    return serving.Answer(list(done.token_ids), first_s - started_s, done.finished_s - started_s)


def _has(name: str) -> bool:
    try:
        version(name)
    except ModuleNotFoundError:
        return False
    return True


if __name__ == "__main__":
    given = serving.arguments(set={"action": "append", "default": []})
    serving.run(lambda: TreadleEngine(given.model, given.threads, given.pool_tokens, given.set))
