"""The three workloads: W1 offline, W2 a shared prompt, W3 one stream.

Lengths depend on a fixed seed, so they are the same for every engine, round and machine. Contents are slices of one corpus
and differ from round to round, so that no round profits from what an engine remembers of an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEED = 20261129
AT_ONCE = 24
"""Most requests under way together in W1 and W2."""
LONGEST = 1024
"""No request is longer than this, prompt and output together."""


@dataclass(frozen=True)
class Job:
    """One request: greedy, exactly `max_tokens` long whatever the model says."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """How many requests of which lengths."""

    name: str
    title: str
    at_once: int
    turns: int
    """Times that it is run in a round; short ones are run more often."""
    shared_tokens: int = 0
    """Tokens at the start that all prompts have in common."""


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", "offline: 64 requests, prompts 32-256, outputs 16-256", AT_ONCE, 1),
        Workload("W2", "48 requests sharing 512 tokens and 16-64 of their own, outputs 32-64", AT_ONCE, 1, 512),
        Workload("W3", "one stream: 128 in, 128 out", 1, 3),
    )
}


@dataclass(frozen=True)
class Corpus:
    """Token ids of real text, with the model's tokenizer."""

    ids: Sequence[int]
    source: str

    @classmethod
    def read(cls, path: Path) -> Corpus:
        """Read what `make_model.py` wrote."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(stored["ids"], stored["source"])

    @property
    def digest(self) -> str:
        """Names the contents, so that two results can be told to have had the same prompts."""
        return hashlib.sha256(json.dumps(list(self.ids)).encode()).hexdigest()[:16]

    def slice(self, generator: random.Random, length: int) -> list[int]:
        """`length` tokens from anywhere."""
        start = generator.randrange(len(self.ids) - length)
        return list(self.ids[start : start + length])


def lengths(name: str) -> list[tuple[int, int]]:
    """(own prompt tokens, output tokens) of each request of a workload."""
    if name == "W1":
        generator = random.Random(SEED + 1)  # noqa: S311  # a workload, not a secret
        return [(generator.randint(32, 256), generator.randint(16, 256)) for _ in range(64)]
    if name == "W2":
        generator = random.Random(SEED + 2)  # noqa: S311
        return [(generator.randint(16, 64), generator.randint(32, 64)) for _ in range(48)]
    return [(128, 128)]


def make(name: str, corpus: Corpus, number: int, share: float = 1.0) -> list[Job]:
    """The requests of workload `name` with the contents of turn `number`; only the first `share` of them (0 to 1)."""
    workload = WORKLOADS[name]
    wanted = lengths(name)
    wanted = wanted[: max(1, round(len(wanted) * share))]
    generator = random.Random(f"{SEED} {name} {number}")  # noqa: S311
    shared = corpus.slice(generator, workload.shared_tokens)
    return [Job(shared + corpus.slice(generator, own), output) for own, output in wanted]


def make_warm_up(corpus: Corpus) -> list[tuple[list[Job], int]]:
    """Requests, and how many at once, that touch every path before anything is timed: compilation, caches, page faults."""
    generator = random.Random(f"{SEED} warm-up")  # noqa: S311
    mixed = [Job(corpus.slice(generator, generator.randint(32, 256)), generator.randint(8, 40)) for _ in range(AT_ONCE)]
    shared = corpus.slice(generator, 512)
    alike = [Job(shared + corpus.slice(generator, 32), 8) for _ in range(4)]
    return [(mixed, AT_ONCE), (alike, AT_ONCE), ([Job(corpus.slice(generator, 128), 16)], 1)]


def make_nudge(corpus: Corpus, number: int) -> list[Job]:
    """One short request that wakes an engine up at the start of a turn."""
    generator = random.Random(f"{SEED} nudge {number}")  # noqa: S311
    return [Job(corpus.slice(generator, 24), 8)]
