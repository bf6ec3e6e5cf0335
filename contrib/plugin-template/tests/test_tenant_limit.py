"""plugin.tenant_limit, in front of the built-in `admit`."""

from __future__ import annotations

from collections import Counter

import pytest
from treadle import SamplingParams, StepReport, hookimpl
from treadle.testing import make_engine, run_prompts

from treadle_tenant_rules.tenant_limit import TenantLimit, TenantLimitSettings


class MostRunning:
    """Remembers how many ran at once."""

    def __init__(self) -> None:
        self.most = 0

    @hookimpl
    def step_finished(self, report: StepReport) -> None:
        self.most = max(self.most, report.num_running + len(report.finished))


def limit(**values: object) -> TenantLimit:
    return TenantLimit(TenantLimitSettings.model_validate(values))


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_tenant_never_runs_more_than_its_limit(most: int) -> None:
    seen = MostRunning()
    done = run_prompts(limit(max_running=most), seen, prompts=[[n, n] for n in range(1, 8)], labels={"tenant": "a"})
    assert seen.most == most
    assert {completion.finish_reason.value for completion in done} == {"length"}


def test_other_tenants_are_not_held_back_by_it() -> None:
    with make_engine(limit(max_running=1)) as engine:
        params = SamplingParams(max_tokens=4)
        tenants = ["a", "a", "a", "b", None]
        handles = [engine.submit([1, 2], params, labels={"tenant": t} if t else None) for t in tenants]
        engine.step()
        running = [handle.request.phase.value for handle in handles]
        assert running == ["running", "waiting", "waiting", "running", "running"]
        engine.drain()


def test_tenants_may_have_limits_of_their_own() -> None:
    with make_engine(limit(max_running=1, limits={"big": 3})) as engine:
        handles = [engine.submit([1, 2], SamplingParams(max_tokens=4), labels={"tenant": t}) for t in ["big", "small"] * 4]
        engine.step()
        running = Counter(h.request.labels["tenant"] for h in handles if h.request.phase.value == "running")
        assert running == {"big": 3, "small": 1}
        engine.drain()


def test_the_built_in_decides_for_those_below_their_limit() -> None:
    """Four blocks of 16 tokens: `continuous` does not start a prompt that would not fit, whatever the limit allows."""
    seen = MostRunning()
    run_prompts(limit(max_running=8), seen, prompts=[[1] * 40, [2] * 40], labels={"tenant": "a"}, num_blocks=4)
    assert seen.most == 1


def test_preempted_requests_do_not_count() -> None:
    done = run_prompts(
        limit(max_running=2),
        prompts=[[n] * 30 for n in range(1, 5)],
        max_tokens=20,
        num_blocks=4,
        labels={"tenant": "a"},
    )
    assert sum(completion.num_preempted for completion in done) > 0
    assert [len(completion.token_ids) for completion in done] == [20] * 4
