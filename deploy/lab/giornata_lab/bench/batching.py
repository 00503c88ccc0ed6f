"""How long edits take on one simulated worker: whole requests batched, all rows joined at once, and ours.

*Request-level* is the batching of whole requests with reuse: who waits when the batch has left begins together, up to
eight, and nobody joins. *Joined at once*: as live, but every row joins while there is a place. *Ours* is what serves: a
worker gets the rows that are worth it while so many wait. Loads are shares of the rate at which full batches compute
the same edits. Ratios are to request-level with the same requests, with standard errors over seeds.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import click

from giornata.scheduling.batch import BatchingMode
from giornata_lab.bench.harness import write
from giornata_lab.flags import Several, option, parsed
from giornata_lab.loadgen.workload import MASK_RATIOS, STEPS, MaskShape, Mix, Workload
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.degrees.rules import standard_error
from giornata_lab.simulation.jobs import PictureSetting, template_name
from giornata_lab.simulation.machines import PUBLISHED
from giornata_lab.simulation.options import BindingTime, RunOptions
from giornata_lab.simulation.residency import TemplateSetting
from giornata_lab.simulation.results import SimulationSummary
from giornata_lab.simulation.scenario import ArrivalSetting, Scenario

_Runs = Sequence[SimulationSummary]
MIXED: Final[Mix] = dict.fromkeys((8, 20, 28, 50), 1.0)
BASELINE, AT_ONCE, OURS = "request-level", "joined at once", "ours"


@dataclass(frozen=True)
class BatchingWorkload:
    """One kind of arrivals at one worker."""

    masks: Sequence[float] = tuple(MASK_RATIOS["production"])
    steps: Mix = field(default_factory=lambda: STEPS)
    cv: float = 1.0
    slo: float | None = None
    """In mean times of an edit alone."""


WORKLOADS: Final[Mapping[str, BatchingWorkload]] = {
    "equal small masks": BatchingWorkload((0.05, 0.05), {30: 1.0}),
    "masks of production": BatchingWorkload(),
    "mixed steps": BatchingWorkload(steps=MIXED),
    "deadlines": BatchingWorkload(steps=MIXED, slo=5.0),
    "bursts": BatchingWorkload(cv=4.0),
}


def systems(workload: BatchingWorkload) -> dict[str, RunOptions]:
    """The options of each system."""
    ours = RunOptions.of(SimPolicy.FINISH_TIME if workload.slo is None else SimPolicy.DEADLINE_AWARE)
    ours = replace(ours, telemetry_hz=1.0)  # of one worker it tells nothing that is not known
    whole = RunOptions.of(SimPolicy.REQUEST_LEVEL)
    whole = replace(whole, binding=BindingTime.ARRIVAL, batching=BatchingMode.REQUEST)
    return {BASELINE: whole, AT_ONCE: replace(ours, slack=0.0), OURS: ours}


def simulated(
    workload: BatchingWorkload, machine: str, share: float, requests: int, seeds: Sequence[int]
) -> dict[str, list[SimulationSummary]]:
    """What each system comes to with each seed at a share of the rate of full batches; templates are in memory."""
    worker, kept = PUBLISHED[machine](), TemplateSetting(preloaded=(template_name(0),))
    kind = Workload(workload.masks, workload.steps, {1: 1.0}, {0: 1.0}, MaskShape.SQUARE)
    scenario = Scenario((worker,), kind, picture=PictureSetting(corrects=True), templates=kept)
    loads = [job.demand.loads(worker.pace, reuses=True)[0] for job in scenario.jobs(1.0, 1)]
    full_ms, alone_ms = (
        statistics.fmean(load.work_ms + load.steps * worker.pace.base_ms / rows for load in loads)
        for rows in (worker.rows, 1)
    )
    rate = share * 1e3 / full_ms
    slo_s = workload.slo and workload.slo * alone_ms / 1e3
    scenario = replace(scenario, arriving=ArrivalSetting(requests / rate, 0.0, workload.cv), slo_s=slo_s)
    found = defaultdict[str, list[SimulationSummary]](list)
    for seed in seeds:
        jobs = scenario.jobs(rate, seed)
        for name, options in systems(workload).items():
            found[name].append(scenario.summary(scenario.run(jobs, options)))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print, and write ``out/bench/batching.json``."""
    options = parsed(
        __doc__,
        [
            option("--machine", type=click.Choice(list(PUBLISHED)), default="h800-flux"),
            option("--workloads", type=Several(click.Choice(list(WORKLOADS))), default=list(WORKLOADS)),
            option("--shares", type=Several(float), default=[0.5, 0.7, 0.9, 1.0], help="of full batches"),
            option("--requests", type=int, default=500, help="of a run, on average"),
            option("--seeds", type=int, default=3),
        ],
        arguments,
    )
    lines = []
    for name in options.workloads:
        for share in options.shares:
            seeds = range(1, options.seeds + 1)
            found = simulated(WORKLOADS[name], options.machine, share, options.requests, seeds)
            for system, told in found.items():
                figures = _figures(told, found[BASELINE])
                lines.append({"workload": name, "load": share, "system": system, **figures})
    write("batching", lines, workload=vars(options))


def _figures(found: _Runs, baseline: _Runs) -> dict[str, float | str]:
    figures: dict[str, float | str] = {}
    for measure in ("mean_s", "p95_s", "p99_s"):
        own, other = ([getattr(one, measure) for one in told] for told in (found, baseline))
        ratios = [a / b for a, b in zip(own, other, strict=True)]
        figures[measure] = statistics.fmean(own)
        figures[f"{measure[:-2]} ratio"] = f"{statistics.fmean(ratios):.3f} ± {standard_error(ratios):.3f}"
    return {**figures, "in time": statistics.fmean(one.slo_share or 0.0 for one in found)}


if __name__ == "__main__":
    main()
