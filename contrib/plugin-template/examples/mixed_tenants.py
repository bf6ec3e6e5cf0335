"""Serve one heavy and two light tenants with whatever the configuration says, and print how long each waited.

TREADLE_EXECUTE__STRATEGY=simulated TREADLE_ORDER__STRATEGY=round_robin python examples/mixed_tenants.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from treadle import Completion, Engine, SamplingParams

NUM_REQUESTS: Mapping[str, int] = {"heavy": 200, "light": 10, "lighter": 5}


def main() -> None:
    """One row for each tenant. Fails when a request did not end by itself."""
    with Engine.load() as engine:
        done = serve(engine)
    for tenant, completions in done.items():
        for completion in completions:
            completion.raise_for_error()
        waits = [completion.ttft_s or 0.0 for completion in completions]
        waited = f"first token after {mean(waits):6.2f} s on average, {max(waits):6.2f} s at most"
        print(f"{tenant:8} {len(waits):4} requests, {waited}")


def serve(engine: Engine) -> Mapping[str, Sequence[Completion]]:
    """All requests at once, the heavy tenant's first."""
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    handles = {
        tenant: [engine.submit(range(1, 100), params, labels={"tenant": tenant}) for _ in range(number)]
        for tenant, number in NUM_REQUESTS.items()
    }
    engine.drain()
    return {tenant: [handle.result() for handle in of_tenant] for tenant, of_tenant in handles.items()}


if __name__ == "__main__":
    main()
