"""For tests of plugins and of the core: a fake executor that checks what it reads, and engines around it. Public."""

from treadle.clocks import VirtualClock
from treadle.testing.fake_executor import FakeExecutor, expected_tokens
from treadle.testing.play import drain_checked, make_engine, play

__all__ = ["FakeExecutor", "VirtualClock", "drain_checked", "expected_tokens", "make_engine", "play"]
