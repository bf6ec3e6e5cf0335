"""The full product of all strategies over the slots, each with the same workload in a pool that is too small for it.

    python tests/full_product.py [--jobs 2] [--requests 12] [--seed 0]

Prints how many combinations ran, how many refuse to start and why, what failed, and the seconds; exits with 1 on a failure.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial

import structlog

from treadle.errors import ConfigError
from treadle.registry import Registry
from treadle.testing.combinations import full_product, play_row
from treadle.testing.traffic import Arrival, shared_prefix_traffic

NUM_BLOCKS = 6
REGISTRY = Registry.installed()


def try_row(row: dict[str, str], arrivals: list[Arrival]) -> tuple[str, str, dict[str, str]]:
    """Whether the row `ran`, was `refused` or `failed`, and why."""
    try:
        play_row(row, REGISTRY, arrivals=arrivals, num_blocks=NUM_BLOCKS)
    except ConfigError as error:
        return "refused", str(error), row
    except Exception as error:  # whatever goes wrong in one combination is to be told, and the others go on
        return "failed", f"{type(error).__name__}: {error}", row
    return "ran", "", row


def be_quiet() -> None:
    """What goes wrong is told once, by the main process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that share the work")
    parser.add_argument("--requests", type=int, default=12, help="requests of the workload")
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload")
    options = parser.parse_args()
    # the longest request fills the pool
    arrivals = shared_prefix_traffic(options.requests, seed=options.seed, most_prompt=40, most_output=40)
    started_s = time.monotonic()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    with multiprocessing.Pool(options.jobs, be_quiet) as pool:
        tries = pool.imap_unordered(partial(try_row, arrivals=arrivals), full_product(REGISTRY), chunksize=64)
        for what, why, row in tries:
            counts[what] += 1
            if what == "refused":
                reasons[why] += 1
            elif what == "failed" and counts["failed"] <= 20:
                print(f"FAILED {row}: {why[:500]}", flush=True)
    for why, number in sorted(reasons.items()):
        print(f"refused {number}: {why}")
    print(
        f"full product: {sum(counts.values())} combinations, {counts['ran']} ran, "
        f"{counts['refused']} refused at start-up, {counts['failed']} failed, "
        f"{time.monotonic() - started_s:.0f} s with {options.jobs} processes "
        f"({options.requests} requests each, seed {options.seed})"
    )
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
