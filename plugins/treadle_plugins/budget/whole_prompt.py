"""budget.whole_prompt: a prompt is computed in one step, never in chunks."""

from __future__ import annotations

from pydantic import Field

from treadle import Request, StrategySettings, hookimpl


class WholePromptSettings(StrategySettings):
    """Tokens of a step."""

    max_tokens: int = Field(4096, ge=1)
    """Most tokens that a step computes. Every decode is served, and a prompt longer than this is computed without others."""


class WholePrompt:
    """All of a prompt or none of it."""

    Settings = WholePromptSettings

    def __init__(self, settings: WholePromptSettings) -> None:
        self._max_tokens = settings.max_tokens

    @hookimpl
    def budget(self) -> WholeBudget:
        """The tokens of one step."""
        return WholeBudget(self._max_tokens)


class WholeBudget:
    """Tokens left in a step."""

    may_shrink = False

    def __init__(self, left: int) -> None:
        self._left = left
        self._prefilling = False

    def take(self, request: Request, wanted: int) -> int:
        """All that is wanted, as long as it fits; the first prompt of a step always does."""
        if request.num_pending == 1:
            granted = min(wanted, max(self._left, 1))
        elif wanted <= self._left or not self._prefilling:
            self._prefilling = True
            granted = wanted
        else:
            return 0
        self._left -= granted
        return granted
