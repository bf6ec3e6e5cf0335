"""`treadle bench-baseline`: the classic base line against paged, continuous, prefix-sharing serving, at equal outputs.

Chat requests share a system prompt and end by themselves, well below their `max_tokens`. Each policy serves them with the real
model in a pool that is large enough; the recorded answers are then replayed in smaller pools, to find the smallest one
that serves them as fast, without preemption and without refusing anybody.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from treadle import Engine, Executor, ModelInfo, SamplingParams, Step, SyncExecutor, hookimpl, load
from treadle.clocks import VirtualClock
from treadle.contracts import PoolSize, PoolSpec
from treadle.errors import TreadleError
from treadle.plan import Outcome, StepPlan
from treadle.settings import BlockSettings

SYSTEM = (
    "You are a helpful assistant of a small public library. Answer in plain words and in full sentences. Keep to what was asked, "
    "and stop when it is answered. When a question cannot be answered from general knowledge, say so in one sentence and name "
    "who could know. Never invent titles, dates or names. Opening hours are nine to six from Monday to Friday and ten to two on "
    "Saturday. Books are lent for four weeks and may be renewed twice, unless somebody waits for them. "
)
SUBJECTS = (
    *("the water cycle", "the moon", "bread", "glass", "a violin", "the number seven"),
    *("tea", "rain", "a bicycle", "honey", "paper", "salt"),
)
QUESTIONS = (
    "What is {}? Answer in one sentence.",
    "Why do people like {}?",
    "Describe {} to a child in two sentences.",
    "Name three things that have to do with {}.",
)

AT_ONCE = 24
PROMPT_TOKENS = 512
"""More than any prompt here has."""
CONTINUOUS = {"admit": {"strategy": "continuous", "max_batch_size": AT_ONCE}, "allocate": "paged", "release": "at_once"}
STATIC = {
    "admit": {"strategy": "static", "batch_size": AT_ONCE, "max_wait_ms": 50},
    "budget": {"strategy": "whole_prompt", "max_tokens": AT_ONCE * PROMPT_TOKENS},  # a whole batch starts in one step
    "release": "with_batch",
    "prefix": "none",
}
LONGEST = "static, model length"
POLICIES: Mapping[str, Mapping[str, Any]] = {
    LONGEST: {**STATIC, "allocate": {"strategy": "contiguous", "reserve": "model_length"}},
    "static, max_tokens": {**STATIC, "allocate": {"strategy": "contiguous", "reserve": "max_tokens"}},
    "continuous, paged": {**CONTINUOUS, "prefix": "none"},
    "continuous, paged, prefix": {**CONTINUOUS, "prefix": "hash_chain"},
}


class Gauge:
    """A plugin that remembers the most blocks in use, and how often somebody was preempted."""

    name = "gauge"

    def __init__(self) -> None:
        self.most_used = 0
        self.num_preempted = 0

    @hookimpl
    def blocks_allocated(self, step: Step) -> None:
        """More are in use than before."""
        self.most_used = max(self.most_used, step.pool.num_used)

    @hookimpl
    def prefix_matched(self, step: Step) -> None:
        """Cached ones may be in use again."""
        self.most_used = max(self.most_used, step.pool.num_used)

    @hookimpl
    def request_preempted(self) -> None:
        """Count it."""
        self.num_preempted += 1


@dataclass
class Run:
    """How a policy did."""

    policy: str
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Replay(SyncExecutor):
    """An executor that gives the recorded answers, on a virtual clock; a plugin too."""

    name = "replay"
    tokenizer = None

    def __init__(self, model: ModelInfo, outputs: Mapping[str, tuple[int, ...]]) -> None:
        self.model = model
        self.clock = VirtualClock()
        self._outputs = outputs

    @hookimpl
    def execute(self) -> Executor:
        """Be the executor."""
        return self

    def open_pool(self, spec: PoolSpec) -> PoolSize:
        """The blocks that are asked for."""
        return PoolSize(spec.num_blocks or 1)

    def run(self, plan: StepPlan) -> Outcome:
        """The next recorded token of each."""
        self.clock.wait(self.clock.now() + 0.02)
        return Outcome(tuple((self._outputs[w.request_id][w.num_output],) if w.sampling is not None else () for w in plan.works))

    def describe(self) -> dict[str, str]:
        """Say what it is."""
        return {"executor": "replay of recorded answers"}

    def memory(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing to give back."""


