"""Logs are events with fields, on standard error: `log.info("request_preempted", request_id="r1", freed_blocks=3)`.

structlog takes a tenth of a second to import, so nothing here imports it before the first event or `configure`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from treadle.errors import ConfigError, nearest

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger, Processor

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


def configure(level: str = "warning", json: bool = False) -> None:
    """Log events of `level` and above to standard error: as lines for people, or with `json` as one JSON object a line.

    Called by the command line. A program that uses Treadle as a library and configures structlog itself needs no call:
    its own set-up holds for Treadle's events too. Raises ConfigError for an unknown level.
    """
    if level not in LEVELS:
        raise ConfigError(f"unknown log level {level!r}; {nearest(level, LEVELS)}")
    structlog = _structlog()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        # Looked up at each event: standard error may have been replaced since, by a test or a progress bar.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose events carry `logger=name`. Cheap: it may be called where a module is imported."""
    return cast("FilteringBoundLogger", _LazyLogger(name))


class _LazyLogger:
    """Finds its structlog logger at each use, so that the set-up made last is the one that holds."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        structlog = _structlog()
        if not structlog.is_configured():
            configure()  # structlog's own default would print everything to standard output
        return getattr(structlog.get_logger().bind(logger=self._name), method)


def _renderers(json: bool) -> list[Processor]:
    structlog = _structlog()
    if json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]


def _structlog() -> ModuleType:
    import structlog  # slow to import, see above

    return structlog
