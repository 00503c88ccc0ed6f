"""What a submission costs the router by itself, however many jobs are queued.

Limits, fair order and forecast of one more job, and what is kept of it, in CPU time. The queued jobs are of many
tenants; as many as the window holds are prepared and wait in the line. ``python -m giornata_lab.bench.submission
--help``.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any, Final

from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import FairQueue, InFlightJobWindow, JobQueue, QueuedJob, SchedulingParams
from giornata.wire.jobs import Priority
from giornata_lab.bench.reporting.report import measured, write
from giornata_lab.bench.router_decision import SEED
from giornata_lab.bench.systems.deciding import CARD, fleet
from giornata_lab.flags import Several, option, parsed
from giornata_router.admission import FinishTimeEstimator, QueueLimiter

QUEUED: Final = (0, 1000, 10_000, 100_000)
WORKERS: Final = 100
TENANTS: Final = 100
JOBS: Final = 400
WARM_UP: Final = 50
AIM_MS: Final = 1.0
SHAPE: Final = RowShape(text=512, image=4096, computed=600, steps=30)


def queued_job(number: int, chance: random.Random) -> QueuedJob:
    """A job with a budget that never ends."""
    priority = Priority.BATCH if chance.random() < 0.5 else Priority.INTERACTIVE
    tenant = f"t{chance.randrange(TENANTS)}"
    return QueuedJob(f"j{number}", priority, tenant, 1.0, CARD.digest, 1, 30, 0.0, 1e9)


def submissions(queued: int, workers: int) -> dict[str, Any]:
    """One row of the table: `queued` jobs before a fleet of `workers`."""
    chance = random.Random(SEED)  # noqa: S311 - a workload
    placement, line, waiting, window = Placement(), FairQueue(), JobQueue(), InFlightJobWindow(64)
    for state in fleet(workers, chance):
        placement.observe(state, 0)
    window.resize(8 * workers)
    forecasting = FinishTimeEstimator(placement, line)
    demand = JobDemand(CARD.name, CARD.digest, (SHAPE,))
    forecasting.learn(demand)
    places = QueueLimiter(dict.fromkeys(Priority, 10**6), 1.0)
    tracemalloc.start()
    for number in range(queued):
        waiting.join(queued_job(number, chance))
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    while (turn := waiting.next(0)) is not None and window.has_room(turn):
        waiting.serve(turn)
        window.begin(turn)
        line.join(turn.job.job_id, demand, SchedulingParams(turn.job.priority, turn.job.tenant), 0)
    times, turns = [], []
    for number in range(JOBS):
        job = queued_job(queued + number, chance)
        began = time.thread_time()
        places.check(job)
        forecasting.admit(job, waiting.ahead(job))
        places.take(job)
        waiting.join(job)
        times.append((time.thread_time() - began) * 1e3)
        began = time.thread_time()
        turn = waiting.next(0)
        if turn is not None:
            waiting.serve(turn)
        turns.append((time.thread_time() - began) * 1e3)
    submitted, turned = measured(times[WARM_UP:]), measured(turns[WARM_UP:])
    return {
        "queued": queued,
        "in the line": len(line),
        "submission us": round(submitted.p50_ms * 1e3, 1),
        "p95 us": round(submitted.p95_ms * 1e3, 1),
        "aim us": AIM_MS * 1e3,
        "next turn us": round(turned.p50_ms * 1e3, 1),
        "bytes a job": round(held_bytes / queued) if queued else 0,
    }


def main() -> None:
    """Print the table and write ``out/bench/submission.json``."""
    options = parsed(
        __doc__,
        [
            option("--queued", type=Several(int), default=QUEUED, help="numbers of queued jobs"),
            option("--workers", type=int, default=WORKERS, help="workers of 8 rows"),
        ],
    )
    rows = [submissions(queued, options.workers) for queued in options.queued]
    write("submission", rows, workload={"workers": options.workers, "tenants": TENANTS, "seed": SEED})


if __name__ == "__main__":
    main()
