"""What is simulated: a cluster, a workload, and how it is scheduled; and its runs. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from giornata.scheduling.scheduler import Scheduler
from giornata_lab.loadgen.outcomes import percentile
from giornata_lab.loadgen.traces import TraceLine, complete
from giornata_lab.loadgen.workload import (
    ArrivalBursts,
    Workload,
    WorkloadRequest,
    arrival_times,
    crowded_times,
    draw,
    faster,
)
from giornata_lab.simulation.bound import LatencyBound
from giornata_lab.simulation.jobs import (
    AdapterDemand,
    PictureSetting,
    SimulatedJob,
    jobs_of,
    template_name,
    with_adapters,
)
from giornata_lab.simulation.machines import Machine
from giornata_lab.simulation.options import RunOptions, StageSetting
from giornata_lab.simulation.residency import AdapterSetting, TemplateSetting
from giornata_lab.simulation.results import SimulatedRun, SimulationSummary, summary
from giornata_lab.simulation.simulator import Simulation


@dataclass(frozen=True)
class ArrivalSetting:
    """When jobs arrive."""

    seconds: float = 600.0
    """After the warm-up."""
    warmup_s: float = 30.0
    """Jobs that arrive in it are left out of all figures but the workers'."""
    cv: float = 1.0
    """Coefficient of variation of the times between arrivals; 1 is Poisson."""
    crowds: ArrivalBursts | None = None
    """Times in which they are denser, instead of `cv`."""
    trace: tuple[TraceLine, ...] = ()
    """Requests to replay instead of random ones."""
    speed: float = 1.0
    """How many times faster the trace is replayed."""
    windows: tuple[tuple[float, ...], ...] = ()
    """For each seed, from 1, times of a window as shares of it, stretched to the rate; their jobs are drawn."""


@dataclass(frozen=True)
class Scenario:
    """Everything but the rate, the policy and the seed."""

    machines: tuple[Machine, ...]
    workload: Workload
    arriving: ArrivalSetting = field(default_factory=ArrivalSetting)
    picture: PictureSetting = field(default_factory=PictureSetting)
    templates: TemplateSetting = field(default_factory=TemplateSetting)
    stages: StageSetting = field(default_factory=StageSetting)
    asked: AdapterDemand = field(default_factory=AdapterDemand)
    """Sizes, ControlNets and waits of the adapters that the workload or the trace names."""
    adapters: AdapterSetting = field(default_factory=AdapterSetting)
    slo_s: float | None = None

    def jobs(self, rate: float, seed: int) -> list[SimulatedJob]:
        """Jobs that arrive at `rate` a second; equal seeds make equal jobs.

        Raises:
            ValueError: none arrives after the warm-up.
        """
        requests = self._requests(rate, seed)
        if not any(request.at_s >= self.arriving.warmup_s for request in requests):
            raise ValueError(
                f"no job arrives within {self.arriving.seconds:g} s after the warm-up of {self.arriving.warmup_s:g} s"
            )
        jobs = jobs_of(requests, self.picture, slo_s=self.slo_s)
        return with_adapters(jobs, requests, self.asked, seed)

    def _requests(self, rate: float, seed: int) -> list[WorkloadRequest]:
        """In the order of their times."""
        arriving = self.arriving
        if arriving.trace:
            found = faster(complete(arriving.trace, self.workload, seed), arriving.speed)
            return sorted(found, key=lambda request: request.at_s)
        whole_s = arriving.warmup_s + arriving.seconds
        if arriving.windows:
            window = arriving.windows[seed - 1]
            times = [share * len(window) / rate for share in window]
        elif arriving.crowds is None:
            times = arrival_times(rate, whole_s, seed, arriving.cv)
        else:
            times = crowded_times(rate, whole_s, seed, arriving.crowds)
        return draw(times, self.workload, seed)

    def run(
        self,
        jobs: Sequence[SimulatedJob],
        options: RunOptions,
        progress: Callable[[int], None] | None = None,
        *,
        scheduler: Scheduler | None = None,
    ) -> SimulatedRun:
        """One simulation; `scheduler` instead of the one that `options` name, to try one out."""
        made = Simulation(
            self.machines,
            jobs,
            options,
            templates=self.templates,
            stages=self.stages,
            adapters=self.adapters,
            scheduler=scheduler,
        )
        return made.run(progress)

    def summary(self, run: SimulatedRun) -> SimulationSummary:
        """Sum up the jobs that arrived after the warm-up."""
        return summary(run, self.arriving.warmup_s)

    def bound(self, jobs: Sequence[SimulatedJob]) -> LatencyBound:
        """Return how good any schedule of `jobs` could be."""
        return LatencyBound(jobs, self.machines, self.stages.encode_ms / 1e3, self.stages.finish_ms / 1e3)

    def with_workers(self, count: int) -> Scenario:
        """The same with so many workers: those there are, in turns."""
        machines = tuple(self.machines[place % len(self.machines)] for place in range(count))
        servers = max(1, round(self.stages.servers * count / len(self.machines)))
        return replace(self, machines=machines, stages=replace(self.stages, servers=servers))


def popular(weights: Mapping[int, float]) -> tuple[str, ...]:
    """Names of templates, the most popular first, as far as workers may have room for them."""
    ordered = sorted(weights, key=lambda number: (-weights[number], number))
    return tuple(map(template_name, ordered[: 1 << 16]))


@dataclass(frozen=True)
class FewestWorkers:
    """How many workers are enough."""

    workers: int | None
    """None: even the most that may be tried are too few."""
    tried: Mapping[int, float]
    """The worst percentile over the seeds for each number of workers, in seconds."""


def fewest_workers(
    scenario: Scenario,
    rate: float,
    options: RunOptions,
    *,
    slo_s: float,
    percent: float,
    seeds: Sequence[int],
    most: int = 1000,
    tell: Callable[[int, float], None] = lambda _workers, _seconds: None,
) -> FewestWorkers:
    """The fewest workers with which a percentile of latencies is at most `slo_s`, with every seed.

    By bisection: more workers are taken to be no worse, which chance may belie where a percentile lies on the limit.
    Workers of the scenario are taken in turns, at most `most` of them. Each seed is a run. `tell` hears of each number
    that was tried, and its percentile.
    """
    arrivals = {seed: scenario.jobs(rate, seed) for seed in seeds}
    tried: dict[int, float] = {}

    def seconds(count: int) -> float:
        if count not in tried:
            made = scenario.with_workers(count)
            tried[count] = max(
                percentile(
                    made.run(jobs, replace(options, seed=seed)).latencies(scenario.arriving.warmup_s), percent
                )
                for seed, jobs in arrivals.items()
            )
            tell(count, tried[count])
        return tried[count]

    high = 1
    while seconds(high) > slo_s:
        if high == most:
            return FewestWorkers(None, tried)
        high = min(most, 2 * high)
    untried = range(high // 2 + 1, high)
    fewer = bisect_left(untried, x=True, key=lambda count: seconds(count) <= slo_s)
    return FewestWorkers(high // 2 + 1 + fewer, tried)
