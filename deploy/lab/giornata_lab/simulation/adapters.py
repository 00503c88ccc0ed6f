"""LoRAs and ControlNets of simulated jobs. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from giornata.planning.operations import low_rank_weights
from giornata.scheduling.adapters import NeededControl, NeededLora
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.workload import AdapterSizes, Mix, WorkloadRequest, chosen
from giornata_lab.simulation.jobs import SimulatedJob


@dataclass(frozen=True)
class AdapterDemand:
    """What is known of jobs' adapters beside the names of their LoRAs, which requests tell."""

    sizes: AdapterSizes = field(default_factory=AdapterSizes)
    """Sizes of LoRAs."""
    controls: Mix = field(default_factory=lambda: {0: 1.0})
    """Number of ControlNets of a job."""
    joins_within: float = 0.0
    """Share of the steps that may be made before the LoRAs are there; 0 is `lora_wait=exact`."""


def with_adapters(
    jobs: Sequence[SimulatedJob], requests: Sequence[WorkloadRequest], asked: AdapterDemand, seed: int
) -> list[SimulatedJob]:
    """The same jobs with adapters; `requests` are theirs, in the same order. Equal seeds draw equal ones."""
    chance = random.Random(f"{seed} controls")  # noqa: S311 - a workload, no secret
    weights = workload.controlnets()
    known: dict[str, NeededLora] = {}
    made = []
    for job, request in zip(jobs, requests, strict=True):
        for name in request.adapters:
            if name not in known:
                known[name] = NeededLora(name, asked.sizes.of(name, seed))
        loras = tuple(known[name] for name in request.adapters)
        controls = _distinct(chosen(asked.controls, chance.random()), weights, chance)
        made.append(adapted(job, loras, controls, asked.joins_within))
    return made


def adapted(
    job: SimulatedJob,
    loras: Sequence[NeededLora],
    controls: Iterable[int] = (),
    joins_within: float = 0.0,
) -> SimulatedJob:
    """A job with these LoRAs, and ControlNets by their rank of popularity."""
    low_rank = sum(low_rank_weights(0, lora.size_bytes) for lora in loras)
    shapes = tuple(
        replace(shape, low_rank=low_rank, segments=1 / shape.sequences if loras else 0.0)
        for shape in job.demand.shapes
    )
    needed = tuple(NeededControl(control_name(number), 1.0) for number in controls)
    demand = replace(
        job.demand, shapes=shapes, adapters=tuple(loras), controls=needed, joins_within=joins_within
    )
    return replace(job, demand=demand)


def control_name(number: int) -> str:
    """The digest of the ControlNet of this rank of popularity."""
    return f"control{number}"


def held_controls(weight_bytes: int) -> tuple[tuple[str, int], ...]:
    """All ControlNets, of this size, for :attr:`giornata_lab.simulation.machines.Machine.controls`."""
    return tuple((control_name(number), weight_bytes) for number in workload.controlnets())


def _distinct(count: int, weights: Mix, chance: random.Random) -> list[int]:
    found: dict[int, None] = {}
    while len(found) < min(count, len(weights)):
        found[chosen(weights, chance.random())] = None
    return list(found)
