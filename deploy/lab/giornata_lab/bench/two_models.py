"""Two models, a worker each, one router: what does each lose by the other's load? Simulated.

``python -m giornata_lab.bench.two_models`` prints each model's latency beside the other's load ÷ alone, the same jobs
in both runs. Flux runs on an H800 with its published step times; a step of SDXL, guided, takes the share of that
which its operations take. Line, placement and policy are the router's own. In the second setting the other model gets
twice the jobs that its worker can serve, so that its queue grows to the end. What two workers lose to each other on
one machine's processors is not simulated: each has a device of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any, Final

from giornata.planning.cost_model import StepCosts
from giornata_lab.bench.reporting.report import write
from giornata_lab.bench.systems.clusters import WARMUP_S, scenario
from giornata_lab.flags import option, parsed
from giornata_lab.loadgen.outcomes import percentile
from giornata_lab.simulation.jobs import SimulatedJob, digest_of
from giornata_lab.simulation.machines import Machine, h800_flux
from giornata_lab.simulation.options import RunOptions
from giornata_lab.simulation.results import SimulatedRun
from giornata_lab.simulation.simulator import Simulation
from giornata_lab.simulation.templates import TemplateSetting

SDXL: Final = 2 * 3.37 / 37.2
"""Operations of a guided step of SDXL at 1024 x 1024 by those of Flux."""
RATES: Final = {"flux": 0.5, "sdxl": 0.5 / SDXL}
"""Jobs a second that keep a worker busy and the line short."""
SETTINGS: Final = {"both busy": 1.0, "the other overloaded": 4.0}
"""How many times its rate the other model gets."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print, write ``out/bench/two_models.json``."""
    options: SimpleNamespace = parsed(
        __doc__,
        [
            option("--seconds", type=float, default=600.0, help="virtual, in which jobs arrive"),
            option("--seeds", type=int, default=5, help="runs, with jobs of their own"),
        ],
        arguments,
    )
    lines = [_line(setting, times, model, options) for setting, times in SETTINGS.items() for model in RATES]
    write("two_models", lines, workload={**vars(options), "rates": RATES})


def _line(setting: str, times: float, model: str, options: SimpleNamespace) -> dict[str, Any]:
    (other,) = set(RATES) - {model}
    means, tails, alone_s = list[float](), list[float](), list[float]()
    for seed in range(1, options.seeds + 1):
        own = _jobs(model, 1.0, options.seconds, seed)
        others = _jobs(other, times, options.seconds, seed + 1000)
        alone, beside = (_latencies(_run(jobs), model) for jobs in (own, own + others))
        means.append(fmean(beside) / fmean(alone))
        tails.append(percentile(beside, 95) / percentile(alone, 95))
        alone_s.append(fmean(alone))
    return {
        "setting": setting,
        "model": model,
        "mean ÷ alone": round(median(means), 3),
        "spread": f"{min(means):.3f}-{max(means):.3f}",
        "P95 ÷ alone": round(median(tails), 3),
        "P95 spread": f"{min(tails):.3f}-{max(tails):.3f}",
        "mean alone, s": round(median(alone_s), 2),
    }


def _machines() -> list[Machine]:
    flux = replace(h800_flux(), model="flux")
    costs = StepCosts(tuple(SDXL * weight for weight in flux.costs.compute), flux.costs.load)
    return [flux, replace(flux, model="sdxl", costs=costs)]


def _jobs(model: str, times: float, seconds: float, seed: int) -> list[SimulatedJob]:
    drawn = scenario(seconds, workers=1).jobs(times * RATES[model], seed)
    return [
        replace(
            job,
            job_id=f"{model}-{job.job_id}",
            demand=replace(job.demand, model=model, model_digest=digest_of(model)),
        )
        for job in drawn
    ]


def _run(jobs: Sequence[SimulatedJob]) -> SimulatedRun:
    ordered = sorted(jobs, key=lambda job: job.at_s)
    templates = TemplateSetting(preloaded=("t0",))
    return Simulation(_machines(), ordered, RunOptions(), templates=templates).run()


def _latencies(run: SimulatedRun, model: str) -> list[float]:
    return [
        ended.latency_s
        for ended in run.ended
        if ended.job.demand.model == model and ended.job.at_s >= WARMUP_S
    ]


if __name__ == "__main__":
    main()
