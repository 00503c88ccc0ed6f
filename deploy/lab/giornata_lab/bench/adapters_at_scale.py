"""Adapters at scale, simulated: ROCK and the baselines of its evaluation, ours, and ours without each of its parts.

One job a worker at a time, on 16 devices of two speeds, with 220 adapters of 5 to 200 MB and crowds: ROCK's testbed
(CLUSTER '25, section 6), with the loads of its Table 3. With `--gentd26` also the requests with LoRAs of that trace, on
eight devices of one speed, and with `--shared` devices on which eight rows share a step. The router's own schedulers,
lines and plans serve all; figures are means over seeds, with the range of the means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, Final

from giornata.scheduling.queue import TenantJobOrder
from giornata.scheduling.rock import AdapterPlan
from giornata.scheduling.scheduler import Scheduler
from giornata_lab.bench.reporting import report
from giornata_lab.bench.systems.adapter_rooms import (
    FREE,
    AdapterRoom,
    batching_jobs,
    batching_room,
    paper_jobs,
    room,
    trace_jobs,
)
from giornata_lab.flags import Several, option, parsed
from giornata_lab.loadgen import traces
from giornata_lab.loadgen.charts import Chart, PointStyle
from giornata_lab.loadgen.drawing import COLOURS, figure, svg
from giornata_lab.loadgen.traces import TraceLine
from giornata_lab.simulation.baselines import PROACTIVE, SimPolicy
from giornata_lab.simulation.jobs import SimulatedJob
from giornata_lab.simulation.options import QueueOrder, RunOptions
from giornata_lab.simulation.results import summary
from giornata_lab.simulation.rock_kinds import RockScheduler
from giornata_lab.simulation.simulator import Simulation

WARMUP_S: Final = 600.0
SHARED_WARMUP_S: Final = 60.0
SHARED_S: Final = 900.0
"""Length of a run in which rows share steps."""
BASE: Final = "rock"
FREE_LOADS: Final = "free loads"
OURS: Final = "ours"
TRACE: Final = "gentd26"


@dataclass(frozen=True)
class ScaleVariant:
    """A way to serve."""

    options: RunOptions
    scheduler: Callable[[], Scheduler] | None = None
    free: bool = False
    """Loads take no time."""
    joins_within: float = 0.0
    """Share of the steps that may be made before adapters are there."""


_OURS: Final = RunOptions(turn=TenantJobOrder.ARRIVAL)
_ROCK: Final = RunOptions.of(SimPolicy.ROCK)
_LRUMS: Final = RunOptions.of(SimPolicy.LRUMS)
VARIANTS: Final[Mapping[str, ScaleVariant]] = {
    "rrod": ScaleVariant(RunOptions.of(SimPolicy.RROD)),
    "lrums": ScaleVariant(_LRUMS),
    "proactive": ScaleVariant(replace(_LRUMS, placing=PROACTIVE)),
    BASE: ScaleVariant(_ROCK),
    "rock with one queue": ScaleVariant(_ROCK, RockScheduler),
    "rock without placement": ScaleVariant(replace(_ROCK, placing=AdapterPlan.OFF)),
    "blind": ScaleVariant(replace(_OURS, adapters=False)),
    "loads known": ScaleVariant(replace(_OURS, loads_ahead=False, load_weight=0.0)),
    "begun while waiting": ScaleVariant(replace(_OURS, load_weight=0.0)),
    OURS: ScaleVariant(_OURS),
    "ours with plan by use": ScaleVariant(replace(_OURS, placing=AdapterPlan.USE)),
    "the same at load weight 2": ScaleVariant(replace(_OURS, placing=AdapterPlan.USE, load_weight=2.0)),
    "ours at load weight 2": ScaleVariant(replace(_OURS, load_weight=2.0)),
    "ours at load weight 0.5": ScaleVariant(replace(_OURS, load_weight=0.5)),
    "ours at load weight 4": ScaleVariant(replace(_OURS, load_weight=4.0)),
    "ours by least work": ScaleVariant(replace(_OURS, turn=TenantJobOrder.LEAST_WORK)),
    "ours by kinds": ScaleVariant(replace(_OURS, line_name=QueueOrder.KINDS)),
    FREE_LOADS: ScaleVariant(_OURS, free=True),
}
DRAWN: Final = ("rrod", "lrums", "proactive", BASE, OURS, "ours at load weight 0.5", FREE_LOADS)
"""Ways to serve that charts show."""
SHARED: Final[Mapping[str, ScaleVariant]] = {
    **{
        name: VARIANTS[name]
        for name in ("lrums", BASE, "blind", OURS, "ours at load weight 0.5", "ours at load weight 2")
    },
    "ours at load weight 0": ScaleVariant(replace(_OURS, load_weight=0.0)),
    "bounded at load weight 0": ScaleVariant(replace(_OURS, load_weight=0.0), joins_within=1 / 3),
    "bounded": ScaleVariant(_OURS, joins_within=1 / 3),
    "bounded at load weight 2": ScaleVariant(replace(_OURS, load_weight=2.0), joins_within=1 / 3),
    "bounded at load weight 0.5": ScaleVariant(replace(_OURS, load_weight=0.5), joins_within=1 / 3),
    FREE_LOADS: VARIANTS[FREE_LOADS],
}
"""What is compared in the setting in which eight rows share a step."""


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
    seconds: float
    speed: float
    device_mb: float
    lines: tuple[TraceLine, ...] = ()
    """Lines of the trace; empty: ROCK's testbed, or shared steps."""
    shares: bool = False
    """Whether eight rows share a step."""

    @property
    def variants(self) -> Mapping[str, ScaleVariant]:
        """Return what is compared, by name."""
        return SHARED if self.shares else VARIANTS

    @property
    def base(self) -> str:
        """The variant with which others are compared."""
        return FREE_LOADS if self.shares else BASE

    @property
    def warmup_s(self) -> float:
        """Jobs that arrive in it are left out."""
        return 0.0 if self.lines else SHARED_WARMUP_S if self.shares else WARMUP_S

    def room(self) -> AdapterRoom:
        """The cluster."""
        if self.shares:
            return batching_room()
        return room(self.device_mb * 1e6, 8 if self.lines else 16, mixed=not self.lines)

    def jobs(self, seed: int, joins_within: float) -> list[SimulatedJob]:
        """Jobs of a run."""
        if self.shares:
            return batching_jobs(seed, rate=self.rate, seconds=self.seconds, joins_within=joins_within)
        if self.lines:
            return trace_jobs(self.lines, seed, speed=self.speed)
        return paper_jobs(seed, rate=self.rate, seconds=self.seconds)


