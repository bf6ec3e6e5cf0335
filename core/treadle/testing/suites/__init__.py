"""Contract suites: what every implementation of a slot, an executor or a tokenizer must do, whoever wrote it. Needs pytest.

Derive from a suite, say by one fixture what is under test, and run pytest:

    from treadle.testing.suites import OrderSuite

    class TestMyOrder(OrderSuite):
        @pytest.fixture
        def strategy(self):
            return MyOrder
"""

from treadle.testing.suites.base import StrategySuite
from treadle.testing.suites.blocks import AllocateSuite, EvictSuite, PreemptSuite, PrefixSuite
from treadle.testing.suites.executors import ExecutorSuite
from treadle.testing.suites.requests import AcceptSuite, AdmitSuite, BudgetSuite, OrderSuite, ReleaseSuite
from treadle.testing.suites.tokenizers import TokenizerSuite

SUITES: dict[str, type[StrategySuite]] = {
    suite.slot: suite
    for suite in (
        AcceptSuite,
        OrderSuite,
        AdmitSuite,
        BudgetSuite,
        PrefixSuite,
        AllocateSuite,
        EvictSuite,
        PreemptSuite,
        ReleaseSuite,
    )
}
"""The suite of each slot whose strategies need no model."""

__all__ = [
    "SUITES",
    "AcceptSuite",
    "AdmitSuite",
    "AllocateSuite",
    "BudgetSuite",
    "EvictSuite",
    "ExecutorSuite",
    "OrderSuite",
    "PreemptSuite",
    "PrefixSuite",
    "ReleaseSuite",
    "StrategySuite",
    "TokenizerSuite",
]
