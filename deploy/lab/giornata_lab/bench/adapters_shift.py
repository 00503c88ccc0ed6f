"""How soon devices follow: all ranks of 220 adapters change at once, simulated, in ROCK's testbed.

Told is the share of jobs that found their adapters ready, before the change and in spans of 30 s after it, and when it
is within 5 points of what it was for the first time, over two spans. The clusters and policies are those of
``adapters_at_scale``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

from giornata_lab.bench.adapters_at_scale import VARIANTS
from giornata_lab.bench.reporting import report
from giornata_lab.bench.systems.adapter_rooms import paper_jobs, room
from giornata_lab.flags import Several, option, parsed
from giornata_lab.simulation.results import LEAST_WAIT_S
from giornata_lab.simulation.simulator import Simulation

CHANGE_S: Final = 1200.0
WARMUP_S: Final = 300.0
SPAN_S: Final = 30.0
SPANS: Final = 12
NEAR: Final = 0.05
Wait = tuple[float, bool]
"""When rows with adapters got a worker, and whether they found these ready."""


def waits_of(name: str, seed: int, rate: float, device_mb: float) -> list[Wait]:
    """One run's."""
    variant, here = VARIANTS[name], room(device_mb * 1e6)
    jobs = paper_jobs(seed, rate=rate, seconds=2 * CHANGE_S, shift_s=CHANGE_S)
    adapters = here.adapters
    run = Simulation(here.machines, jobs, replace(variant.options, seed=seed), adapters=adapters).run()
    return [(at_s, s <= LEAST_WAIT_S) for worker in run.workers for at_s, s, _ in worker.waits]


def share(waits: Sequence[Wait], since_s: float, until_s: float) -> float:
    """Share of rows that found their adapters ready, among those that got a worker then."""
    found = [ready for at_s, ready in waits if since_s <= at_s < until_s]
    return sum(found) / max(1, len(found))


def row_of(name: str, waits: Sequence[Wait]) -> dict[str, Any]:
    """One way to serve, all seeds together."""
    before = share(waits, WARMUP_S, CHANGE_S)
    starts = [CHANGE_S + SPAN_S * place for place in range(SPANS + 1)]
    spans = [share(waits, one, other) for one, other in pairwise(starts)]
    follows = (
        SPAN_S * (place + 1)
        for place, (one, other) in enumerate(pairwise(spans))
        if (one + other) / 2 >= before - NEAR
    )
    return {
        "served by": name,
        "before": round(before, 3),
        "after, by 30 s": " ".join(f"{100 * one:.0f}" for one in spans),
        "as before within, s": next(follows, ""),
    }


def main() -> None:
    """Print and write ``out/bench/adapters_shift.json``."""
    options = parsed(
        __doc__,
        [
            option("--seeds", type=int, default=3, help="runs of each kind, with jobs of their own"),
            option("--rate", type=float, default=0.6, help="jobs a second"),
            option("--device-mb", type=float, default=2048.0, help="for adapters"),
            option("--only", type=Several(str), default="lrums,proactive,rock,ours", help="variants by name"),
        ],
    )
    rows = []
    for name in options.only:
        runs = [waits_of(name, seed, options.rate, options.device_mb) for seed in range(options.seeds)]
        rows.append(row_of(name, [wait for run in runs for wait in run]))
        print(*rows[-1].values(), flush=True)
    report.write("adapters_shift", rows, workload=vars(options))


if __name__ == "__main__":
    main()
