"""Adapters at scale, simulated: ROCK and the baselines of its evaluation, ours, and ours without each of its parts.

One job a worker at a time, on 64 devices in machines of eight, with 220 adapters of 5 to 200 MB and crowds: ROCK's
testbed (CLUSTER '25, section 6), with the loads of its Table 3. With `--gentd26` also the requests with LoRAs of that
trace, on eight devices. The router's own schedulers, lines and plans serve all; figures are means over seeds, with the
range of the means.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Final

from giornata.planning.operations import StepCosts
from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.queue import TenantJobOrder
from giornata.wire.workers import Tier
from giornata_lab.bench import harness
from giornata_lab.bench.systems.networks import PLAIN
from giornata_lab.flags import Several, option, parsed
from giornata_lab.loadgen.traces import TraceLine, read_trace_file
from giornata_lab.loadgen.workload import (
    AdapterSizes,
    AdapterWorkload,
    ArrivalBursts,
    crowded_times,
)
from giornata_lab.simulation.adapter_plans import AdapterPlan
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.jobs import DIGEST, MODEL, SimulatedJob, adapted
from giornata_lab.simulation.machines import Machine
from giornata_lab.simulation.options import QueueOrder, RunOptions
from giornata_lab.simulation.residency import PAPER, AdapterSetting
from giornata_lab.simulation.results import summary
from giornata_lab.simulation.simulator import Simulation

STEP_S: Final = 0.3
"""Step time of a picture of 1024 x 1024, alone on the faster device."""
TOKENS: Final = 64
"""Tokens of a picture of 1024 x 1024: times go by shares of it."""
PIXELS: Final = {0.5: 0.3, 1.0: 0.4, 1.6: 0.3}
"""Sizes of pictures over that, with their chances."""
A_HOST: Final = 8
"""Workers of a host."""
TRACE_WORKERS: Final = 8
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


def machine(rows: int = 1) -> Machine:
    """A device that computes `rows` at a time; a step takes :data:`STEP_S` for a picture of :data:`TOKENS`."""
    token_ms = STEP_S * 1e3 / TOKENS
    costs = StepCosts((0.0, 0.0, token_ms, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    return Machine(costs, PLAIN, rows=rows)


def room(device_bytes: float, workers: int) -> AdapterRoom:
    """Hosts of eight devices; every host's memory holds all adapters, once they have come from the store."""
    kept = replace(PAPER, device_bytes=device_bytes, workers_a_host=A_HOST)
    return AdapterRoom((machine(),) * workers, kept)


def paper_jobs(seed: int, *, rate: float, seconds: float) -> list[SimulatedJob]:
    """220 adapters of 5 to 200 MB, Zipf 1.1, a fifth of the ranks moved every 20 minutes, fivefold crowds."""
    chance = random.Random(f"{seed} jobs")  # noqa: S311 - a workload, no secret
    times = crowded_times(rate, seconds, seed, ArrivalBursts())
    asked = AdapterWorkload({1: 0.85, 2: 0.15}, 220, 1.1, drift_s=1200.0)
    names = asked.draw(times, seed)
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


WARMUP_S: Final = 600.0
TELEMETRY_HZ: Final = 1.0
"""Rarer than live: it is most of what a run of 64 devices computes."""
BASE: Final = "rock"
FREE_LOADS: Final = "free loads"
OURS: Final = "ours"
TRACE: Final = "gentd26"


@dataclass(frozen=True)
class ScaleVariant:
    """A way to serve."""

    options: RunOptions
    free: bool = False
    """Loads take no time."""


_OURS: Final = RunOptions(turn=TenantJobOrder.ARRIVAL)
_ROCK: Final = RunOptions.of(SimPolicy.ROCK)
_LRUMS: Final = RunOptions.of(SimPolicy.LRUMS)
VARIANTS: Final[Mapping[str, ScaleVariant]] = {
    "rrod": ScaleVariant(RunOptions.of(SimPolicy.RROD)),
    "lrums": ScaleVariant(_LRUMS),
    "proactive": ScaleVariant(replace(_LRUMS, placing=AdapterPlan.PROACTIVE)),
    "lrums by device": ScaleVariant(replace(_LRUMS, cached=frozenset({Tier.DEVICE}))),
    BASE: ScaleVariant(_ROCK),
    "rock with one queue": ScaleVariant(replace(_ROCK, line_name=QueueOrder.FAIR)),
    OURS: ScaleVariant(_OURS),
    "ours with plan by use": ScaleVariant(replace(_OURS, placing=AdapterPlan.USE)),
    "ours at load weight 2": ScaleVariant(replace(_OURS, load_weight=2.0)),
    "ours at load weight 0.5": ScaleVariant(replace(_OURS, load_weight=0.5)),
    FREE_LOADS: ScaleVariant(_OURS, free=True),
}


@dataclass(frozen=True)
class ScaleFigures:
    """One run."""

    mean: float
    p99: float
    loads: float
    ready: float
    hits: float