def chat_prompts(engine: Engine, num_requests: int) -> dict[str, tuple[int, ...]]:
    """Prompts by request id."""
    assert engine.tokenizer is not None
    prompts = {}
    for n in range(num_requests):
        question = QUESTIONS[n % len(QUESTIONS)].format(SUBJECTS[(n // len(QUESTIONS)) % len(SUBJECTS)])
        tokens = engine.tokenizer.chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}])
        assert tokens is not None, "the model has no chat template"
        prompts[f"chat{n}"] = tuple(tokens)
    return prompts


def serve(policy: str, num_requests: int, max_tokens: int, reserve: int, overrides: Sequence[str], folder: Path) -> Run:
    """Serve with the real model, in a pool of AT_ONCE times `reserve` tokens; the portrait is written to `folder`."""
    blocks = load(environment=False, values=POLICIES[policy], overrides=overrides).choices["allocate"].settings
    assert isinstance(blocks, BlockSettings), "built-in strategies have these"
    num_blocks = AT_ONCE * -(-reserve // blocks.block_size)
    portrait = folder / (policy.replace(", ", "-").replace(" ", "_") + ".jsonl")
    values = {
        **POLICIES[policy],
        "pool": {"num_blocks": num_blocks},
        "plugins": ["portrait"],
        "plugin": {"portrait": {"path": str(portrait), "every_s": 0.05}},
    }
    gauge = Gauge()
    run = Run(policy)
    with Engine(load(environment=False, values=values, overrides=overrides), [gauge]) as engine:
        run.prompts = chat_prompts(engine, num_requests)
        params = SamplingParams(max_tokens=max_tokens)
        begin = time.perf_counter()
        handles = [engine.submit(prompt, params, request_id=name) for name, prompt in run.prompts.items()]
        done = [handle.result() for handle in handles]
        seconds = time.perf_counter() - begin
        run.outputs = {c.request_id: c.token_ids for c in done}
        ttft = sorted(c.ttft_s or 0.0 for c in done)
        tokens = sum(len(c.token_ids) for c in done)
        memory = engine.info.memory()
        block_bytes = memory["kv_pool"] / num_blocks
        run.facts = {
            "tokens_per_s": tokens / seconds,
            "ttft_mean_s": statistics.mean(ttft),
            "ttft_p95_s": ttft[int(0.95 * len(ttft))],
            "cached_tokens": sum(c.num_cached_tokens for c in done),
            "stopped_by_themselves": sum(c.finish_reason.value == "stop" for c in done),
            "mean_output": tokens / len(done),
            "peak_blocks": gauge.most_used,
            "num_blocks": num_blocks,
            "block_bytes": block_bytes,
            "weights_mb": memory["weights"] / 2**20,
        }
        run.facts["model"] = engine.info.model
        run.facts["block_size"] = engine.info.block_size
    samples = [json.loads(line) for line in portrait.read_text(encoding="utf-8").splitlines()]
    run.facts["resident_mb"] = max(sample["memory"]["resident"] for sample in samples) / 2**20
    return run


def smallest_pool(run: Run, max_tokens: int) -> int:
    """Blocks of the smallest pool in which the recorded requests are served without preemption, refusal or a smaller batch.

    Raises TreadleError when not even the pool in which they were recorded does.
    """
    low, high = 1, run.facts["num_blocks"]
    reference = _replay(run, max_tokens, high)
    if reference is None:
        raise TreadleError(f"{run.policy}: {high} blocks do not serve {AT_ONCE} requests at once; lower --max-tokens")

    def serves(num_blocks: int) -> bool:
        result = _replay(run, max_tokens, num_blocks)
        return result is not None and result <= reference

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle + 1, high)
    return low


