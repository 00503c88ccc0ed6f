"""Adapters at scale, simulated: ROCK and the baselines of its evaluation, ours, and ours without each of its parts.

One job a worker at a time, on 16 devices of two speeds, with 220 adapters of 5 to 200 MB and crowds: ROCK's testbed
(CLUSTER '25, section 6), with the loads of its Table 3. With `--gentd26` also the requests with LoRAs of that trace, on
eight devices of one speed. All go through the router's own schedulers, lines and plans; figures are means over seeds,
with the range of the means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from giornata.residency.plans.naming import PlacementName
from giornata.residency.rules import RuleName
from giornata.scheduling.fair_line import Turn
from giornata.scheduling.line import LineName
from giornata.scheduling.policies import PolicyName
from giornata.scheduling.rock import Rock
from giornata.scheduling.scheduler import Scheduler
from giornata_tools.loadgen import gentd26
from giornata_tools.loadgen.trace import TraceLine
from giornata_tools.simulation.jobs import SimulatedJob
from giornata_tools.simulation.options import RunOptions
from giornata_tools.simulation.results import summary
from giornata_tools.simulation.simulator import Simulation
from tests.bench.reporting import report
from tests.bench.systems.adapter_rooms import FREE, Room, paper_jobs, room, trace_jobs
from tests.flags import Several, option, parsed

WARMUP_S: Final = 600.0
BASE: Final = "rock"
"""All others are compared with it."""
OURS: Final = "ours"
TRACE: Final = "gentd26"


@dataclass(frozen=True)
class Variant:
    """A way to serve."""

    options: RunOptions
    scheduler: Callable[[], Scheduler] | None = None
    eviction: RuleName = RuleName.GDSF
    free: bool = False
    """Loads take no time."""


_OURS: Final = RunOptions(turn=Turn.ARRIVAL)
_ROCK: Final = RunOptions.of(PolicyName.ROCK)
_LRUMS: Final = RunOptions.of(PolicyName.LRUMS)
VARIANTS: Final[Mapping[str, Variant]] = {
    "rrod": Variant(RunOptions.of(PolicyName.RROD)),
    "lrums": Variant(_LRUMS),
    "proactive": Variant(replace(_LRUMS, placing=PlacementName.PROACTIVE)),
    BASE: Variant(_ROCK),
    "rock with one queue": Variant(_ROCK, partial(Rock, queues=False)),
    "rock without placement": Variant(replace(_ROCK, placing=PlacementName.OFF)),
    "blind": Variant(replace(_OURS, adapters=False), eviction=RuleName.LRU),
    "loads known": Variant(replace(_OURS, loads_ahead=False, load_weight=0.0), eviction=RuleName.LRU),
    "begun while waiting": Variant(replace(_OURS, load_weight=0.0), eviction=RuleName.LRU),
    "load weight": Variant(_OURS, eviction=RuleName.LRU),
    OURS: Variant(_OURS),
    "ours with plan by use": Variant(replace(_OURS, placing=PlacementName.USE)),
    "ours at load weight 1": Variant(replace(_OURS, load_weight=1.0)),
    "ours at load weight 2": Variant(replace(_OURS, load_weight=2.0)),
    "ours at load weight 4": Variant(replace(_OURS, load_weight=4.0)),
    "ours by least work": Variant(replace(_OURS, turn=Turn.LEAST_WORK)),
    "ours by kinds": Variant(replace(_OURS, line_name=LineName.KINDS)),
    "free loads": Variant(_OURS, free=True),
}


@dataclass(frozen=True)
class Figures:
    """One run."""

    mean: float
    p99: float
    loads: float
    ready: float
    hits: float


@dataclass(frozen=True)
class Asked:
    """What is simulated, as far as all runs share it."""

    rate: float
    seconds: float
    speed: float
    device_mb: float
    lines: tuple[TraceLine, ...] = ()
    """Of the trace; empty: ROCK's testbed."""

    def room(self) -> Room:
        """The cluster."""
        return room(self.device_mb * 1e6, 8 if self.lines else 16, mixed=not self.lines)

    def jobs(self, seed: int) -> list[SimulatedJob]:
        """Jobs of a run."""
        if self.lines:
            return trace_jobs(self.lines, seed, speed=self.speed)
        return paper_jobs(seed, rate=self.rate, seconds=self.seconds)


