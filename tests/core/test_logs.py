"""Logs: events with fields on standard error, and no cost at import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from treadle import Engine
from treadle.errors import ConfigError
from treadle.logs import configure, get_logger


@pytest.fixture(autouse=True)
def _fresh_structlog() -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def test_unconfigured_only_warnings_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    log = get_logger("treadle.engine")
    log.info("request_queued", request_id="r1")
    log.warning("request_preempted", request_id="r2", freed_blocks=3)
    out, err = capsys.readouterr()
    assert out == ""
    assert "r1" not in err
    for part in ("request_preempted", "request_id=r2", "freed_blocks=3", "[treadle.engine]", "warning"):
        assert part in err


def test_json_events_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("debug", json=True)
    log = get_logger("treadle.pool")
    log.debug("blocks_freed", num_blocks=2, where={"a": 1})
    try:
        raise ValueError("no room")
    except ValueError:
        log.exception("step_failed", request_ids=("r1", "r2"))
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "event": "blocks_freed",
        "level": "debug",
        "logger": "treadle.pool",
        "num_blocks": 2,
        "where": {"a": 1},
    }
    assert second["event"] == "step_failed"
    assert "ValueError: no room" in second["exception"]


@pytest.mark.parametrize(("level", "shown"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1), ("critical", 0)])
def test_a_level_filters(level: str, shown: int, capsys: pytest.CaptureFixture[str]) -> None:
    configure(level, json=True)
    log = get_logger("treadle")
    for method in (log.debug, log.info, log.warning, log.error):
        method("event")
    assert len(capsys.readouterr().err.splitlines()) == shown


def test_the_set_up_made_last_holds_for_loggers_made_before(capsys: pytest.CaptureFixture[str]) -> None:
    log = get_logger("treadle")
    configure("error")
    log.info("before")
    configure("info")
    log.info("after")
    err = capsys.readouterr().err
    assert "before" not in err
    assert "after" in err


def test_a_programs_own_set_up_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    log = get_logger("treadle")
    structlog.configure(processors=[structlog.testing.LogCapture()])
    with structlog.testing.capture_logs() as events:
        log.info("request_queued", request_id="r1")
    assert events == [{"event": "request_queued", "request_id": "r1", "logger": "treadle", "log_level": "info"}]
    assert capsys.readouterr().err == ""


def test_an_unknown_level_says_what_would_work() -> None:
    with pytest.raises(ConfigError, match=r"unknown log level 'warn'; did you mean 'warning'\?"):
        configure("warn")


def test_a_bound_logger_keeps_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", json=True)
    get_logger("treadle").bind(request_id="r7").info("request_finished")
    assert json.loads(capsys.readouterr().err)["request_id"] == "r7"


def test_structlog_is_imported_by_the_first_event_only() -> None:
    code = (
        "import sys; from treadle.logs import get_logger; log = get_logger('treadle'); "
        "assert 'structlog' not in sys.modules; log.info('event'); assert 'structlog' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603


def test_a_level_given_to_load_is_the_level_of_the_logs(capsys: pytest.CaptureFixture[str]) -> None:
    Engine.load(execute="simulated", log_level="debug").close()
    get_logger("treadle.engine").debug("step_done", step=3)
    assert "step_done" in capsys.readouterr().err
    Engine.load(execute="simulated").close()
    get_logger("treadle.engine").debug("still_told")
    assert "still_told" in capsys.readouterr().err, "who says nothing changes nothing"
