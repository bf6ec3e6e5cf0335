"""A plugin that stands around the forward pass that was chosen: for the logits of a pass, and for the time of all of them."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from treadle import hookimpl


class Passes:
    """What the forward pass did."""

    name = "passes"

    def __init__(self) -> None:
        self.logits: Any = None
        """Of the last pass."""
        self.spent_s = 0.0
        """In all of them."""

    @hookimpl(wrapper=True)
    def forward(self, plain: Any) -> Generator[None, Any, Any]:
        """Watch the answer, or the model's own pass where there is none."""
        inner = yield
        return _Watched(inner or plain, self)


class _Watched:
    def __init__(self, inner: Any, passes: Passes) -> None:
        self._inner, self._passes = inner, passes

    def __call__(self, *args: Any) -> Any:
        begin = time.perf_counter()
        logits = self._passes.logits = self._inner(*args)
        self._passes.spent_s += time.perf_counter() - begin
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
