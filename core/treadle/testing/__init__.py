"""For tests of plugins and of the core: a fake executor that checks what it reads, and engines around it. Public."""

from treadle.clocks import VirtualClock
from treadle.testing.engines import drain_checked, make_engine, run_prompts
from treadle.testing.fake_executor import FakeExecutor, expected_tokens

__all__ = ["FakeExecutor", "VirtualClock", "drain_checked", "expected_tokens", "make_engine", "run_prompts"]
