"""What the live system's steps, stages and messages take on this machine, measured for the simulator.

One denoiser at a time, while the others are frozen: then no two of them share cores, whose sharing is for the simulator
to foretell. Step samples, while edits come one by one and all at once, are fitted as `giornata profile` fits its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np
import psutil

from giornata.bus import bus
from giornata.fleet import Fleet
from giornata.planning.cost_model import LinearFit, StepCosts, fit
from giornata.planning.operations import COMPUTE, NetworkOperations
from giornata.scheduling.cost_models import work_of
from giornata.wire import subjects
from giornata.wire.permissions import NatsRole
from giornata.wire.workers import AdapterLoad, RowProgress, ServiceName, ServiceState, StepSample, Tier
from giornata_lab.bench.systems.edit_forms import edit_form
from giornata_lab.bench.systems.live import DEVICE_MB, PROMPT, LivePictures, giornata, served
from giornata_lab.loadgen.workload import WorkloadRequest
from giornata_lab.simulation.jobs import SimulatedJob
from giornata_lab.simulation.machines import Machine
from giornata_lab.simulation.options import RunOptions, StageSetting
from giornata_lab.simulation.residency import AdapterSetting
from giornata_lab.simulation.simulator import Simulation
from giornata_lab.simulation.templates import TemplateSetting
from giornata_tools.launcher.stack import Stack

STEPS: Final = 30
"""Steps of the edits that measure steps of many rows."""
WARM: Final = 2
"""Edits alone that are not counted."""
IDLE_S: Final = 5.0
SETTLED_S: Final = 1.5
"""After which the router knows of denoisers what the launcher does, and a round's rows are told of no more."""
CORES_WITHIN: Final = 0.02
ALONE_S: Final = 30.0
"""Within which the others' absence is noticed, and their return."""


@dataclass
class HeardTelemetry:
    """What denoisers told."""

    samples: list[StepSample] = field(default_factory=list)
    adapter_loads: list[AdapterLoad] = field(default_factory=list)
    rows: dict[str, RowProgress] = field(default_factory=dict)
    """The latest of each job."""
    past: set[str] = field(default_factory=set)
    """Jobs whose rows are forgotten: a denoiser that was frozen may tell of them once more."""
    operations: NetworkOperations | None = None
    """Operations of the network; None until a denoiser has told."""
    capacity: tuple[int, int] = (0, 0)
    """Rows, tokens."""

    @property
    def text(self) -> int:
        """Tokens of the prompt."""
        return next(iter(self.rows.values())).text_tokens

    def hear(self, state: ServiceState) -> None:
        """Take in one telemetry message."""
        if state.worker is None or state.worker.cost_model is None:
            return
        self.samples += state.worker.samples
        self.adapter_loads += state.worker.adapter_loads
        rows = (*state.worker.waiting, *state.worker.running)
        self.rows |= {row.job_id: row for row in rows if row.job_id not in self.past}
        if state.worker.blocks is not None:
            self.operations = NetworkOperations(state.worker.blocks)
        self.capacity = state.worker.capacity_rows, state.worker.capacity_tokens

    def forget_rows(self) -> None:
        """Rows that are told from now on are other jobs'."""
        self.past |= self.rows.keys()
        self.rows.clear()


@asynccontextmanager
async def listening(
    denoisers: int, templates: Path, loras: Path | None = None, stores: int = 1
) -> AsyncIterator[tuple[Stack, HeardTelemetry]]:
    """The whole system, and what its denoisers tell."""
    heard = HeardTelemetry()
    async with (
        giornata(denoisers, templates, loras, stores) as stack,
        bus.connect(
            stack.nats_url,
            "fidelity",
            user=NatsRole.OBSERVER,
            password_file=stack.nats_password_file(NatsRole.OBSERVER),
        ) as observer,
        observer.listen(subjects.ALL_TELEMETRY, ServiceState, heard.hear),
    ):
        yield stack, heard


@dataclass(frozen=True)
class Alone:
    """One edit that had the system for itself, in milliseconds."""

    request: WorkloadRequest
    encode_ms: float
    finish_ms: float
    took_ms: float
    """As a whole."""


@dataclass(frozen=True)
class CalibrationRound:
    """One denoiser's samples."""

    samples: Sequence[StepSample]
    alone: Sequence[Alone]
    relay_ms: float
    """Computed by gateway, router, message servers and this process for an edit, beyond what they do when idle."""