@dataclass(frozen=True)
class ScaleRequest:
    """What is simulated, as far as all runs share it."""

    rate: float
    """Jobs a second of one worker."""
    seconds: float
    speed: float
    device_mb: float
    workers: int = 64
    warm_s: float = WARMUP_S
    lines: tuple[TraceLine, ...] = ()
    """Lines of the trace; empty: ROCK's testbed."""

    @property
    def warmup_s(self) -> float:
        """Jobs that arrive in it are left out."""
        return 0.0 if self.lines else self.warm_s

    def room(self) -> AdapterRoom:
        """The cluster."""
        return room(self.device_mb * 1e6, TRACE_WORKERS if self.lines else self.workers)

    def jobs(self, seed: int) -> list[SimulatedJob]:
        """Jobs of a run."""
        if self.lines:
            return trace_jobs(self.lines, seed, speed=self.speed)
        return paper_jobs(seed, rate=self.rate * self.workers, seconds=self.seconds)


def figures(task: tuple[str, int], asked: ScaleRequest) -> ScaleFigures:
    """Run a variant by its name, with a seed."""
    name, seed = task
    variant, here = VARIANTS[name], asked.room()
    adapters = FREE if variant.free else here.adapters
    options = replace(variant.options, seed=seed, telemetry_hz=TELEMETRY_HZ)
    jobs = asked.jobs(seed)
    run = Simulation(here.machines, jobs, options, adapters=adapters).run()
    found = summary(run, asked.warmup_s)
    return ScaleFigures(
        found.mean_s,
        found.p99_s,
        found.lora_loads or 0.0,
        found.lora_ready_share or 0.0,
        found.lora_hit_share or 0.0,
    )


def rows_of(setting: str, base: str, found: Mapping[str, Sequence[ScaleFigures]]) -> list[dict[str, Any]]:
    """A row for every variant; ratios of runs with the same jobs come first, empty where `base` was left out."""
    rows = []
    for name, runs in found.items():
        compared = zip(runs, found.get(base, ()), strict=False)
        ratios = [own.mean / other.mean for own, other in compared]
        means = [run.mean for run in runs]
        rows.append(
            {
                "setting": setting,
                "served by": name,
                "mean ÷ base's": round(fmean(ratios), 3) if ratios else "",
                "range": f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "",
                "base": base,
                "mean s": round(fmean(means), 2),
                "of seeds": f"{min(means):.1f}-{max(means):.1f}",
                "P99 s": round(fmean(run.p99 for run in runs), 1),
                "loads a use": round(fmean(run.loads for run in runs), 3),
                "found ready": round(fmean(run.ready for run in runs), 3),
            }
        )
    return rows


def settings_of(options: SimpleNamespace) -> dict[str, ScaleRequest]:
    """Return what the flags ask for, by name."""
    usual = ScaleRequest(
        options.rate, options.seconds, options.speed, 512.0, options.workers, warm_s=options.warm_up
    )
    settings = {f"{device_mb:g} MB": replace(usual, device_mb=device_mb) for device_mb in options.device_mb}
    if options.gentd26:
        settings[TRACE] = replace(usual, lines=tuple(read_trace_file(Path(options.gentd26))))
    return settings


def main() -> None:
    """Print and write ``out/bench/adapters_at_scale.json``, and charts beside it."""
    options = parsed(
        __doc__,
        [
            option("--seconds", type=float, default=2400.0, help="virtual, of each run, its warm-up within"),
            option("--warm-up", type=float, default=WARMUP_S, help="seconds in which jobs are left out"),
            option("--seeds", type=int, default=4, help="runs of each kind, with jobs of their own"),
            option(
                "--workers", type=int, default=64, help="devices, each of which computes one job at a time"
            ),
            option("--rate", type=float, default=0.0375, help="jobs a second of one worker"),
            option("--device-mb", type=Several(float), default="512", help="for adapters, with commas"),
            option("--gentd26", default="", help="folder of the trace's two files"),
            option("--speed", type=float, default=18.0, help="of the trace"),
            option("--only", type=Several(str), default="", help="variants by name"),
            option("--processes", type=int, default=1, help="runs at the same time"),
        ],
    )
    settings = settings_of(options)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for setting, asked in settings.items():
            names = [name for name in VARIANTS if not options.only or name in options.only]
            tasks = [(name, seed) for name in names for seed in range(options.seeds)]
            runs = pool.map(partial(figures, asked=asked), tasks)
            found = {}
            for name in names:
                found[name] = [next(runs) for _ in range(options.seeds)]
                print(*rows_of(setting, BASE, {name: found[name]})[0].values(), flush=True)
            rows += rows_of(setting, BASE, found)
    harness.write(
        "adapters_at_scale",
        rows,
        workload={
            "workers": options.workers,
            "rate": options.rate,
            "seconds": options.seconds,
            "warm-up": options.warm_up,
            "seeds": list(range(options.seeds)),
            "found ready": "share of jobs with adapters whose rows did not wait for them once they had a worker",
        },
    )


if __name__ == "__main__":
    main()
