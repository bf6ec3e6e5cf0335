"""Who gives way: what all preempt strategies share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from treadle import Request, Step, StrategySettings

Rule = Literal["last_admitted", "lowest_priority", "fewest_tokens_lost", "most_blocks_freed"]


class VictimSettings(StrategySettings):
    """Who gives way, and how much of it."""

    victim: Rule = Field(default="last_admitted")
    """`last_admitted`: who came last has the least to lose. `lowest_priority`: the least urgent. `fewest_tokens_lost`: who has
    the least KV. `most_blocks_freed`: who has the most blocks to itself. Of equal ones, the last admitted."""
    partial: bool = False
    """Take only as many blocks as are needed, from the end; the victim keeps the others while it waits."""


def choose_victim(step: Step, request: Request, rule: Rule) -> Request | None:
    """The running request that gives way to `request`; for a waiting one, among those of lower priority, the lowest first."""
    victims = list(step.victims())
    if request.is_waiting:
        victims = [victim for victim in victims if victim.priority < request.priority]
        rule = "lowest_priority" if rule == "last_admitted" else rule
    return min(victims, key=lambda victim: _COST[rule](step, victim), default=None)


def own_blocks(step: Step, request: Request) -> int:
    """Blocks that nobody else holds: what a preemption frees."""
    return sum(step.pool.count(block_id) == 1 for block_id in request.block_table)


# `min` takes the first of equal ones, and victims come last admitted first
_COST: Mapping[Rule, Callable[[Step, Request], int]] = MappingProxyType(
    {
        "last_admitted": lambda _step, _victim: 0,
        "lowest_priority": lambda _step, victim: victim.priority,
        "fewest_tokens_lost": lambda _step, victim: victim.num_computed,
        "most_blocks_freed": lambda step, victim: -own_blocks(step, victim),
    }
)