@dataclass(frozen=True)
class Calibration:
    """What steps, stages and messages take."""

    compute: LinearFit
    machine: Machine
    stages: StageSetting
    cores: float
    """That are left by what runs though nobody edits."""
    drift: float
    """How much slower steps were in the last round than in the first."""
    adapters: AdapterSetting = field(default_factory=AdapterSetting)
    """What devices keep of LoRAs, and what their loads took."""


@dataclass(frozen=True)
class Idle:
    """Cores that are busy though nobody edits."""

    all: float
    """By whatever runs, and by other guests of the machine."""
    relay: float
    """By gateway, router, message servers and this process."""


async def idle(stack: Stack) -> Idle:
    """Watch for a while."""
    busy_s, relay_s = _busy_s(), _relay_s(stack)
    await asyncio.sleep(IDLE_S)
    return Idle((_busy_s() - busy_s) / IDLE_S, (_relay_s(stack) - relay_s) / IDLE_S)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


async def measured(
    stack: Stack,
    heard: HeardTelemetry,
    number: int,
    together: Sequence[WorkloadRequest],
    alone: Sequence[WorkloadRequest],
    pictures: LivePictures,
    rest: Idle,
) -> CalibrationRound:
    """One round on one of the denoisers: edits one after the other, then as many at once as share a step."""
    async with _one_denoiser(stack, number):
        heard.samples.clear()
        found, relay_s = await _alone(stack, alone, pictures)
        took_s = sum(edit.took_ms for edit in found) / 1e3
        relay_ms = 1e3 * max(0.0, relay_s - rest.relay * took_s) / len(found)
        many = [replace(request, steps=STEPS, at_s=0.0) for request in together[: heard.capacity[0]]]
        await served([stack.url], many, pictures)
        await asyncio.sleep(1.0)  # the last telemetry of it
        samples = tuple(heard.samples)
    return CalibrationRound(samples, found, relay_ms)


@asynccontextmanager
async def _one_denoiser(stack: Stack, number: int) -> AsyncIterator[None]:
    """All but one are frozen."""
    names = sorted(stack.instances(ServiceName.DENOISER))

    async def ready(count: int) -> None:
        def enough(fleet: Fleet) -> bool:
            return len(fleet.ready(ServiceName.DENOISER)) == count

        await stack.watch.until(enough, ALONE_S, lambda _: f"there are never {count} denoisers")
        await asyncio.sleep(SETTLED_S)

    others = [name for place, name in enumerate(names) if place != number % len(names)]
    for name in others:
        stack.process(name).freeze()
    try:
        await ready(1)
        yield
    finally:
        for name in others:
            stack.process(name).thaw()
    await ready(len(names))


async def _alone(
    stack: Stack, requests: Sequence[WorkloadRequest], pictures: LivePictures
) -> tuple[list[Alone], float]:
    """One edit after the other, and for how many seconds those between them computed meanwhile."""
    files, found, computed_s = pictures.material(requests), [], 0.0
    async with aiohttp.ClientSession(stack.url) as http:
        for place, request in enumerate(requests):
            if place == WARM:
                computed_s = _relay_s(stack)
            image, mask = files.templates[request.template].file, files.masks[request]
            asked = {"prompt": PROMPT, "num_inference_steps": request.steps, "seed": request.seed}
            if request.adapters:
                asked["loras"] = json.dumps([{"id": name} for name in request.adapters])
            form = edit_form(image, mask, **asked)
            began = time.perf_counter()
            async with http.post("/v1/images/edits", data=form) as answer:
                body = await answer.json()
            took_ms = 1e3 * (time.perf_counter() - began)
            if answer.status != 200:
                raise SystemExit(f"the benchmark's edit failed: {body}")
            spans = body["giornata"]["compute_ms"]
            before, after = spans["inspect"] + spans["encode"], spans["decode"] + spans["paste"]
            found.append(Alone(request, before, after, took_ms))
    return found[WARM:], _relay_s(stack) - computed_s


def _relay_s(stack: Stack) -> float:
    """Seconds that they have computed so far."""
    names = [*stack.servers, *stack.instances(ServiceName.GATEWAY), *stack.instances(ServiceName.ROUTER)]
    processes = [psutil.Process(), *(psutil.Process(stack.process(name).pid) for name in names)]
    return sum(process.cpu_times().user + process.cpu_times().system for process in processes)


def steps(samples: Sequence[StepSample]) -> tuple[LinearFit, float]:
    """Return what steps cost, all together what was measured, and by how much equal ones differ."""
    features = np.array([work_of(sample) for sample in samples])
    times = np.array([sample.step_ms for sample in samples])
    found = fit(COMPUTE, features, times, relative=True)
    scale = float(times.sum() / (features @ np.array(found.weights)).sum())
    found = found.model_copy(update={"weights": tuple(scale * weight for weight in found.weights)})
    return found, float(np.std(times / (features @ np.array(found.weights))))


