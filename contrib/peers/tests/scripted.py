"""The scripted engine, as an entry of the catalogue."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import catalogue

SCRIPT = Path(__file__).with_name("scripted_engine.py")


@dataclass(frozen=True)
class Scripted(catalogue.Engine):
    """An engine whose script lies beside the tests."""

    def command(self, threads: int, pool_tokens: int) -> list[str]:
        fixed = ["--model", "none", "--threads", str(threads), "--pool-tokens", str(pool_tokens)]
        return [sys.executable, str(SCRIPT), *fixed, *self.arguments]
