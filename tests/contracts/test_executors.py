"""The executors that need no model keep the executors' contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from treadle import Executor
from treadle.testing import FakeExecutor
from treadle.testing.suites import ExecutorSuite
from treadle_plugins.execute.simulated import SimulatedExecutor, SimulatedSettings


class TestFake(ExecutorSuite):
    has_memory_limit = False

    @pytest.fixture
    def make_executor(self) -> Callable[[], Executor]:
        return lambda: FakeExecutor(num_swap_blocks=8)


class TestSimulated(ExecutorSuite):
    @pytest.fixture
    def make_executor(self) -> Callable[[], Executor]:
        return lambda: SimulatedExecutor(SimulatedSettings())