def _replay(run: Run, max_tokens: int, num_blocks: int) -> float | None:
    """Virtual seconds that serving takes; None when somebody was preempted or not served."""
    gauge = Gauge()
    values = {
        **POLICIES[run.policy],
        "pool": {"num_blocks": num_blocks},
        "execute": "simulated",
    }
    overrides = [f"allocate.block_size={run.facts['block_size']}"]
    replay = Replay(run.facts["model"], run.outputs)
    with Engine(load(environment=False, values=values, overrides=overrides), [gauge, replay]) as engine:
        handles = [
            engine.submit(prompt, SamplingParams(max_tokens=max_tokens), request_id=name) for name, prompt in run.prompts.items()
        ]
        engine.drain()
        if gauge.num_preempted or any(handle.result().token_ids != run.outputs[handle.id] for handle in handles):
            return None
        return engine.clock.now()


def table(runs: Sequence[Run], pools: Sequence[int]) -> str:
    """A Markdown table; memory in MiB. What the process held was measured in a pool that is large enough for anybody."""
    names = ("policy", "KV held at most", "smallest pool", "with weights", "process at most")
    rows = [f"| {' | '.join(names)} | tok/s | TTFT mean / p95, s | reused tokens |", "|" + 8 * "---|"]
    for run, blocks in zip(runs, pools, strict=True):
        facts = run.facts
        peak = facts["peak_blocks"] * facts["block_bytes"] / 2**20
        pool = blocks * facts["block_bytes"] / 2**20
        rows.append(
            f"| {run.policy} | {peak:.1f} | {pool:.1f} | {pool + facts['weights_mb']:.0f} | {facts['resident_mb']:.0f} | "
            f"{facts['tokens_per_s']:.0f} | {facts['ttft_mean_s']:.2f} / {facts['ttft_p95_s']:.2f} | {facts['cached_tokens']} |"
        )
    return "\n".join(rows)


@click.command("bench-baseline")
@click.option("--requests", default=48, show_default=True, help="Chat requests to serve.")
@click.option("--max-tokens", default=512, show_default=True, help="What each request asks for at most.")
@click.option("--folder", default="baseline", type=click.Path(path_type=Path), help="Where portraits and results are written.")
@click.option(
    "--set", "overrides", multiple=True, metavar="NAME=VALUE", help="A setting for all policies, such as execute.dtype=float32."
)
def bench_baseline(requests: int, max_tokens: int, folder: Path, overrides: tuple[str, ...]) -> None:
    """Compare the classic base line with paged and continuous serving on the configured model."""
    folder.mkdir(parents=True, exist_ok=True)
    served: dict[str, Run] = {}
    pools: dict[str, int] = {}
    longest = 0
    for policy in reversed(list(POLICIES)):  # the first tells the model's length, which the last one reserves
        run = serve(policy, requests, max_tokens, longest if policy == LONGEST else PROMPT_TOKENS + max_tokens, overrides, folder)
        served[policy], longest = run, run.facts["model"].max_length
        pools[policy] = smallest_pool(run, max_tokens)
        click.echo(f"{policy}: {run.facts['tokens_per_s']:.0f} tok/s, smallest pool {pools[policy]} blocks", err=True)
    runs = [served[policy] for policy in POLICIES]
    different = sum(any(run.outputs[name] != runs[0].outputs[name] for run in runs) for name in runs[0].outputs)
    click.echo(table(runs, [pools[policy] for policy in POLICIES]))
    stopped = runs[0].facts["stopped_by_themselves"]
    click.echo(
        f"{requests} requests, {stopped} ended by themselves, {runs[0].facts['mean_output']:.0f} tokens on average; "
        f"outputs differ between policies for {different} of them"
    )
    results = [{k: v for k, v in run.facts.items() if k != "model"} | {"policy": run.policy} for run in runs]
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
