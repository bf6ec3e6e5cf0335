"""A stranger's package: installed, named, at work, and gone again. It is the template of contrib/, unchanged."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.packaging.conftest import Environment

STRANGER = Path(__file__).resolve().parents[2] / "contrib" / "plugin-template"

BASE = """
[execute]
strategy = "simulated"
"""
NAMED = f"""
plugins = ["tenant_limit"]
{BASE}
[order]
strategy = "round_robin"
turn_s = 2.0

[plugin.tenant_limit]
max_running = 1
"""
SERVE = """
import json, sys
from collections import Counter
from treadle import Engine, SamplingParams, hookimpl

class Most:
    running, most, started = Counter(), Counter(), []
    @hookimpl
    def request_admitted(self, request):
        tenant = request.labels["tenant"]
        self.started.append(tenant)
        self.running[tenant] += 1
        self.most[tenant] = max(self.most[tenant], self.running[tenant])
    @hookimpl
    def request_finished(self, request):
        self.running[request.labels["tenant"]] -= 1

watch = Most()
with Engine.load(sys.argv[1], plugins=[watch]) as engine:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    handles = [engine.submit([1, 2, 3], params, labels={"tenant": tenant}) for tenant in "aaaabb"]
    engine.drain()
    done = [handle.result() for handle in handles]
print(json.dumps({
    "most": watch.most, "started": "".join(watch.started),
    "num_tokens": [len(c.token_ids) for c in done], "errors": [str(c.error) for c in done if c.error],
}))
"""


@dataclass
class Story:
    """What the commands said, in the order in which they were run."""

    before: Any
    after: Any
    offers: list[dict[str, Any]]
    named: Any
    named_text: str
    served: dict[str, Any]
    served_plainly: dict[str, Any]
    own_tests: subprocess.CompletedProcess[str]
    gone: subprocess.CompletedProcess[str]
    gone_slot: subprocess.CompletedProcess[str]
    at_last: Any = field(default=None)


@pytest.fixture(scope="module", params=["wheel", "editable"])
def story(request: pytest.FixtureRequest, environment_with: Callable[[str], Environment]) -> Story:
    environment = environment_with(request.param)
    base, named = environment.write("base.toml", BASE), environment.write("named.toml", NAMED)
    serve = environment.write("serve.py", SERVE)

    def explain(config: Path) -> Any:
        return json.loads(environment.must("treadle", "explain", "--json", "--config", config))

    before = explain(base)
    option = ["--editable"] if request.param == "editable" else []
    environment.pip("install", *option, f"{STRANGER}[test]")
    found = Story(
        before=before,
        after=explain(base),
        offers=json.loads(environment.must("treadle", "plugins", "--json")),
        named=explain(named),
        named_text=environment.must("treadle", "explain", "--config", named),
        served=json.loads(environment.must("python", serve, named)),
        served_plainly=json.loads(environment.must("python", serve, base)),
        own_tests=environment.run("python", "-m", "pytest", "-p", "no:cacheprovider", STRANGER),
        gone=subprocess.CompletedProcess((), 0),
        gone_slot=subprocess.CompletedProcess((), 0),
    )
    environment.pip("uninstall", "--yes", "treadle-tenant-rules")
    found.gone = environment.run("treadle", "explain", "--config", named)
    slot_only = environment.write("slot.toml", BASE + '[order]\nstrategy = "round_robin"\n')
    found.gone_slot = environment.run("treadle", "config", "check", slot_only)
    found.at_last = explain(base)
    return found


def implementations(facts: Any, hook: str) -> list[str]:
    (found,) = [row["implementations"] for row in facts["hooks"] if row["hook"] == hook]
    return [item["plugin"] for item in found]


def test_installing_it_changes_nothing(story: Story) -> None:
    assert story.after == story.before
    assert "tenant" not in json.dumps(story.after)


def test_it_is_listed_with_its_package(story: Story) -> None:
    its = {f"{o['kind']}.{o['name']}" for o in story.offers if o["package"] == "treadle-tenant-rules 0.1.0"}
    assert its == {"order.round_robin", "plugin.tenant_limit"}


def test_once_named_it_is_in_its_slot(story: Story) -> None:
    (order,) = [slot for slot in story.named["slots"] if slot["slot"] == "order"]
    assert (order["strategy"], order["package"]) == ("round_robin", "treadle-tenant-rules 0.1.0")
    settings = {row["name"]: (row["value"], row["origin"].rpartition("/")[2]) for row in order["settings"]}
    assert settings["turn_s"] == (2.0, "named.toml")
    assert settings["max_delay_s"] == (30.0, "default")
    assert implementations(story.named, "order") == ["order.round_robin"]


def test_its_rule_is_asked_before_the_built_in(story: Story) -> None:
    assert implementations(story.before, "admit") == ["admit.continuous"]
    assert implementations(story.named, "admit") == ["plugin.tenant_limit", "admit.continuous"]
    assert story.named_text.index("plugin.tenant_limit") < story.named_text.rindex("admit.continuous")


def test_everything_else_stays_as_it_was(story: Story) -> None:
    def others(facts: Any) -> list[Any]:
        return [slot for slot in facts["slots"] if slot["slot"] not in ("order", "execute")]

    assert others(story.named) == others(story.before)


def test_a_tenant_is_held_back_by_the_rule_in_front_and_by_nothing_without_it(story: Story) -> None:
    assert story.served_plainly["most"] == {"a": 4, "b": 2}
    assert story.served["most"] == {"a": 1, "b": 1}


def test_everybody_is_served_in_turn(story: Story) -> None:
    assert story.served["num_tokens"] == [8] * 6
    assert story.served["errors"] == []
    assert story.served["started"] == "ababaa"


def test_its_own_tests_pass(story: Story) -> None:
    assert story.own_tests.returncode == 0, story.own_tests.stdout + story.own_tests.stderr


def test_without_the_package_a_configuration_that_names_it_is_refused(story: Story) -> None:
    assert story.gone.returncode == 2
    assert "unknown plugin 'tenant_limit'" in story.gone.stderr
    assert "named.toml" in story.gone.stderr
    assert story.gone_slot.returncode == 2
    assert "unknown strategy 'round_robin' for slot 'order'" in story.gone_slot.stderr
    for strategy in ("fcfs", "priority", "shortest_first"):
        assert strategy in story.gone_slot.stderr


def test_uninstalling_it_leaves_nothing_behind(story: Story) -> None:
    assert story.at_last == story.before
