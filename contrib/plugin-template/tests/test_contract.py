"""What every strategy of the slot `order` must do, put to ours."""

from __future__ import annotations

import pytest
from treadle.testing.suites import OrderSuite


class TestRoundRobin(OrderSuite):
    """As it is installed, with other settings than its defaults."""

    @pytest.fixture(params=[1.0, 20.0])
    def strategy(self, request: pytest.FixtureRequest) -> dict[str, object]:
        """A table of settings; a name or a class would do as well."""
        return {"strategy": "round_robin", "turn_s": request.param}
