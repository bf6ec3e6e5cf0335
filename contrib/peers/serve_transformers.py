"""transformers' own two ways: `generate` on padded batches, and its continuous batching."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import serving
from workloads import AT_ONCE, Job

PADDING = 2
NO_TOKEN = -1
"""An end-of-text token that no model gives."""


def load_model(model: str, threads: int) -> Any:
    """The model in bfloat16, with torch's fused attention."""
    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    network.generation_config.eos_token_id = None
    return network


def versions() -> dict[str, Any]:
    """Facts of both ways."""
    return {"transformers": transformers.__version__, "torch": torch.__version__, "attention": "sdpa"}


class Clock(StoppingCriteria):
    """Notes when each token of a batch was there, and stops nothing."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        self.times_s.append(time.perf_counter() - self._started_s)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class StaticEngine:
    """`generate` on left-padded batches in order of arrival; each runs until its longest request is done."""

    def __init__(self, model: str, threads: int) -> None:
        self._model = load_model(model, threads)
        self.facts = {**versions(), "kv": "bfloat16", "pool_tokens": "none: padded to the longest"}

    def serve(self, jobs: Sequence[Job], at_once: int) -> list[serving.Answer]:
        started_s = time.perf_counter()
        batches = [jobs[start : start + at_once] for start in range(0, len(jobs), at_once)]
        return [answer for batch in batches for answer in self._serve_batch(batch, started_s)]

    def memory(self) -> dict[str, int]:
        return {}

    def _serve_batch(self, jobs: Sequence[Job], started_s: float) -> list[serving.Answer]:
        width = max(len(job.prompt) for job in jobs)
        ids = torch.tensor([[PADDING] * (width - len(job.prompt)) + job.prompt for job in jobs])
        mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in jobs])
        clock = Clock(started_s)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(job.max_tokens for job in jobs),
                do_sample=False,
                pad_token_id=PADDING,
                eos_token_id=None,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        rows = output[:, width:].tolist()
        return [
            serving.Answer(row[: job.max_tokens], clock.times_s[0], clock.times_s[job.max_tokens - 1])
            for job, row in zip(jobs, rows, strict=True)
        ]


class ContinuousEngine:
    """transformers' continuous batching, which steps on a thread of its own."""

    def __init__(self, model: str, threads: int, pool_tokens: int) -> None:
        page_size = 32
        num_blocks = -(-pool_tokens // page_size)
        self._manager = load_model(model, threads).init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=PADDING),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page_size,
                num_blocks=num_blocks,
                max_batch_tokens=1024,
                max_requests_per_batch=AT_ONCE,
                allow_block_sharing=True,
                auto_switch_to_flash=False,
                default_compile_level=0,
                use_async_batching=False,
                use_cuda_graph=False,
            ),
        )
        self._manager.start()
        self._number = 0
        self.facts = {**versions(), "kv": "bfloat16", "pool_tokens": num_blocks * page_size}

    def serve(self, jobs: Sequence[Job], at_once: int) -> list[serving.Answer]:  # noqa: ARG002  # it was loaded with it
        started_s = time.perf_counter()
        answers = {}
        for job in jobs:
            self._number += 1
            name = str(self._number)
            answers[name] = serving.Answer()
            self._manager.add_request(
                job.prompt, request_id=name, max_new_tokens=job.max_tokens, record_timestamps=True, eos_token_id=NO_TOKEN
            )
        for _ in jobs:
            output = self._next()
            times_s = [stamp - started_s for stamp in output.timestamps]
            answer = answers[output.request_id]
            answer.tokens, answer.first_s, answer.last_s = list(output.generated_tokens), times_s[0], times_s[-1]
        return list(answers.values())

    def memory(self) -> dict[str, int]:
        return {}

    def _next(self) -> Any:
        """Wait for the next request that ends."""
        while True:
            output = self._manager.get_result(timeout=5)
            if output is not None and output.error:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            if output is not None and output.is_finished():
                return output
            if output is None and not self._manager.is_running():
                raise RuntimeError("the thread of continuous batching ended")


def load(given: Any) -> serving.Served:
    """The engine that `--mode` names."""
    if given.mode == "static":
        return StaticEngine(given.model, given.threads)
    return ContinuousEngine(given.model, given.threads, given.pool_tokens)


if __name__ == "__main__":
    given = serving.arguments(mode={"choices": ("static", "continuous"), "required": True})
    serving.run(lambda: load(given))
