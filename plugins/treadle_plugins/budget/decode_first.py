"""budget.decode_first: running requests get their next token, prefill gets what is left, in chunks.

Chunked prefill is that of Sarathi-Serve (Agrawal et al., OSDI 2024): a long prompt does not stall the decode of the others.
"""

from __future__ import annotations

from pydantic import Field

from treadle import Request, Step, StrategySettings, Trait, hookimpl


class DecodeFirstSettings(StrategySettings):
    """Tokens of a step."""

    max_tokens: int = Field(2048, ge=1)
    """Most tokens that a step computes. Decode is served first; at least one token is left for prefill to go on."""
    max_prefill_tokens: int | None = Field(None, ge=1)
    """Most prefill tokens of a step; unset means all that decode leaves."""
    max_decode_tokens: int | None = Field(None, ge=1)
    """Most decode tokens of a step; unset means any number."""


class DecodeFirst:
    """Reserve a token for each request in decode, share the rest out among prefills in turn."""

    Settings = DecodeFirstSettings
    traits = (Trait.CHUNKED_PREFILL,)

    def __init__(self, settings: DecodeFirstSettings) -> None:
        self._settings = settings

    @hookimpl
    def budget(self, step: Step) -> StepBudget:
        """The tokens of one step."""
        limits = self._settings
        decode = limits.max_tokens if limits.max_decode_tokens is None else min(limits.max_decode_tokens, limits.max_tokens)
        prefill = max(1, limits.max_tokens - min(step.num_decoding, decode))
        if limits.max_prefill_tokens is not None:
            prefill = min(prefill, limits.max_prefill_tokens)
        return StepBudget(decode, prefill)


class StepBudget:
    """Tokens left for decode and for prefill."""

    may_shrink = True

    def __init__(self, decode: int, prefill: int) -> None:
        self._decode = decode
        self._prefill = prefill

    def take(self, request: Request, wanted: int) -> int:
        """From the share that the request's phase draws on."""
        if request.num_pending == 1 and request.num_output:
            granted = min(wanted, self._decode)
            self._decode -= granted
        else:
            granted = min(wanted, self._prefill)
            self._prefill -= granted
        return granted
