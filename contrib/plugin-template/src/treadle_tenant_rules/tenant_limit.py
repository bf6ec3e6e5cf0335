"""plugin.tenant_limit: at most so many running requests of a tenant.

It fills no slot. It stands in front of the `admit` strategy, answers for tenants that are at their limit, and passes every other
question on by answering None.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, PositiveInt
from treadle import Admission, Request, StrategySettings, hookimpl


class TenantLimitSettings(StrategySettings):
    """How many may run."""

    label: str = "tenant"
    """The label that says whose a request is; requests without it are not limited."""
    max_running: PositiveInt = 4
    """Most running requests of a tenant."""
    limits: Mapping[str, PositiveInt] = Field(default_factory=dict)
    """Other limits for tenants of these names."""


class TenantLimit:
    """Skip requests of tenants that are at their limit."""

    Settings = TenantLimitSettings
    treadle_hooks = 2

    def __init__(self, settings: TenantLimitSettings) -> None:
        self._settings = settings
        # kept through what the plugin is told, so that a question costs the same however many run; requests by their number,
        # since an id may be given again
        self._running: dict[str, set[int]] = {}

    @hookimpl
    def admit(self, request: Request) -> Admission | None:
        """SKIP, so that other tenants' requests behind this one are looked at; STOP would hold them back too."""
        tenant = request.labels.get(self._settings.label)
        if tenant is None:
            return None
        limit = self._settings.limits.get(tenant, self._settings.max_running)
        return Admission.SKIP if len(self._running.get(tenant, ())) >= limit else None

    @hookimpl
    def request_admitted(self, request: Request) -> None:
        """One more runs."""
        self._add(request)

    @hookimpl
    def request_resumed(self, request: Request) -> None:
        """One more runs."""
        self._add(request)

    @hookimpl
    def request_preempted(self, request: Request) -> None:
        """One fewer runs."""
        self._discard(request)

    @hookimpl
    def request_finished(self, request: Request) -> None:
        """One fewer runs, if it did."""
        self._discard(request)

    def _add(self, request: Request) -> None:
        tenant = request.labels.get(self._settings.label)
        if tenant is not None:
            self._running.setdefault(tenant, set()).add(request.sequence)

    def _discard(self, request: Request) -> None:
        tenant = request.labels.get(self._settings.label)
        if tenant is None or tenant not in self._running:
            return
        self._running[tenant].discard(request.sequence)
        if not self._running[tenant]:
            del self._running[tenant]
