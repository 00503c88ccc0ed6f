"""What ``giornata_lab.bench.adapters_at_scale`` simulates: ROCK's testbed, GenTD26's requests, shared steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from giornata.planning.cost_model import StepCosts
from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.demand import JobDemand, RowShape
from giornata_lab.bench.systems.networks import PLAIN
from giornata_lab.loadgen.traces import TraceLine
from giornata_lab.loadgen.workload import (
    AdapterSizes,
    AdapterWorkload,
    ArrivalBursts,
    arrival_times,
    crowded_times,
)
from giornata_lab.simulation.adapters import adapted
from giornata_lab.simulation.jobs import DIGEST, MODEL, SimulatedJob
from giornata_lab.simulation.machines import Machine, h800_flux
from giornata_lab.simulation.residency import PAPER, AdapterSetting

STEP_S: Final = 0.3
"""Step time of a picture of 1024 x 1024, alone on the faster device."""
TOKENS: Final = 64
"""Tokens of a picture of 1024 x 1024: times go by shares of it."""
PIXELS: Final = {0.5: 0.3, 1.0: 0.4, 1.6: 0.3}
"""Sizes of pictures over that, with their chances."""
SPEEDS: Final = (1.0, 0.55)
"""Speeds of the two kinds of devices, host by host."""
A_HOST: Final = 4
"""Workers of a host."""
BATCHED_BYTES: Final = 65_000_000
"""Size of a LoRA where rows share steps."""
TRACE_STEP_S: Final = 0.6
IMAGES: Final = {1: 1.0, 2: 1.1, 3: 1.15, 4: 1.2, 8: 1.35}
"""Work of a request of the trace by its pictures, in that of one: they share steps."""
PATIENCE_S: Final = {1: 30.0, 2: 120.0, 3: 600.0}
"""Delay that a kind of service tolerates; chances 0.6, 0.3, 0.1."""
FREE: Final = AdapterSetting(
    device_bytes=1e15,
    memory_bytes=1e15,
    disk_bytes=1e15,
    store_bytes_per_s=1e18,
    disk_bytes_per_s=1e18,
    link_bytes_per_s=1e18,
    workers_a_host=A_HOST,
)
"""Loads take no time."""


@dataclass(frozen=True)
class AdapterRoom:
    """A cluster and what its devices keep."""

    machines: tuple[Machine, ...]
    adapters: AdapterSetting


def machine(speed: float, rows: int = 1) -> Machine:
    """A device that computes `rows` at a time; a step takes :data:`STEP_S` for a picture of :data:`TOKENS`."""
    token_ms = STEP_S * 1e3 / TOKENS / speed
    costs = StepCosts((0.0, 0.0, token_ms, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    return Machine(costs, PLAIN, rows=rows, device=f"of speed {speed:g}")


def room(device_bytes: float, workers: int = 16, *, mixed: bool = True) -> AdapterRoom:
    """Hosts of four devices; every host's memory holds all adapters, once they have come from the store."""
    speeds = [SPEEDS[place // A_HOST % 2] if mixed else 1.0 for place in range(workers)]
    kept = replace(PAPER, device_bytes=device_bytes, workers_a_host=A_HOST)
    return AdapterRoom(tuple(machine(speed) for speed in speeds), kept)


def paper_jobs(seed: int, *, rate: float, seconds: float, shift_s: float | None = None) -> list[SimulatedJob]:
    """220 adapters of 5 to 200 MB, Zipf 1.1, a fifth of the ranks moved every 20 minutes, fivefold crowds.

    With `shift_s` all ranks change at that time, once, and none before.
    """
    chance = random.Random(f"{seed} jobs")  # noqa: S311 - a workload, no secret
    times = crowded_times(rate, seconds, seed, ArrivalBursts())
    asked = AdapterWorkload({1: 0.85, 2: 0.15}, 220, 1.1, drift_s=0.0 if shift_s else 1200.0)
    names = asked.draw(times, seed)
    if shift_s is not None:
        other = asked.draw(times, seed + 1000)
        order = list(range(220))
        random.Random(seed).shuffle(order)  # noqa: S311 - as above
        moved = {f"lora{number}": f"lora{order[number]}" for number in range(220)}
        names = [
            before if at_s < shift_s else tuple(moved[name] for name in after)
            for at_s, before, after in zip(times, names, other, strict=True)
        ]
    sizes = AdapterSizes.between(5e6, 200e6)
    made = []
    for number, (at_s, wanted) in enumerate(zip(times, names, strict=True)):
        (pixels,) = chance.choices(list(PIXELS), list(PIXELS.values()))
        (kind,) = chance.choices((1, 2, 3), (0.6, 0.3, 0.1))
        steps = chance.randint(20, 50)
        made.append(
            _job(
                number,
                at_s,
                steps,
                pixels,
                [NeededLora(n, sizes.of(n, seed)) for n in wanted],
                PATIENCE_S[kind] if kind == 1 else None,
            )
        )
    return made


def trace_jobs(lines: Sequence[TraceLine], seed: int, *, speed: float) -> list[SimulatedJob]:
    """GenTD26's requests with LoRAs, `speed` times faster; its sizes are not told, and drawn from 5 to 200 MB."""
    sizes, made = AdapterSizes.between(5e6, 200e6), []
    with_loras = [line for line in lines if line.adapters]
    first_s = with_loras[0].timestamp
    for number, line in enumerate(with_loras):
        work = IMAGES.get(line.n or 1, 1.2) * TRACE_STEP_S / STEP_S
        loras = [NeededLora(name, sizes.of(name, seed)) for name in line.adapters or ()]
        made.append(_job(number, (line.timestamp - first_s) / speed, line.steps or 30, work, loras, None))
    return made


def _job(
    number: int, at_s: float, steps: int, work: float, loras: Sequence[NeededLora], slo_s: float | None
) -> SimulatedJob:
    tokens = max(1, round(TOKENS * work))
    shape = RowShape(text=0, image=tokens, computed=tokens, steps=steps, begun=True)
    plain = SimulatedJob(f"j{number}", at_s, JobDemand(MODEL, DIGEST, (shape,)), slo_s)
    made = adapted(plain, loras)
    shapes = tuple(replace(one, low_rank=0.0, segments=0.0) for one in made.demand.shapes)
    return replace(made, demand=replace(made.demand, shapes=shapes))


def batching_room(workers: int = 8) -> AdapterRoom:
    """H800s that share steps among eight rows, a third as fast: loads of 4.8 s, and 12 of 220 adapters on a device."""
    kept = replace(PAPER, device_bytes=12 * BATCHED_BYTES, store_bytes_per_s=1e18, store_latency_s=0.0)
    return AdapterRoom((replace(h800_flux(), slowness=3.0),) * workers, kept)


def batching_jobs(seed: int, *, rate: float, seconds: float, joins_within: float) -> list[SimulatedJob]:
    """Full pictures, one LoRA each, at times that vary twice as much as a Poisson process's."""
    chance = random.Random(f"{seed} jobs")  # noqa: S311 - a workload, no secret
    times = arrival_times(rate, seconds, seed, 2.0)
    made = []
    for number, (at_s, names) in enumerate(
        zip(times, AdapterWorkload({1: 1.0}, 220, 1.1).draw(times, seed), strict=True)
    ):
        shape = RowShape(512, 4096, 4096, chance.choice((20, 30, 30, 30, 40, 50)), begun=True)
        loras = tuple(NeededLora(name, BATCHED_BYTES) for name in names)
        demand = JobDemand(MODEL, DIGEST, (shape,), adapters=loras, joins_within=joins_within)
        made.append(SimulatedJob(f"j{number}", at_s, demand))
    return made
