"""What a decision costs the router, by the size of the fleet; and what foretelling and taking in telemetry cost.

`decision` chooses a worker and counts the job there; `decide` is all that the scheduler does for a job that joins the
line, and what it takes to apply it; `look` chooses the likely workers of 16 jobs with LoRAs that wait while all workers
are full, which happens four times a second at most. Of `rock`, which asks no policy, `decision` is the matching when a
place becomes free while :data:`WAITING` jobs wait in queues by kind.

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

from giornata.scheduling.demand import estimate_computed
from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import RELOOK_S, FairQueue, RowQueue, SchedulingParams
from giornata.scheduling.scheduler import AHEAD, LOOKED_AT, QueueOrderScheduler, RowAssignment, Scheduler
from giornata.wire.workers import ServiceState
from giornata_lab.bench.reporting.report import Measurement, measured, write
from giornata_lab.bench.systems.deciding import TEMPLATES, demand_of, fleet, mixed
from giornata_lab.flags import Several, option, parsed
from giornata_lab.simulation.baselines import POLICIES, SimPolicy
from giornata_lab.simulation.rock_fit import fit_kinds
from giornata_lab.simulation.rock_kinds import JobKindQueue, RockScheduler

FLEETS: Final = (8, 100, 1000)
JOBS: Final = 400
WARM_UP: Final = 50
FITTED: Final = 600
"""Jobs of a mixture of kinds."""
WAITING: Final = 64
"""Jobs while a place becomes free."""
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


def looks(policy: SimPolicy, states: Sequence[ServiceState], looked_at: int, loras: int) -> Measurement:
    """Milliseconds to choose the likely workers of those who wait; none where jobs have no LoRAs."""
    placement, line = Placement(), FairQueue()
    scheduler = QueueOrderScheduler(POLICIES[policy], looked_at)
    for state in states:
        placement.observe(state, 0)
        for number in range(8):
            placement.assign(f"{state.instance} {number}", 1, state.instance, demand_of(number, 0), 0)
    for ticket in range(2 * AHEAD):
        line.join(f"j{ticket}", demand_of(ticket, loras), SchedulingParams(), 0)
    times = []
    for number in range(JOBS // 4):
        began = time.perf_counter()
        scheduler.decide(line, placement, RELOOK_S * (number + 1))
        times.append((time.perf_counter() - began) * 1e3)
    return measured(times)


def kinds_line(loras: int) -> JobKindQueue:
    """ROCK's line, with a model of as many jobs as it is fitted to."""
    line, chance = JobKindQueue(), random.Random(SEED)  # noqa: S311 - a workload
    for ticket in range(FITTED):
        joined = line.join(f"f{ticket}", mixed(ticket, loras, chance), SchedulingParams(), 0.1 * ticket)
        line.leave(joined.key)
    jobs = line.to_fit(0.1 * FITTED)
    assert jobs is not None
    line.use(fit_kinds(jobs))
    return line


def matches(states: Sequence[ServiceState], loras: int) -> Measurement:
    """Milliseconds of ROCK's to give a place that becomes free to one of many jobs."""
    placement, line, chance = Placement(), kinds_line(loras), random.Random(SEED)  # noqa: S311 - a workload
    held: list[str] = []
    for state in states:
        assert state.worker is not None
        idle = state.worker.model_copy(update={"running": ()})
        placement.observe(state.model_copy(update={"worker": idle}), 0)
        for number in range(idle.capacity_rows):
            placement.assign(f"{state.instance} {number}", 1, state.instance, demand_of(number, 0), 0)
            held.append(f"{state.instance} {number}")
    for ticket in range(WAITING):
        line.join(f"j{ticket}", mixed(ticket, loras, chance), SchedulingParams(), 0)
    times = []
    for number in range(JOBS):
        placements: Sequence[RowAssignment] = ()
        while not placements:  # a place may be beyond the workers that are looked at
            placement.release(held.pop(chance.randrange(len(held))), 1)
            began = time.perf_counter()
            placements = RockScheduler().decide(line, placement, number).placements
        for key, worker, rows, passes in placements:
            placement.assign(key[0], 1, worker, line.serve(key, rows, number, passes), number)
        times.append((time.perf_counter() - began) * 1e3)
        for key, *_ in placements:
            held.append(key[0])
            line.join(f"{key[0]}'", mixed(number, loras, chance), SchedulingParams(), number)
    return measured(times[WARM_UP:])


def _within_ms(states: Sequence[ServiceState]) -> float | None:
    """Until when jobs of a fleet of pools are to be computed."""
    return WITHIN_MS if any(state.worker and state.worker.ranks for state in states) else None


def _rock_row(workers: int, states: Sequence[ServiceState], loras: int) -> dict[str, Any]:
    decide = whole_decisions(RockScheduler(), kinds_line(loras), states, loras)
    matched = matches(states, loras)
    return {
        "workers": workers,
        "policy": str(SimPolicy.ROCK),
        "asked about": f"{LOOKED_AT} + holders" if workers > 2 * LOOKED_AT else "all",
        "decision us": round(matched.p50_ms * 1e3, 1),
        "p95 us": round(matched.p95_ms * 1e3, 1),
        "decide us": round(decide.p50_ms * 1e3, 1),
    }


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
                        "look us": round(looks(policy, states, looked_at, options.loras).p50_ms * 1e3, 1),
                        "aim us": AIMS_US.get(workers, "-"),
                        "paper us": PAPER_US.get(workers, "-"),
                        "forecast us": round(forecast.p50_ms * 1e3, 1),
                        "telemetry us": round(telemetry.p50_ms * 1e3, 1),
                    }
                )
        if options.devices == 1:
            rows.append(_rock_row(workers, states, options.loras))
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