def figures(task: tuple[str, int], asked: Asked) -> Figures:
    """Run a variant by its name, with a seed."""
    name, seed = task
    variant, here = VARIANTS[name], asked.room()
    adapters = FREE if variant.free else replace(here.adapters, eviction=variant.eviction)
    made = variant.scheduler() if variant.scheduler else None
    options = replace(variant.options, seed=seed)
    run = Simulation(here.machines, asked.jobs(seed), options, adapters=adapters, scheduler=made).run()
    found = summary(run, 0.0 if asked.lines else WARMUP_S)
    return Figures(
        found.mean_s,
        found.p99_s,
        found.lora_loads or 0.0,
        found.lora_ready_share or 0.0,
        found.lora_hit_share or 0.0,
    )


def rows_of(setting: str, found: Mapping[str, Sequence[Figures]]) -> list[dict[str, Any]]:
    """A row for every variant; ratios of runs with the same jobs come first."""
    rows = []
    for name, runs in found.items():
        ratios = [own.mean / other.mean for own, other in zip(runs, found.get(BASE, runs), strict=True)]
        means = [run.mean for run in runs]
        rows.append(
            {
                "setting": setting,
                "served by": name,
                f"mean ÷ {BASE}'s": round(fmean(ratios), 3),
                "range": f"{min(ratios):.2f}-{max(ratios):.2f}",
                "mean s": round(fmean(means), 2),
                "of seeds": f"{min(means):.1f}-{max(means):.1f}",
                "P99 s": round(fmean(run.p99 for run in runs), 1),
                "loads a use": round(fmean(run.loads for run in runs), 3),
                "found ready": round(fmean(run.ready for run in runs), 3),
            }
        )
    return rows


def main() -> None:
    """Print and write ``out/bench/adapters_at_scale.json``."""
    options = parsed(
        __doc__,
        [
            option("--seconds", type=float, default=2400.0, help="virtual, of each run, its warm-up within"),
            option("--seeds", type=int, default=4, help="runs of each kind, with jobs of their own"),
            option("--rate", type=float, default=0.4, help="jobs a second"),
            option("--device-mb", type=Several(float), default="512", help="for adapters, with commas"),
            option("--gentd26", default="", help="folder of the trace's two files"),
            option("--speed", type=float, default=18.0, help="of the trace"),
            option("--only", type=Several(str), default="", help="variants by name"),
            option("--processes", type=int, default=1, help="runs at the same time"),
        ],
    )
    settings = {
        f"{device_mb:g} MB": Asked(options.rate, options.seconds, options.speed, device_mb)
        for device_mb in options.device_mb
    }
    if options.gentd26:
        folder = Path(options.gentd26)
        timed, adapted = ((folder / name).read_text("utf-8") for name in (gentd26.TIMED, gentd26.ADAPTED))
        lines = tuple(gentd26.read(timed, adapted))
        settings[TRACE] = replace(next(iter(settings.values())), device_mb=512.0, lines=lines)
    names = [name for name in VARIANTS if not options.only or name in options.only]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for setting, asked in settings.items():
            tasks = [(name, seed) for name in names for seed in range(options.seeds)]
            runs = pool.map(partial(figures, asked=asked), tasks)
            found = {}
            for name in names:
                found[name] = [next(runs) for _ in range(options.seeds)]
                print(setting, name, *(round(run.mean, 2) for run in found[name]), flush=True)
            rows += rows_of(setting, found)
    report.write(
        "adapters_at_scale",
        rows,
        workload={
            "rate": options.rate,
            "seconds": options.seconds,
            "warm-up": WARMUP_S,
            "seeds": list(range(options.seeds)),
            "found ready": "share of jobs with adapters whose rows did not wait for them once they had a worker",
        },
    )


if __name__ == "__main__":
    main()
