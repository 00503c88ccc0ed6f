"""Simulated clusters: ours and FlashPS's baselines on the same jobs, and how far each is from what is known to be best.

The baselines are those of FlashPS (EuroSys '26, section 6.5) and its artifact: one line in the order of arrival, from
which a worker gets the next job, whole, while it has fewer than eight; token-level balancing counts masked tokens.
`fair order` is ours without the order of least work and the bound on rows. FlashPS's setting has seven workers that
denoise and one that decodes, step times fitted to its own with reuse, and loads within the step; the other settings
have eight workers with the published step times of full pictures on an H800, scaled down by operations.

All jobs of a run are drawn one by one. Figures are means over runs with their 95 % intervals (Student's t); gains are
of runs with the same jobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any, Final

from scipy import stats

from giornata.scheduling.queue import TenantJobOrder
from giornata_lab.bench import harness
from giornata_lab.flags import option, parsed
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.workload import MaskShape, Mix, Workload, zipf
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.jobs import template_name
from giornata_lab.simulation.machines import DECODE_MS, FLUX_PICTURE, Machine, flashps_flux, h800_flux
from giornata_lab.simulation.options import RunOptions, StageSetting
from giornata_lab.simulation.residency import TemplateSetting
from giornata_lab.simulation.scenario import ArrivalSetting, Scenario

WORKERS: Final = 8
WARMUP_S: Final = 30.0
TEMPLATES: Final = 970
TEMPLATE_BYTES: Final = 4.3e9
"""Size of a template of Flux at 1024 x 1024: keys and values in 4 bits at 6 noise levels."""
MEMORY_BYTES: Final = 128e9
"""For templates, of each worker."""
COMPARED: Final = ("request_level", "token_level", "mask_aware", "fair order", "finish_time")


@dataclass(frozen=True)
class Case:
    """One setting at one rate."""

    name: str
    rate: float
    """A second a worker."""
    scenario: Scenario
    variants: Sequence[str] = COMPARED


def scenario(seconds: float, **changed: Any) -> Scenario:
    """FlashPS's workload on H800, with what is `changed`: `machine`, `workers`, `decoders`, `images`, `masks`,
    `templates`, `cv` and `kept`.
    """
    weights: Mix = changed.get("templates", {0: 1.0})
    work = Workload(
        workload.MASK_RATIOS[changed.get("masks", "production")],
        workload.STEPS,
        changed.get("images", {1: 1.0}),
        weights,
        MaskShape.SQUARE,
    )
    machine: Machine = changed.get("machine", h800_flux())
    machine = replace(machine, storage=replace(machine.storage, memory_bytes=MEMORY_BYTES))
    workers = changed.get("workers", WORKERS)
    return Scenario(
        (machine,) * workers,
        work,
        ArrivalSetting(seconds, WARMUP_S, changed.get("cv", 1.0), independent=True),
        FLUX_PICTURE,
        changed.get("kept", TemplateSetting(preloaded=(template_name(0),))),
        StageSetting(0.0, DECODE_MS, changed.get("decoders", workers)),
        slo_s=5.0,
    )


def cases(seconds: float) -> Iterator[Case]:
    """All settings."""
    for masks, rate in (("production", 0.25), ("production", 0.35), ("mixed", 0.3)):
        seven = scenario(seconds, machine=flashps_flux(), workers=WORKERS - 1, decoders=1, masks=masks)
        yield Case(f"FlashPS, {masks} masks", rate, seven)
    yield Case("H800, production masks", 0.5, scenario(seconds), (*COMPARED, "deadline_aware"))
    yield Case("H800, mixed masks", 0.4, scenario(seconds, masks="mixed"))
    yield Case("H800, bursts", 0.25, scenario(seconds, cv=workload.BURSTS))
    for rate in (0.1, 0.18):
        several = scenario(seconds, images=workload.IMAGES)
        yield Case("H800, 1 to 8 pictures", rate, several, (*COMPARED, "fair order, jobs whole"))
    popular = zipf(TEMPLATES, workload.ZIPF)
    kept = TemplateSetting(size_bytes=TEMPLATE_BYTES, registered=frozenset(map(template_name, popular)))
    many = scenario(seconds, templates=popular, kept=kept)
    yield Case(
        f"{TEMPLATES} templates, cold",
        0.15,
        many,
        ("request_level", "fair order", "finish_time"),
    )


OURS: Final = "finish_time"
BASELINES: Final = (SimPolicy.REQUEST_LEVEL, SimPolicy.TOKEN_LEVEL, SimPolicy.MASK_AWARE)
VARIANTS: Final[Mapping[str, RunOptions]] = {
    **{policy.value: RunOptions.of(policy) for policy in (*BASELINES, SimPolicy.DEADLINE_AWARE)},
    "fair order": RunOptions(turn=TenantJobOrder.ARRIVAL, slack=0.0),
    "fair order, jobs whole": RunOptions(turn=TenantJobOrder.ARRIVAL, slack=0.0, spreads=False),
    OURS: RunOptions(),
}


@dataclass(frozen=True)
class SimulationFigures:
    """One run, or of the bound what no run can beat; seconds."""

    mean: float
    p95: float
    p50: float = math.nan
    p99: float = math.nan
    single_p95: float = math.nan
    """95th percentile of jobs of one picture."""
    busy: float = math.nan
    rows: float = math.nan
    """A step."""
    hits: float = math.nan


BOUND: Final = "lower bound"


def figures(task: tuple[int, str, int], seconds: float) -> SimulationFigures:
    """Run a case by its number, a variant by its name, with a seed."""
    number, variant, seed = task
    case = list(cases(seconds))[number]
    scenario, workers = case.scenario, len(case.scenario.machines)
    jobs = scenario.jobs(case.rate * workers, seed)
    if variant == BOUND:
        bound = scenario.bound(jobs)
        return SimulationFigures(bound.mean(warmup_s=WARMUP_S), bound.percentile(95, warmup_s=WARMUP_S))
    options = replace(VARIANTS[variant], looked_at=workers, seed=seed)
    run = scenario.run(jobs, options)
    found, single = scenario.summary(run), scenario.summary(run.of_rows(1))
    return SimulationFigures(
        found.mean_s,
        found.p95_s,
        found.p50_s,
        found.p99_s,
        single.p95_s,
        found.utilisation,
        found.rows_a_step,
        found.hit_share,
    )


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean; not a number of one value."""
    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def gain(ours: Sequence[SimulationFigures], theirs: Sequence[SimulationFigures]) -> str:
    """By how much less P95 is, of runs with the same jobs."""
    gains = [1 - own.p95 / other.p95 for own, other in zip(ours, theirs, strict=True)]
    spread = interval(gains)
    return f"{fmean(gains):.1%}" + ("" if math.isnan(spread) else f" ± {spread:.1%}")


