"""OpenVINO GenAI's continuous batching, stepped from here. Its `max_num_seqs` did not cap what runs, so this script does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

import serving
from workloads import AT_ONCE, Job

BLOCK_SIZE = 32
"""What OpenVINO's CPU plugin uses."""


class OpenVinoEngine:
    """A pipeline with prefix caching. Unless `kv` names a precision of the KV cache, it is OpenVINO's own choice."""

    def __init__(self, model: str, threads: int, pool_tokens: int, kv: str | None = None) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-pool_tokens // BLOCK_SIZE)
        scheduler.cache_size = 0
        scheduler.max_num_seqs = AT_ONCE
        scheduler.max_num_batched_tokens = 512
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16", "CACHE_DIR": ""}
        if kv is not None:
            properties["KV_CACHE_PRECISION"] = kv
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._number = 0
        self.facts: dict[str, Any] = {
            "openvino": openvino.__version__,
            "openvino-genai": genai.__version__,
            "weights": "float16 on disk, computed in bfloat16",
            "kv": kv or "OpenVINO's default, u8 on a CPU",
            "pool_tokens": scheduler.num_kv_blocks * BLOCK_SIZE,
        }

    def serve(self, jobs: Sequence[Job], at_once: int) -> list[serving.Answer]:
        started_s = time.perf_counter()
        answers = [serving.Answer() for _ in jobs]
        waiting = deque(zip(jobs, answers, strict=True))
        running: list[tuple[serving.Answer, Any]] = []
        while waiting or running:
            while waiting and len(running) < at_once:
                job, answer = waiting.popleft()
                running.append((answer, self._submit(job)))
            self._pipeline.step()
            now_s = time.perf_counter() - started_s
            running = [(answer, handle) for answer, handle in running if _read(handle, answer, now_s)]
        return answers

    def memory(self) -> dict[str, int]:
        return {}

    def _submit(self, job: Job) -> Any:
        self._number += 1
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens = wanted.min_new_tokens = job.max_tokens
        wanted.ignore_eos = True
        wanted.do_sample = False
        return self._pipeline.add_request(self._number, openvino.Tensor(np.array([job.prompt], dtype=np.int64)), wanted)


def _read(handle: Any, answer: serving.Answer, now_s: float) -> bool:
    """Move new tokens into `answer`; whether there will be more."""
    while handle.can_read():
        for output in handle.read().values():
            answer.add(list(output.generated_ids), now_s)
    return bool(handle.get_status() == genai.GenerationStatus.RUNNING)


if __name__ == "__main__":
    given = serving.arguments(kv={"default": None})
    serving.run(lambda: OpenVinoEngine(given.model, given.threads, given.pool_tokens, given.kv))
