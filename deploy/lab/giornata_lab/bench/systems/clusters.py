"""The simulated clusters of the benchmark `simulation`, and what they serve."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.policies import CandidateWorker, finish_time
from giornata.wire.workers import Tier
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.workload import MaskShape, Mix, Workload, zipf
from giornata_lab.simulation.jobs import template_name
from giornata_lab.simulation.machines import DECODE_MS, FLUX_PICTURE, Machine, flashps_flux, h800_flux
from giornata_lab.simulation.options import RunOptions, StageSetting
from giornata_lab.simulation.scenario import ArrivalSetting, Scenario
from giornata_lab.simulation.templates import TemplateSetting

WORKERS: Final = 8
WARMUP_S: Final = 30.0
TEMPLATES: Final = 970
TEMPLATE_BYTES: Final = 4.3e9
"""Size of a template of Flux at 1024 x 1024: keys and values in 4 bits at 6 noise levels."""
MEMORY_BYTES: Final = 128e9
"""For templates, of each worker."""
WITHOUT_AFFINITY: Final = "finish_time without affinity"
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
        ("request_level", "fair order", "finish_time", WITHOUT_AFFINITY),
    )


def without_affinity(candidates: Sequence[CandidateWorker], demand: JobDemand) -> CandidateWorker | None:
    """`finish_time`, told that every worker has the job's template."""
    alike = tuple(shape.load(h800_flux().pace, reuses=True) for shape in demand.shapes)
    return finish_time([c._replace(template=Tier.MEMORY, loads=alike) for c in candidates], demand)


def many_workers(workers: int, seconds: float) -> Iterator[dict[str, Any]]:
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
            "served by": f"finish_time, looks at {looked_at}",
            "mean": round(found.mean_s, 3),
            "p50": round(found.p50_s, 3),
            "p95": round(found.p95_s, 3),
            "p99": round(found.p99_s, 3),
            "busy": round(found.utilisation, 3),
            "P95 less than all": f"{1 - found.p95_s / known:.2%}",
            "processor s": round(time.process_time() - began, 1),
        }
