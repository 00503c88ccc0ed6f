"""Simulated clusters: every policy on the same jobs, and how far each is from what no schedule could beat.

FlashPS's setting (EuroSys '26, section 6.5): 8 workers with the published step times of an H800 and Flux,
production's masks and step counts, every template in memory. Jobs arrive by chance, 0.25 to 0.5 a second a worker,
or in bursts, as in a real trace. The baselines bind a job to a worker at its arrival, as in the paper; ours keeps it
in the router's line until a worker has a place. Then templates with Zipf popularity of which few fit into memory,
with and without affinity, jobs of several pictures with those kept together and spread, and the rule by which a
policy is asked about few of many workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

from giornata.scheduling.demand import Demand
from giornata.scheduling.policies import Candidate, Policy, PolicyName, finish_time
from giornata.scheduling.scheduler import InTurn
from giornata.wire.workers import Tier
from giornata_tools.loadgen import facts
from giornata_tools.loadgen.distributions import Mix, zipf
from giornata_tools.loadgen.workload import MaskShape, Workload
from giornata_tools.simulation.jobs import PictureSetting, template_name
from giornata_tools.simulation.machines import DECODE_MS, FLUX_PICTURE, h800_flux
from giornata_tools.simulation.scenario import ArrivalSetting, Scenario
from giornata_tools.simulation.simulator import Binding, RunOptions, Stages
from giornata_tools.simulation.worker import TemplateSetting
from tests.bench.reporting import report
from tests.flags import option, parsed

WORKERS: Final = 8
SLO_S: Final = 5.0
WARMUP_S: Final = 30.0
TEMPLATES: Final = 970
TEMPLATE_BYTES: Final = 4.3e9
"""Of Flux at 1024 x 1024: keys and values in 4 bits at 6 noise levels."""
MEMORY_BYTES: Final = 128e9
"""For templates, of each worker."""

WHOLE: Final = "finish_time, jobs whole"
PAPER: Final = tuple((policy, Binding.ARRIVAL) for policy in PolicyName)
OURS: Final = tuple(
    (policy, Binding.LATE)
    for policy in (PolicyName.REQUEST_LEVEL, PolicyName.FINISH_TIME, PolicyName.DEADLINE_AWARE)
)


@dataclass(frozen=True)
class Case:
    """One setting at one rate."""

    name: str
    rate: float
    """A second a worker."""
    scenario: Scenario
    compared: Sequence[tuple[PolicyName, Binding]]
    policies: tuple[tuple[str, Policy], ...] = ()
    """Besides, by name, with late binding."""
    keeps: bool = False
    """Also `finish_time` where all pictures of a job go to one worker."""


def scenario(seconds: float, **changed: Any) -> Scenario:
    """FlashPS's, with what is `changed`: `images`, `masks`, `templates`, `cv`, `picture`, `workers` and `kept`."""
    weights: Mix = changed.get("templates", {0: 1.0})
    work = Workload(
        facts.MASK_RATIOS[changed.get("masks", "production")],
        facts.STEPS,
        changed.get("images", {1: 1.0}),
        weights,
        MaskShape.SQUARE,
    )
    machine = h800_flux()
    machine = replace(machine, storage=replace(machine.storage, memory_bytes=MEMORY_BYTES))
    workers = changed.get("workers", WORKERS)
    return Scenario(
        (machine,) * workers,
        work,
        ArrivalSetting(seconds, WARMUP_S, changed.get("cv", 1.0)),
        changed.get("picture", FLUX_PICTURE),
        changed.get("kept", TemplateSetting(preloaded=(template_name(0),))),
        Stages(0.0, DECODE_MS, workers),
        slo_s=SLO_S,
    )


def cases(seconds: float) -> Iterator[Case]:
    """All settings."""
    for rate in (0.25, 0.4, 0.5):
        yield Case("FlashPS", rate, scenario(seconds), (*PAPER, *OURS))
    yield Case("FlashPS, bursty", 0.25, scenario(2 * seconds, cv=facts.BURSTS), (*PAPER, *OURS))
    yield Case("public trace's masks", 0.35, scenario(seconds, masks="public"), (*PAPER, *OURS))
    for rate in (0.1, 0.18):
        pictures = scenario(seconds, images=facts.IMAGES)
        yield Case("1 to 8 pictures", rate, pictures, (*PAPER, *OURS), keeps=True)
    own = PictureSetting(FLUX_PICTURE.text, FLUX_PICTURE.image, halo=1, corrects=True)
    yield Case("halo 1, first step in full", 0.4, scenario(seconds, picture=own), (*PAPER, *OURS))
    popular = zipf(TEMPLATES, facts.ZIPF)
    kept = TemplateSetting(size_bytes=TEMPLATE_BYTES, registered=frozenset(map(template_name, popular)))
    many = scenario(4 * seconds, templates=popular, kept=kept)
    yield Case(
        f"{TEMPLATES} templates, cold",
        0.15,
        many,
        ((PolicyName.REQUEST_LEVEL, Binding.LATE), (PolicyName.FINISH_TIME, Binding.LATE)),
        (("finish_time without affinity", without_affinity),),
    )


def without_affinity(candidates: Sequence[Candidate], demand: Demand) -> Candidate | None:
    """`finish_time`, told that every worker has the job's template."""
    alike = tuple(shape.load(h800_flux().pace, reuses=True) for shape in demand.shapes)
    return finish_time([c._replace(template=Tier.MEMORY, loads=alike) for c in candidates], demand)