def _slowness(samples: Sequence[StepSample], known: LinearFit) -> float:
    works = (work_of(sample) for sample in samples)
    return sum(sample.step_ms for sample in samples) / sum(StepCosts(known.weights).step_ms(w) for w in works)


def calibrated(
    rounds: Sequence[CalibrationRound],
    heard: HeardTelemetry,
    jobs: Sequence[SimulatedJob],
    templates: TemplateSetting,
    rest: Idle,
) -> Calibration:
    """From all of `rounds` together.

    What edits alone took longer than is simulated of them are hops: messages, files and waits while nobody computes.

    Args:
        rounds: measured.
        heard: of the same system.
        jobs: the edits alone of all rounds, in their order.
        templates: that denoisers have.
        rest: while nobody edits.
    """
    compute, noise = steps([sample for told in rounds for sample in told.samples])
    rows, tokens = heard.capacity
    if heard.operations is None:
        raise RuntimeError("no denoiser has told its blocks")
    machine = Machine(StepCosts(compute.weights), heard.operations, rows=rows, tokens=tokens, noise=noise)
    alone = [edit for told in rounds for edit in told.alone]
    stages = StageSetting(
        statistics.fmean(edit.encode_ms for edit in alone),
        statistics.fmean(edit.finish_ms for edit in alone),
        servers=1,
        relay_ms=statistics.fmean(told.relay_ms for told in rounds),
    )
    cores = max(1.0, (os.cpu_count() or 1) - rest.all)
    first, last = (_slowness(rounds[place].samples, compute) for place in (0, -1))
    known = Calibration(compute, machine, stages, cores, last / first, _kept(heard.adapter_loads))
    quiet = replace(known, machine=replace(machine, noise=0.0))
    longer_ms = [
        edit.took_ms - 1e3 * simulated([replace(job, at_s=0.0)], quiet, 1, templates, 1)[0]
        for edit, job in zip(alone, jobs, strict=True)
    ]
    return replace(known, stages=replace(stages, hops_ms=max(0.0, statistics.fmean(longer_ms))))


def _kept(loads: Sequence[AdapterLoad]) -> AdapterSetting:
    """Return what devices hold, and links by the loads that were told: their mean time as latency, beside it none."""
    took_s = {
        source: [load.load_ms / 1e3 for load in loads if load.source is source]
        for source in (None, Tier.DISK, Tier.MEMORY)
    }
    mean_s = {source: statistics.fmean(told) if told else 0.0 for source, told in took_s.items()}
    return AdapterSetting(
        device_bytes=DEVICE_MB << 20,
        memory_bytes=1e12,
        disk_bytes=1e12,
        store_bytes_per_s=1e15,
        disk_bytes_per_s=1e15,
        link_bytes_per_s=1e15,
        store_latency_s=mean_s[None],
        disk_latency_s=mean_s[Tier.DISK],
        link_latency_s=mean_s[Tier.MEMORY],
    )


def contended(
    known: Calibration,
    burst: Sequence[SimulatedJob],
    took_s: float,
    denoisers: int,
    templates: TemplateSetting,
) -> Calibration:
    """With the cores that a burst had for itself: processes that compute at once also share caches and memory.

    Args:
        known: by edits of one denoiser at a time.
        burst: jobs that all came at once.
        took_s: until the last of them had ended, live.
        denoisers: that shared it.
        templates: that denoisers have.
    """
    least, most = 0.5, known.cores
    while most - least > CORES_WITHIN:
        cores = (least + most) / 2
        told = max(simulated(burst, replace(known, cores=cores), denoisers, templates, 1))
        least, most = (least, cores) if told < took_s else (cores, most)
    return replace(known, cores=most)


def simulated(
    jobs: Sequence[SimulatedJob], known: Calibration, denoisers: int, templates: TemplateSetting, seeds: int
) -> list[float]:
    """Latencies in seconds, of as many runs as there are seeds of noise; all processes share this machine's cores."""
    found: list[float] = []
    for seed in range(seeds):
        run = Simulation(
            (known.machine,) * denoisers,
            jobs,
            RunOptions(seed=seed),
            templates=templates,
            stages=known.stages,
            adapters=known.adapters,
            cores=known.cores,
        ).run()
        found += run.latencies()
    return found
