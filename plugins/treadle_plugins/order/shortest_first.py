"""order.shortest_first: little work first, with aging."""

from __future__ import annotations

from pydantic import Field

from treadle import Request, StrategySettings
from treadle_plugins.order.waiting_queue import KeyedOrder


class ShortestFirstSettings(StrategySettings):
    """What length costs."""

    token_s: float = Field(0.005, ge=0)
    """Seconds by which one token of prompt and `max_tokens` moves a request back."""
    max_delay_s: float = Field(30.0, gt=0)
    """Most seconds by which a request is moved back. Nobody is overtaken by a request that arrives later than this after it: that
    bounds its wait under endless arrivals."""


class ShortestFirst(KeyedOrder):
    """Short prompts and short answers first; a long request's turn comes once it has waited out its length."""

    Settings = ShortestFirstSettings

    def __init__(self, settings: ShortestFirstSettings) -> None:
        super().__init__()
        self._settings = settings

    def key(self, request: Request) -> float:
        """Its arrival, moved back by its length."""
        num_tokens = request.prompt_length + (request.params.max_tokens or 0)
        return request.arrival_s + min(num_tokens * self._settings.token_s, self._settings.max_delay_s)