def rows_of(case: Case, seeds: int) -> Iterator[dict[str, Any]]:
    """Of every policy: means over seeds."""
    rate, number = case.rate * len(case.scenario.machines), len(case.scenario.machines)
    arrivals = {seed: case.scenario.jobs(rate, seed) for seed in range(1, seeds + 1)}
    bounds = [case.scenario.bound(jobs) for jobs in arrivals.values()]
    least = [bound.percentile(95, warmup_s=WARMUP_S) for bound in bounds]
    least_mean = fmean(bound.mean(warmup_s=WARMUP_S) for bound in bounds)
    compared = [(policy.value, policy, binding, None) for policy, binding in case.compared]
    tried = [(name, PolicyName.FINISH_TIME, Binding.LATE, policy) for name, policy in case.policies]
    whole = [(WHOLE, PolicyName.FINISH_TIME, Binding.LATE, None)] if case.keeps else []
    baseline = 0.0
    for name, policy, binding, instead in (*compared, *tried, *whole):
        found = []
        for seed, jobs in arrivals.items():
            by_deadline = policy is PolicyName.DEADLINE_AWARE
            options = RunOptions(
                policy,
                binding,
                spreads=name != WHOLE,
                by_deadline=by_deadline,
                looked_at=number,
                seed=seed,
            )
            found.append(
                case.scenario.summary(
                    case.scenario.run(jobs, options, scheduler=instead and InTurn(instead, number))
                )
            )
        p95 = [summary.p95_s for summary in found]
        if name == PolicyName.REQUEST_LEVEL and not baseline:
            baseline = fmean(p95)
        yield {
            "setting": case.name,
            "rate": case.rate,
            "policy": name,
            "binding": binding.value,
            "P95 gain": round(1 - fmean(p95) / baseline, 3) if baseline else "",
            "mean": round(fmean(s.mean_s for s in found), 3),
            "P50": round(fmean(s.p50_s for s in found), 3),
            "P95": round(fmean(p95), 3),
            "spread": round((max(p95) - min(p95)) / 2, 3),
            "P99": round(fmean(s.p99_s for s in found), 3),
            "gap": round(fmean(p95) / fmean(least) - 1, 3),
            "in 5 s": round(fmean(s.slo_share or 0.0 for s in found), 3),
            "busy": round(fmean(s.utilisation for s in found), 3),
            "rows a step": round(fmean(s.rows_a_step for s in found), 2),
            "hits": round(fmean(s.hit_share for s in found), 3),
        }
    yield {
        "setting": case.name,
        "rate": case.rate,
        "policy": "lower bound",
        "binding": "",
        "P95 gain": round(1 - fmean(least) / baseline, 3),
        "mean": round(least_mean, 3),
        "P95": round(fmean(least), 3),
    }


def sampling(workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A policy that is asked about few of many workers, beside one that is asked about all."""
    many = scenario(seconds, workers=workers)
    many = replace(many, arriving=ArrivalSetting(seconds, seconds))
    jobs = many.jobs(0.5 * workers, 1)
    known = 0.0
    for looked_at in (workers, 16, 4):
        began = time.process_time()
        found = many.summary(many.run(jobs, RunOptions(looked_at=looked_at)))
        known = known or found.p95_s
        yield {
            "setting": f"{workers} workers",
            "rate": 0.5,
            "policy": f"finish_time, looks at {looked_at}",
            "binding": Binding.LATE.value,
            "P95 gain": round(1 - found.p95_s / known, 4),
            "mean": round(found.mean_s, 3),
            "P50": round(found.p50_s, 3),
            "P95": round(found.p95_s, 3),
            "P99": round(found.p99_s, 3),
            "busy": round(found.utilisation, 3),
            "processor s": round(time.process_time() - began, 1),
        }


def main() -> None:
    """Print and write ``out/bench/simulation.json``."""
    options = parsed(
        __doc__,
        [
            option("--seconds", type=float, default=200.0, help="virtual, of each run"),
            option("--seeds", type=int, default=2, help="runs of each policy, with jobs of their own"),
            option("--workers", type=int, default=200, help="of the cluster that tries the sampling rule"),
            option("--only", default="", help="settings whose names begin so"),
        ],
    )
    rows: list[dict[str, Any]] = []
    for case in cases(options.seconds):
        if case.name.startswith(options.only):
            for row in rows_of(case, options.seeds):
                print(*(f"{name} {value}" for name, value in row.items()), sep=", ", flush=True)
                rows.append(row)
    if "workers".startswith(options.only):
        rows += sampling(options.workers, options.seconds / 20)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    report.write(
        "simulation",
        [{name: row.get(name, "") for name in columns} for row in rows],
        workload={
            "workers": WORKERS,
            "machine": "NVIDIA H800, published step times of Flux at 1024 x 1024",
            "seconds": options.seconds,
            "seeds": options.seeds,
            "slo_s": SLO_S,
            "finish_ms": DECODE_MS,
            "rate": "jobs a second a worker",
            "gain": "of P95 over request_level bound at arrival, or late where that was not run",
            "gap": "of P95 to the lower bound, over it",
            "bound": "clairvoyant relaxation, see giornata_tools.simulation.bound",
        },
    )


if __name__ == "__main__":
    main()