def rows_of(case: Case, found: Mapping[str, Sequence[SimulationFigures]]) -> Iterator[dict[str, Any]]:
    """A row for every variant."""
    p95 = {name: fmean(run.p95 for run in runs) for name, runs in found.items()}
    best = min((name for name in found if name != BOUND), key=lambda name: p95[name])
    for name, runs in found.items():
        means = {key: fmean(asdict(run)[key] for run in runs) for key in asdict(runs[0])}
        compared = {f"P95 less than {other}": "" for other in (*BASELINES, "fair order")}
        for other in (*BASELINES, "fair order"):
            if other in found and name not in (other, BOUND):
                compared[f"P95 less than {other}"] = gain(runs, found[other])
        shown = {key: "" if math.isnan(value) else round(value, 3) for key, value in means.items()}
        yield {
            "setting": case.name,
            "rate": case.rate,
            "served by": name,
            **shown,
            "± p95": round(interval([run.p95 for run in runs]), 3),
            "over the bound": round(p95[name] / p95[BOUND] - 1, 3),
            "best known": "best known" if name == best else "",
            **compared,
        }


def main() -> None:
    """Print and write ``out/bench/simulation.json``."""
    options = parsed(
        __doc__,
        [
            option("--seconds", type=float, default=900.0, help="virtual, of each run after its warm-up"),
            option("--seeds", type=int, default=5, help="runs of each kind, with jobs of their own"),
            option("--only", default="", help="settings whose names begin so"),
            option("--processes", type=int, default=1, help="runs at the same time"),
        ],
    )
    rows: list[dict[str, Any]] = []
    run = partial(figures, seconds=options.seconds)
    seeds = range(1, options.seeds + 1)
    with ProcessPoolExecutor(options.processes) as pool:
        for number, case in enumerate(cases(options.seconds)):
            if case.name.startswith(options.only):
                names = (*case.variants, BOUND)
                runs = pool.map(run, [(number, name, seed) for name in names for seed in seeds])
                found = {name: [next(runs) for _ in seeds] for name in names}
                for row in rows_of(case, found):
                    print(
                        *(f"{name} {value}" for name, value in row.items() if value != ""),
                        sep=", ",
                        flush=True,
                    )
                    rows.append(row)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    harness.write(
        "simulation",
        [{name: row.get(name, "") for name in columns} for row in rows],
        workload={
            "seconds": options.seconds,
            "seeds": list(seeds),
            "rate": "jobs a second a worker",
            "±": "half the 95 % interval of the mean over seeds",
            "bound": "clairvoyant relaxation, see giornata_lab.simulation.bound",
        },
    )


if __name__ == "__main__":
    main()
