"""What a decision costs the router, by the size of the fleet; and what foretelling and taking in telemetry cost.

`decision` chooses a worker and counts the job there; `decide` is all that the scheduler does for a job that joins the
line, and what it takes to apply it.

Every worker has running edits with masks, and templates in memory; each job that is placed counts for the next one.
With many workers the policy is asked about those with least to compute and those that have the template; `all` asks
about every worker. With ``--loras`` every job has as many, and workers tell 256 of 5,000 in each of two tiers. With
``--devices`` workers are pools of so many, and every job and row has a deadline.
``python -m giornata_lab.bench.router_decision --help``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, Final

from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.degrees.pool import DEGREES
from giornata.scheduling.demand import JobDemand, RowShape, estimate_computed
from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import FairQueue, RowQueue, SchedulingParams
from giornata.scheduling.scheduler import LOOKED_AT, QueueOrderScheduler, Scheduler
from giornata.wire.workers import (
    CostFit,
    DegreeCosts,
    RankPhase,
    RankState,
    RowProgress,
    ServiceName,
    ServiceState,
    Tier,
    WorkerCosts,
    WorkerState,
)
from giornata_lab.bench.harness import Measurement, measured, write
from giornata_lab.bench.systems.networks import plain
from giornata_lab.flags import Several, option, parsed
from giornata_lab.simulation.baselines import POLICIES, SimPolicy
from giornata_lab.simulation.simulator import CARD

TEMPLATES: Final = 970
LORAS: Final = 5_000
TOLD: Final = 256
"""LoRAs of a tier that telemetry lists."""


def fleet(workers: int, chance: random.Random, loras: int = 0, devices: int = 1) -> list[ServiceState]:
    """Busy workers: 3 to 7 of 8 places taken; with LoRAs where jobs have `loras`, each a pool of so many `devices`."""
    fit = CostFit(weights=(3.0, 0.1, 0.01, 1e-7, 0.0, 0.0), r2=1, residual_ms=1, samples=9, outliers=0)
    load = CostFit(weights=(0.1, 1e-6), r2=1, residual_ms=1, samples=9, outliers=0)
    wide = tuple(
        DegreeCosts(degree=degree, compute=fit.model_copy(update={"weights": _wide(degree)}))
        for degree in DEGREES[1:]
        if degree <= devices
    )
    costs = WorkerCosts(compute=fit, load=load, device="gpu", degrees=wide)
    ranks = tuple(RankState(device=f"cuda:{rank}", phase=RankPhase.READY) for rank in range(devices))
    return [
        ServiceState(
            service=ServiceName.DENOISER,
            instance=f"d{worker}",
            host="h",
            version="0",
            ready=True,
            models=(CARD,),
            worker=WorkerState(
                capacity_rows=8,
                capacity_tokens=1 << 20,
                running=tuple(_row(worker, index, chance, devices) for index in range(chance.randint(3, 7))),
                ranks=ranks if devices > 1 else (),
                cost_model=costs,
                blocks=plain(57),
                resident={Tier.MEMORY: tuple(f"t{chance.randrange(TEMPLATES)}" for _ in range(64))},
                adapters_resident={
                    tier: tuple(f"l{number}" for number in chance.sample(range(LORAS), TOLD))
                    for tier in ((Tier.MEMORY, Tier.DISK) if loras else ())
                },
            ),
        )
        for worker in range(workers)
    ]


def _wide(degree: int) -> tuple[float, ...]:
    """Weights of steps on so many devices."""
    return (5.0, 0.1, 0.012 / degree, 1.2e-7 / degree, 0.0, 0.0)


def _row(worker: int, index: int, chance: random.Random, devices: int) -> RowProgress:
    return RowProgress(
        job_id=f"w{worker}-{index}",
        attempt=1,
        index=0,
        step=chance.randint(0, 20),
        steps=30,
        tokens=4096,
        computed_tokens=chance.randint(200, 1500),
        text_tokens=512,
        begun=True,
        degree=1,
        due_ms=chance.uniform(2000, 20_000) if devices > 1 else None,
    )


def demand_of(ticket: int, loras: int, within_ms: float | None = None) -> JobDemand:
    shape = RowShape(text=512, image=4096, computed=600, steps=30)
    template, chance = f"t{ticket % TEMPLATES}", random.Random(ticket)  # noqa: S311 - a workload
    needed = tuple(NeededLora(f"l{number}", 341_000_000) for number in chance.sample(range(LORAS), loras))
    return JobDemand(CARD.name, CARD.digest, (shape,), template, ticket, within_ms=within_ms, adapters=needed)


FLEETS: Final = (8, 100, 1000)
JOBS: Final = 400
WARM_UP: Final = 50
SEED: Final = 1
WITHIN_MS: Final = 5000.0
"""Until when jobs for pools are to be computed."""
AIMS_US: Final = {8: 100, 1000: 2000}
PAPER_US: Final = {8: 600}
"""FlashPS, section 6.6, on its machine."""


def decisions(
    policy: SimPolicy, states: Sequence[ServiceState], looked_at: int, loras: int
) -> tuple[Measurement, Measurement, Measurement]:
    """Milliseconds to choose a worker and count the job there, to foretell a job's finish behind others, and to take in
    one telemetry message.
    """
    placement, choose, heard = Placement(), POLICIES[policy], []
    for state in states:
        began = time.perf_counter()
        placement.observe(state, 0)
        heard.append((time.perf_counter() - began) * 1e3)
    times, foretold = [], []
    for ticket in range(JOBS):
        demand = demand_of(ticket, loras, _within_ms(states))
        began = time.perf_counter()
        worker = choose(placement.candidates(demand, looked_at), demand)
        if worker is not None:
            placement.assign(f"j{ticket}", 1, worker.instance, demand, 0)
        times.append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        estimate_computed(placement.prospects(demand), ahead=10.0, rows=1.0)
        foretold.append((time.perf_counter() - began) * 1e3)
        if ticket >= len(states):  # as many jobs end as come
            placement.release(f"j{ticket - len(states)}", 1)
    return measured(times[WARM_UP:]), measured(foretold[WARM_UP:]), measured(heard)


def whole_decisions(
    scheduler: Scheduler, line: RowQueue, states: Sequence[ServiceState], loras: int
) -> Measurement:
    """Milliseconds until a job that joins the empty `line` counts on its worker."""
    placement = Placement()
    within_ms = _within_ms(states)
    claim = SchedulingParams(finish_by_s=None if within_ms is None else within_ms / 1e3)
    for state in states:
        placement.observe(state, 0)
    times = []
    for ticket in range(JOBS):
        demand = demand_of(ticket, loras)
        began = time.perf_counter()
        joined = line.join(f"j{ticket}", demand, claim, 0)
        for key, worker, rows, passes in scheduler.decide(line, placement, 0).placements:
            placement.assign(key[0], 1, worker, line.serve(key, rows, 0, passes), 0)
        times.append((time.perf_counter() - began) * 1e3)
        line.leave(joined.key)
        if ticket >= len(states):
            placement.release(f"j{ticket - len(states)}", 1)
    return measured(times[WARM_UP:])


def _within_ms(states: Sequence[ServiceState]) -> float | None:
    """Until when jobs of a fleet of pools are to be computed."""
    return WITHIN_MS if any(state.worker and state.worker.ranks for state in states) else None


def main() -> None:
    """Print the table and write ``out/bench/router_decision.json``."""
    options = parsed(
        __doc__,
        [
            option("--fleets", type=Several(int), default=FLEETS, help="numbers of workers"),
            option("--loras", type=int, default=0, help="LoRAs of each job"),
            option("--devices", type=int, default=1, help="devices of each worker"),
        ],
    )
    rows: list[dict[str, Any]] = []
    for workers in options.fleets:
        states = fleet(workers, random.Random(SEED), options.loras, options.devices)  # noqa: S311 - a workload
        for policy in POLICIES:
            for looked_at in sorted({LOOKED_AT, workers}) if workers > 2 * LOOKED_AT else [workers]:
                decision, forecast, telemetry = decisions(policy, states, looked_at, options.loras)
                scheduler = QueueOrderScheduler(POLICIES[policy], looked_at)
                decide = whole_decisions(scheduler, FairQueue(), states, options.loras)
                rows.append(
                    {
                        "workers": workers,
                        "policy": str(policy),
                        "asked about": "all" if looked_at == workers else f"{looked_at} + holders",
                        "decision us": round(decision.p50_ms * 1e3, 1),
                        "p95 us": round(decision.p95_ms * 1e3, 1),
                        "decide us": round(decide.p50_ms * 1e3, 1),
                        "aim us": AIMS_US.get(workers, "-"),
                        "paper us": PAPER_US.get(workers, "-"),
                        "forecast us": round(forecast.p50_ms * 1e3, 1),
                        "telemetry us": round(telemetry.p50_ms * 1e3, 1),
                    }
                )
    write(
        "router_decision",
        rows,
        workload={
            "jobs": JOBS,
            "templates": TEMPLATES,
            "loras": options.loras,
            "devices": options.devices,
            "seed": SEED,
        },
    )


if __name__ == "__main__":
    main()