def figures(task: tuple[str, int], asked: ScaleRequest) -> ScaleFigures:
    """Run a variant by its name, with a seed."""
    name, seed = task
    variant, here = asked.variants[name], asked.room()
    adapters = FREE if variant.free else here.adapters
    made = variant.scheduler() if variant.scheduler else None
    options = replace(variant.options, seed=seed)
    jobs = asked.jobs(seed, variant.joins_within)
    run = Simulation(here.machines, jobs, options, adapters=adapters, scheduler=made).run()
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


def charts(rows: Sequence[Mapping[str, Any]]) -> None:
    """A chart of each setting: the mean latency over the loads of each way to serve, as dots."""
    for place, setting in enumerate(dict.fromkeys(row["setting"] for row in rows)):
        dots = {
            row["served by"]: [(row["loads a use"], row["mean s"])]
            for row in rows
            if row["setting"] == setting and (row["served by"] in DRAWN or len(rows) <= len(COLOURS))
        }
        chart = Chart(
            f"Adapters at scale, {setting}", "loads a use", "mean latency, seconds", dots, PointStyle.DOTS
        )
        if dots:
            (report.OUT / f"adapters_at_scale_{place}.svg").write_text(svg(figure(chart)), "utf-8")


def settings_of(options: SimpleNamespace) -> dict[str, ScaleRequest]:
    """Return what the flags ask for, by name."""
    usual = ScaleRequest(options.rate, options.seconds, options.speed, 512.0)
    settings = {f"{device_mb:g} MB": replace(usual, device_mb=device_mb) for device_mb in options.device_mb}
    if options.gentd26:
        folder = Path(options.gentd26)
        timed, adapted = ((folder / name).read_text("utf-8") for name in (traces.TIMED, traces.ADAPTED))
        settings[TRACE] = replace(usual, lines=tuple(traces.read_gentd26(timed, adapted)))
    for rate in options.shared:
        settings[f"shared steps, {rate:g}/s"] = replace(usual, rate=rate, seconds=SHARED_S, shares=True)
    return settings


def main() -> None:
    """Print and write ``out/bench/adapters_at_scale.json``, and charts beside it."""
    options = parsed(
        __doc__,
        [
            option("--seconds", type=float, default=2400.0, help="virtual, of each run, its warm-up within"),
            option("--seeds", type=int, default=4, help="runs of each kind, with jobs of their own"),
            option("--rate", type=float, default=0.4, help="jobs a second"),
            option("--device-mb", type=Several(float), default="512", help="for adapters, with commas"),
            option("--gentd26", default="", help="folder of the trace's two files"),
            option("--speed", type=float, default=18.0, help="of the trace"),
            option("--shared", type=Several(float), default="", help="rates where eight rows share a step"),
            option("--only", type=Several(str), default="", help="variants by name"),
            option("--processes", type=int, default=1, help="runs at the same time"),
        ],
    )
    settings = settings_of(options)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.processes) as pool:
        for setting, asked in settings.items():
            names = [name for name in asked.variants if not options.only or name in options.only]
            tasks = [(name, seed) for name in names for seed in range(options.seeds)]
            runs = pool.map(partial(figures, asked=asked), tasks)
            found = {}
            for name in names:
                found[name] = [next(runs) for _ in range(options.seeds)]
                print(*rows_of(setting, asked.base, {name: found[name]})[0].values(), flush=True)
            rows += rows_of(setting, asked.base, found)
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
    charts(rows)


if __name__ == "__main__":
    main()
