"""Busy workers and jobs that differ, for what deciding costs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

from giornata.families import Family
from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.degrees.pool import DEGREES
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.wire.models import ModelCard
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
from giornata_lab.bench.systems.networks import plain

CARD: Final = ModelCard(
    name="tiny",
    family=Family.FLUX_FILL,
    digest="d" * 64,
    vae_scale_factor=8,
    latent_channels=16,
    max_text_tokens=48,
    takes_guidance=True,
    takes_true_cfg=False,
    default_steps=4,
    default_guidance_scale=30.0,
    default_strength=1.0,
)
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


def mixed(ticket: int, loras: int, chance: random.Random) -> JobDemand:
    """A job of one of three kinds."""
    steps = (10, 30, 50)[ticket % 3] + chance.randrange(3)
    shape = RowShape(text=512, image=4096, computed=600, steps=steps)
    return replace(demand_of(ticket, min(loras, ticket % 3)), shapes=(shape,))
