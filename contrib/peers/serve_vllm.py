"""vLLM's CPU build, stepped in this process, so that no second process and no detokenizer stands between."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import serving
from workloads import AT_ONCE, LONGEST, Job


class VllmEngine:
    """vLLM with prefix caching and chunked prefill, compiled as it is by default."""

    def __init__(self, model: str, threads: int, pool_tokens: int, scratch: Path) -> None:
        self._set_environment(threads, scratch)
        import torch
        import vllm

        block_size = 128
        llm = vllm.LLM(
            model=model,
            dtype="bfloat16",
            max_num_seqs=AT_ONCE,
            max_model_len=LONGEST,
            max_num_batched_tokens=2048,
            block_size=block_size,
            num_gpu_blocks_override=-(-pool_tokens // block_size),
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            disable_log_stats=True,
        )
        self._engine = llm.llm_engine
        self._number = 0
        cache = self._engine.vllm_config.cache_config
        self.facts: dict[str, Any] = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "kv": cache.cache_dtype,
            "pool_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
            "preloaded": " ".join(Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name),
        }

    def serve(self, jobs: Sequence[Job], at_once: int) -> list[serving.Answer]:  # noqa: ARG002  # it was loaded with it
        started_s = time.perf_counter()
        answers = self._submit(jobs)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now_s = time.perf_counter() - started_s
            for output in outputs:
                answers[output.request_id].add(list(output.outputs[0].token_ids), now_s)
        return list(answers.values())

    def memory(self) -> dict[str, int]:
        return {}

    def _submit(self, jobs: Sequence[Job]) -> dict[str, serving.Answer]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        answers = {}
        for job in jobs:
            self._number += 1
            params = SamplingParams(
                temperature=0.0,
                max_tokens=job.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            name = str(self._number)
            self._engine.add_request(name, {"prompt_token_ids": job.prompt}, params)
            answers[name] = serving.Answer()
        return answers

    @staticmethod
    def _set_environment(threads: int, scratch: Path) -> None:
        """vLLM reads these when it is imported."""
        wanted = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",  # room that is checked at start-up; the number of blocks is set apart
            "VLLM_CACHE_ROOT": str(scratch / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        for name, value in wanted.items():
            os.environ.setdefault(name, value)


if __name__ == "__main__":
    given = serving.arguments(scratch={"type": Path, "required": True})
    serving.run(lambda: VllmEngine(given.model, given.threads, given.pool_tokens, given.scratch))
