"""One simulated run: jobs, prepost servers and workers around the live line, placement and policies. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from giornata.families import Family
from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import SchedulingParams
from giornata.scheduling.scheduler import Scheduler, likely_worker
from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.models import ModelCard
from giornata.wire.workers import ServiceName, ServiceState
from giornata_lab.simulation.adapter_plans import (
    PLANNERS,
    AdapterPlan,
    SimResidency,
    SimTier,
    TierKind,
    WindowedUsage,
)
from giornata_lab.simulation.jobs import DIGEST, MODEL, SimAssignment, SimulatedJob
from giornata_lab.simulation.machines import Machine
from giornata_lab.simulation.options import RunOptions, StageSetting
from giornata_lab.simulation.residency import (
    AdapterSetting,
    LoadReason,
    SimClock,
    SimHost,
    StageServers,
    TemplateSetting,
)
from giornata_lab.simulation.results import ClusterSample, EndedJob, SimulatedRun
from giornata_lab.simulation.rock_kinds import JobKindQueue, fit_kinds
from giornata_lab.simulation.worker import SimWorker

LARGEST: Final = 1 << 50
"""Bytes of a tier that is told without a limit."""


class SimAdapterPlacement:
    """What plans want, and who loads it.

    Args:
        name: of the plan; not `off`.
        seed: of its draws.
        setting: of tiers and links.
        hosts: in order; `setting.workers_a_host` workers in a row are on each.
        workers: by name, in order.
    """

    def __init__(
        self,
        name: AdapterPlan,
        seed: int,
        setting: AdapterSetting,
        hosts: list[SimHost],
        workers: Mapping[str, SimWorker],
    ) -> None:
        planner = PLANNERS[name]
        self.period_s = planner.period_s
        self._plan, self._uses = planner.make(seed), WindowedUsage(planner.half_life_s)
        self._setting, self._workers = setting, workers
        self._hosts = {f"h{number:04d}": host for number, host in enumerate(hosts)}
        names = list(self._hosts)
        self._host_of = {
            worker: names[number // setting.workers_a_host] for number, worker in enumerate(workers)
        }
        self._known: dict[str, NeededLora] = {}

    def see(self, adapters: tuple[NeededLora, ...], now: float) -> None:
        """A job that has arrived asks for these."""
        self._known.update({lora.digest: lora for lora in adapters})
        self._uses.see([lora.digest for lora in adapters], now)

    def run(self, now: float) -> None:
        """Plan, and begin the loads of what is wanted and absent, as far as it fits beside what rows use."""
        wanted = self._plan(self._observed(), self._uses, now)
        for name, digests in wanted.items():
            loras = [self._known[digest] for digest in digests]
            if name in self._hosts:
                self._hosts[name].plan(loras, now)
            else:
                absent = [lora for lora in loras if lora.digest not in self._workers[name].loras.device]
                self._workers[name].loras.ahead(absent, now, LoadReason.PLAN)

    def _observed(self) -> SimResidency:
        sizes = {digest: lora.size_bytes for digest, lora in self._known.items()}
        return SimResidency((*self._host_places(), *self._device_places()), sizes)

    def _host_places(self) -> list[SimTier]:
        return [
            SimTier(
                name,
                min(LARGEST, host.memory.budget_bytes),
                {digest: host.memory.size_of(digest) or 0 for digest in host.memory},
                TierKind.HOST,
                name,
                self._setting.store_bytes_per_s,
            )
            for name, host in self._hosts.items()
        ]

    def _device_places(self) -> list[SimTier]:
        return [
            SimTier(
                name,
                min(LARGEST, worker.loras.device.budget_bytes),
                {digest: worker.loras.device.size_of(digest) or 0 for digest in worker.loras.device},
                TierKind.DEVICE,
                self._host_of[name],
                self._setting.link_bytes_per_s,
                worker.machine.speed,
            )
            for name, worker in self._workers.items()
        ]


CARD: Final = ModelCard(
    name=MODEL,
    family=Family.FLUX_INPAINT,
    digest=DIGEST,
    vae_scale_factor=8,
    latent_channels=16,
    max_text_tokens=512,
    takes_guidance=True,
    takes_true_cfg=False,
    default_steps=30,
    default_guidance_scale=3.5,
    default_strength=1.0,
)
TOLD: Final = ServiceState(
    service=ServiceName.DENOISER, instance="", host="simulated", version="", ready=True, models=(CARD,)
)


@dataclass(slots=True)
class _JobProgress:
    job: SimulatedJob
    left: int
    """Rows that are not denoised."""
    attempts: int = 0
    assigned_s: float = math.inf
    """The first of its rows."""
    denoised_s: float = 0.0
    unfinished: int = 0
    """Pictures, once all are denoised."""
    workers: dict[str, None] = field(default_factory=dict)


class Simulation:
    """Make it, then :meth:`run` once.

    `scheduler` serves instead of the one that `options` name.
    """

    def __init__(
        self,
        machines: Sequence[Machine],
        jobs: Sequence[SimulatedJob],
        options: RunOptions,
        *,
        templates: TemplateSetting | None = None,
        stages: StageSetting | None = None,
        adapters: AdapterSetting | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        self._options, self._stages, self._jobs = options, stages or StageSetting(), jobs
        self._clock = SimClock()
        self._scheduler, self._wakes_at = scheduler or options.scheduler(), math.inf
        self._placement = Placement(slack=options.slack)
        self._line = options.line()
        servers = self._stages.servers
        self._encoders, self._finishers = (StageServers(servers, self._clock) for _ in range(2))
        kept = options.kept(adapters or AdapterSetting())
        hosts = [SimHost(kept, self._clock) for _ in range(-(-len(machines) // kept.workers_a_host))]
        self._workers = {
            name: SimWorker(
                name,
                machine,
                templates or TemplateSetting(),
                clock=self._clock,
                done=self._denoised,
                adapters=kept,
                shared=hosts[number // kept.workers_a_host],
                batching=options.batching,
            )
            for number, machine in enumerate(machines)
            for name in [f"w{number:04d}"]
        }
        self._placing = (
            None
            if options.placing is AdapterPlan.OFF
            else SimAdapterPlacement(options.placing, options.seed, kept, hosts, self._workers)
        )
        self._carried = {job.job_id: _JobProgress(job, job.demand.rows) for job in jobs}
        self._arrived = 0
        self._ended: list[EndedJob] = []
        self._moments: list[ClusterSample] = []

    def run(self, progress: Callable[[int], None] | None = None) -> SimulatedRun:
        """Until every job has ended; `progress` is told how many have."""
        self._start()
        told = 0
        while len(self._ended) < len(self._jobs):
            if not self._clock.step():
                raise RuntimeError(f"{len(self._jobs) - len(self._ended)} jobs wait for nothing")
            if progress is not None and len(self._ended) >= told + 100:
                told = len(self._ended)
                progress(told)
        counted = tuple(worker.counted for worker in self._workers.values())
        return SimulatedRun(tuple(self._ended), counted, tuple(self._moments), self._clock.now)

    def _start(self) -> None:
        period = 1 / self._options.telemetry_hz
        for number, worker in enumerate(self._workers.values()):
            self._hear(worker, 0.0)
            self._clock.at(period * (number + 1) / len(self._workers), partial(self._tick, worker, period))
        for job in self._jobs:
            self._clock.at(job.at_s, partial(self._arrive, job))
        self._clock.at(0.0, self._look)
        if self._placing is not None:
            self._clock.at(self._placing.period_s, partial(self._place, self._placing))

    def _place(self, placing: SimAdapterPlacement, now: float) -> None:
        """Let plans be made, and again a period later."""
        placing.run(now)
        self._clock.at(now + placing.period_s, partial(self._place, placing))

    def _arrive(self, job: SimulatedJob, now: float) -> None:
        self._arrived += 1
        if self._placing is not None:
            self._placing.see(job.demand.adapters, now)
        joins = partial(
            self._join, SimAssignment(job, 0, tuple(range(job.demand.rows))), self._prefetch(job, now)
        )
        self._encoders.serve(self._stages.encode_ms / 1e3, now, lambda then: self._clock.at(then, joins))

    def _prefetch(self, job: SimulatedJob, now: float) -> str | None:
        """Tell the worker that probably gets a row to load its LoRAs while it is encoded."""
        if not job.demand.adapters or not self._options.adapters or not self._stages.encode_ms:
            return None
        name = likely_worker(self._scheduler, self._placement, job.demand, now)
        if name is not None:
            self._workers[name].loras.ahead(job.demand.adapters, now)
            self._placement.fetch(name, job.demand, now)
        return name

    def _join(self, piece: SimAssignment, fetching: str | None, now: float) -> None:
        job, demand = piece.job, piece.demand
        if not self._options.adapters:
            demand = replace(demand, adapters=(), controls=())
        claim = SchedulingParams(takes_s=self._placement.least_ms(demand.piece()) / 1e3)
        if job.slo_s is not None:
            finish_by_s = job.at_s + job.slo_s - job.demand.rows * self._stages.finish_ms / 1e3
            claim = replace(claim, finish_by_s=finish_by_s)
        self._line.join(job.job_id, demand, claim, now, rows=piece.rows, fetching=fetching)
        self._decide(now)

    def _decide(self, now: float) -> None:
        """Ask the scheduler, apply its decision, and ask again when it wants to be asked."""
        self._placement.heed(self._line.models)
        decision = self._scheduler.decide(self._line, self._placement, now)
        for key, name, rows, passes in decision.placements:
            carried = self._carried[key[0]]
            carried.assigned_s = min(carried.assigned_s, now)
            carried.workers[name] = None
            carried.attempts += 1
            demand = self._line.serve(key, rows, now, passes)
            self._placement.assign(key[0], carried.attempts, name, demand, now)
            self._workers[name].take(SimAssignment(carried.job, carried.attempts, rows), now)
        for key, name, demand in decision.loads:
            self._line.tell(key, name)
            self._placement.fetch(name, demand, now)
            self._workers[name].loras.ahead(demand.adapters, now)
        if decision.wake_at is not None and not now < self._wakes_at <= decision.wake_at:
            self._wakes_at = decision.wake_at
            self._clock.at(decision.wake_at, self._decide)

    def _denoised(self, piece: SimAssignment, now: float) -> None:
        carried = self._carried[piece.job.job_id]
        carried.left -= len(piece.rows)
        self._placement.release(piece.job.job_id, piece.attempt)
        self._decide(now)
        if carried.left:
            return
        carried.denoised_s, carried.unfinished = now, carried.job.demand.rows
        for _ in range(carried.job.demand.rows):
            self._finishers.serve(self._stages.finish_ms / 1e3, now, partial(self._finished, carried))

    def _finished(self, carried: _JobProgress, now: float) -> None:
        carried.unfinished -= 1
        if not carried.unfinished:
            times = carried.assigned_s, carried.denoised_s, now
            self._ended.append(EndedJob(carried.job, *times, "+".join(carried.workers)))

    def _tick(self, worker: SimWorker, period: float, now: float) -> None:
        """Hear `worker`, and again a period later."""
        self._clock.at(now + period, partial(self._tick, worker, period))
        if self._hear(worker, now):
            self._decide(now)

    def _hear(self, worker: SimWorker, now: float) -> bool:
        state = worker.state(now)
        if state is None:
            return False
        told = {
            "instance": worker.name,
            "worker": state,
            "controlnets": _cards(worker.machine),
        }
        self._placement.observe(TOLD.model_copy(update=told), now)
        return True

    def _look(self, now: float) -> None:
        """Note the state of the cluster, once a second, and sort jobs by kinds that are fitted again."""
        if isinstance(self._line, JobKindQueue) and (jobs := self._line.to_fit(now)) is not None:
            self._line.use(fit_kinds(jobs))
        self._moments.append(ClusterSample(now, len(self._line), self._arrived - len(self._ended)))
        self._clock.at(now + 1.0, self._look)


def _cards(machine: Machine) -> tuple[ControlCard, ...]:
    """ControlNets that a worker computes itself."""
    return tuple(
        ControlCard(name=digest, digest=digest, kind=ControlKind.FLUX, text_channels=0, weight_bytes=size)
        for digest, size in machine.controls
    )
