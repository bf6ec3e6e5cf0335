"""accept.queue_limit: a queue that refuses rather than grows."""

from __future__ import annotations

from pydantic import Field

from treadle import Accept, Load, Refuse, Request, StepReport, StrategySettings, Trim, hookimpl


class QueueLimitSettings(StrategySettings):
    """How long the queue may grow, and what happens to prompts as it deepens."""

    max_waiting: int = Field(500, ge=1)
    """Most waiting requests; further ones are refused."""
    max_waiting_tokens: int | None = Field(None, ge=1)
    """Most prompt tokens of all waiting requests together; unset means any number."""
    trim_above: int | None = Field(None, ge=0)
    """From this many waiting requests on, long prompts are trimmed."""
    trim_to_tokens: int = Field(512, ge=1)
    """What a trimmed prompt keeps: its last tokens."""
    refuse_long_above: int | None = Field(None, ge=0)
    """From this many waiting requests on, prompts longer than `trim_to_tokens` are refused rather than trimmed."""
    non_core: dict[str, str] = Field(default_factory=dict)
    """Labels that mark traffic as non-core, such as {lane = "bulk"}: only its prompts are trimmed or refused for their length.
    Empty means all traffic."""
    max_wait_s: float | None = Field(None, gt=0)
    """Refuse when the queue, at the rate of admissions seen so far, would take longer than this."""
    retry_after_s: float = Field(1.0, ge=0)
    """What a refused caller is told to wait."""


class QueueLimit:
    """Refuse when the queue is full, trim long prompts before."""

    Settings = QueueLimitSettings

    def __init__(self, settings: QueueLimitSettings) -> None:
        self._settings = settings
        self._num_admitted = 0
        self._busy_s = 0.0

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        """Time that steps took, as the clock has it."""
        self._busy_s += report.ended_s - report.started_s

    @hookimpl
    def request_admitted(self) -> None:
        """One more left the queue."""
        self._num_admitted += 1

    @hookimpl
    def accept(self, request: Request, load: Load) -> Accept | Trim | Refuse:
        """Refuse, trim or accept by how deep the queue is."""
        limits = self._settings
        if load.num_waiting >= limits.max_waiting:
            return self._refuse(f"{load.num_waiting} requests wait, and accept.max_waiting is {limits.max_waiting}")
        tokens = load.waiting_tokens + request.prompt_length
        if limits.max_waiting_tokens is not None and tokens > limits.max_waiting_tokens:
            return self._refuse(f"{tokens} tokens would wait, and accept.max_waiting_tokens is {limits.max_waiting_tokens}")
        if limits.max_wait_s is not None and self._expected_wait_s(load) > limits.max_wait_s:
            return self._refuse(
                f"the queue takes about {self._expected_wait_s(load):.1f} s, and accept.max_wait_s is {limits.max_wait_s:g}"
            )
        return self._by_length(request, load)

    def _by_length(self, request: Request, load: Load) -> Accept | Trim | Refuse:
        limits = self._settings
        is_core = any(request.labels.get(name) != value for name, value in limits.non_core.items())
        if is_core or request.prompt_length <= limits.trim_to_tokens:
            return Accept()
        if limits.refuse_long_above is not None and load.num_waiting >= limits.refuse_long_above:
            return self._refuse(
                f"{load.num_waiting} requests wait, and prompts above accept.trim_to_tokens={limits.trim_to_tokens} are refused "
                f"from accept.refuse_long_above={limits.refuse_long_above} on"
            )
        if limits.trim_above is not None and load.num_waiting >= limits.trim_above:
            return Trim(limits.trim_to_tokens)
        return Accept()

    def _expected_wait_s(self, load: Load) -> float:
        """The queue's length over the rate at which it has been emptied."""
        return load.num_waiting * self._busy_s / self._num_admitted if self._num_admitted else 0.0

    def _refuse(self, reason: str) -> Refuse:
        return Refuse(f"the queue is full: {reason}; try again later", self._settings.retry_after_s)
