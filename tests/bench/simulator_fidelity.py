"""Does the simulator tell what happens? Live runs at shares of saturation, and the same requests on a virtual clock.

First, on a run of its own, what steps and stages cost is measured: the step samples that denoisers tell in telemetry,
while edits come one by one and all at once, are fitted as `giornata profile` fits its own; processes share the cores
that there are; inspecting, encoding,
decoding and pasting are what answers tell of them. Then requests with another seed arrive by chance, live and
simulated: masks, step counts and times are the same, and nothing that the live run measured is told to the simulator.
Writes ``out/bench/simulator_fidelity.json`` and a chart of both distributions at every rate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import psutil
import torch
from safetensors.numpy import load

from deploy.launcher.model import TRAINED
from deploy.launcher.stack import Stack
from giornata import bus, subjects
from giornata.loadgen.arrivals import arrival_times
from giornata.loadgen.charts import Drawn, svg
from giornata.loadgen.outcomes import Outcome
from giornata.loadgen.statistics import Spread, spread
from giornata.loadgen.workload import Request, draw
from giornata.models import ModelCard, read_model_card
from giornata.permissions import User
from giornata.planning.costs import COMPUTE, StepCosts, Work
from giornata.planning.regression import Fit, fit
from giornata.requests import EditParameters
from giornata.scheduling.demand import Demand, RowShape
from giornata.simulation.jobs import DIGEST, MODEL, Job, template_name
from giornata.simulation.machines import Machine
from giornata.simulation.simulator import Options, Simulation, Stages
from giornata.simulation.worker import Templates
from giornata.workers import RowProgress, ServiceName, ServiceState, StepSample
from giornata_denoiser.reuse.region import region
from giornata_prepost.inspection import PixelLimits, inspect
from tests.bench.live import PROMPT, Pictures, giornata, production, record, saturation, served
from tests.bench.report import OUT, write
from tests.e2e.pictures import edit_form

LIMITS: Final = PixelLimits(max_pixels=1 << 24, budget_pixels=1 << 22)
STEPS: Final = 30
"""Of the edits that measure steps of many rows."""
CROWDED: Final = 1.2
"""How much longer than the median a step takes that shares its processor."""
WARM: Final = 3
"""Edits alone that are not counted."""


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--denoisers", type=int, default=2, help="(default 2)")
    made.add_argument("--side", type=int, default=256, help="of the pictures, in pixels (default 256)")
    made.add_argument("--templates", type=int, default=4, help="distinct pictures (default 4)")
    made.add_argument("--seconds", type=float, default=120.0, help="of arrivals at each rate (default 120)")
    made.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="of saturation")
    made.add_argument("--alone", type=int, default=10, help="edits that measure stages (default 10)")
    made.add_argument(
        "--burst", type=int, default=48, help="edits that measure steps and saturation (default 48)"
    )
    made.add_argument("--simulations", type=int, default=5, help="of each live run (default 5)")
    made.add_argument("--seed", type=int, default=0)
    return made.parse_args(arguments)


@dataclass
class Heard:
    """What denoisers told."""

    samples: list[StepSample] = field(default_factory=list)
    rows: dict[str, RowProgress] = field(default_factory=dict)
    """The latest of each job."""
    blocks: int = 0
    capacity: tuple[int, int] = (0, 0)
    """Rows, tokens."""

    def hear(self, state: ServiceState) -> None:
        """Take in one telemetry message."""
        if state.worker is None or state.worker.costs is None:
            return
        self.samples += state.worker.samples
        self.rows |= {row.job_id: row for row in (*state.worker.waiting, *state.worker.running)}
        self.blocks = state.worker.costs.blocks
        self.capacity = state.worker.capacity_rows, state.worker.capacity_tokens


@asynccontextmanager
async def listening(denoisers: int, templates: Path) -> AsyncIterator[tuple[Stack, Heard]]:
    """The whole system, and what its denoisers tell."""
    heard = Heard()
    async with (
        giornata(denoisers, templates) as stack,
        bus.connect(
            stack.nats_url,
            "fidelity",
            user=User.OBSERVER,
            password_file=stack.nats_password_file(User.OBSERVER),
        ) as observer,
        observer.listen(subjects.ALL_TELEMETRY, ServiceState, heard.hear),
    ):
        yield stack, heard


@dataclass(frozen=True)
class Calibration:
    """What a machine's steps and stages take."""

    compute: Fit
    machine: Machine
    stages: Stages
    cores: float
    """That are left to those who compute."""
    text: int
    """Tokens of the prompt."""


@dataclass(frozen=True)
class Alone:
    """Edits that had the system for themselves, in milliseconds."""

    encode_ms: float
    finish_ms: float
    took_ms: Sequence[float]
    """Each of them as a whole."""


async def measured_alone(stack: Stack, requests: Sequence[Request], pictures: Pictures) -> Alone:
    """One edit after the other."""
    files = pictures.material(requests)
    before, after, took_ms = [], [], []
    async with aiohttp.ClientSession(stack.url) as http:
        for request in requests:
            image, mask = files.templates[request.template].file, files.masks[request]
            form = edit_form(image, mask, prompt=PROMPT, num_inference_steps=request.steps, seed=request.seed)
            began = time.perf_counter()
            async with http.post("/v1/images/edits", data=form) as answer:
                body = await answer.json()
            took_ms.append(1e3 * (time.perf_counter() - began))
            if answer.status != 200:
                raise SystemExit(f"the benchmark's edit failed: {body}")
            spans = body["giornata"]["compute_ms"]
            before.append(spans["inspect"] + spans["encode"])
            after.append(spans["decode"] + spans["paste"])
    return Alone(statistics.median(before[WARM:]), statistics.median(after[WARM:]), took_ms)


async def calibrated(
    stack: Stack,
    heard: Heard,
    burst: Sequence[Request],
    alone: Sequence[Request],
    pictures: Pictures,
    card: ModelCard,
) -> Calibration:
    """From edits all at once, which join at once and leave at once, so that there are only steps in between; and from
    edits alone: what they took longer than is simulated of them are messages and files.
    """
    many = len(stack.instances(ServiceName.DENOISER)) * heard.capacity[0]
    heard.samples.clear()
    began, used_s = time.perf_counter(), processor_s(stack)
    await served([stack.url], [replace(request, steps=STEPS) for request in burst[:many]], pictures)
    stepped_s = sum(sample.step_ms for sample in heard.samples) / 1e3
    others = (processor_s(stack) - used_s - stepped_s) / (time.perf_counter() - began)
    cores = max(1.0, (os.cpu_count() or 1) - max(0.0, others))
    found = await measured_alone(stack, alone, pictures)
    compute, noise = steps_alone(heard)
    rows, tokens = heard.capacity
    machine = Machine(StepCosts(compute.weights), heard.blocks, rows=rows, tokens=tokens, noise=noise)
    stages = Stages(found.encode_ms, found.finish_ms, servers=1)
    text = next(iter(heard.rows.values())).text_tokens
    known = Calibration(compute, machine, stages, cores, text)
    templates = Templates(preloaded=tuple({template_name(request.template) for request in alone}))
    jobs = jobs_of(alone, pictures, card, text)
    longer_ms = [
        took_ms - 1e3 * simulated([replace(job, at_s=0.0)], known, 1, templates, 1)[0]
        for job, took_ms in list(zip(jobs, found.took_ms, strict=True))[WARM:]
    ]
    return replace(known, stages=replace(stages, hops_ms=max(0.0, statistics.median(longer_ms))))


def processor_s(stack: Stack) -> float:
    """Seconds that the system and this process have computed so far, but for images' encoding and decoding."""
    names = [*stack.servers, *(name for service in ServiceName for name in stack.instances(service))]
    image = set(stack.instances(ServiceName.PREPOST))
    processes = [
        psutil.Process(),
        *(psutil.Process(stack.process(name).pid) for name in names if name not in image),
    ]
    return sum(process.cpu_times().user + process.cpu_times().system for process in processes)


def steps_alone(heard: Heard) -> tuple[Fit, float]:
    """What steps cost that had a processor for themselves, and how much equal ones differ.

    Those that shared one with another process took longer, and are left out: what lies far above the fit, twice.
    """
    features = np.array([_work(sample, heard.blocks).features for sample in heard.samples])
    times = np.array([sample.step_ms for sample in heard.samples])
    for _ in range(2):
        found = fit(COMPUTE, features, times, relative=True)
        ratios = times / (features @ np.array(found.weights))
        alone = ratios < CROWDED * np.median(ratios)
        features, times = features[alone], times[alone]
    found = fit(COMPUTE, features, times, relative=True)
    return found, float(np.std(times / (features @ np.array(found.weights))))


def _work(sample: StepSample, blocks: int) -> Work:
    tokens = sample.image_tokens + sample.text_tokens
    return Work(sample.sequences, tokens, sample.projected_tokens, sample.attention_pairs) * blocks


def jobs_of(requests: Sequence[Request], pictures: Pictures, card: ModelCard, text: int) -> list[Job]:
    """The requests as the simulator takes them, with the tokens that their masks really touch."""
    files = pictures.material(requests)
    made = []
    for number, request in enumerate(requests):
        image, computed = _tokens(files.templates[request.template].file, files.masks[request], card)
        shape = RowShape(text, image, computed, request.steps or card.default_steps)
        demand = Demand(MODEL, DIGEST, (shape,), template_name(request.template))
        made.append(Job(f"j{number}", request.at_s, demand))
    return made


def _tokens(image: bytes, mask: bytes, card: ModelCard) -> tuple[int, int]:
    """Of the picture; and of its region, halo included."""
    parameters = EditParameters(prompt=PROMPT)
    found = inspect(image, mask, parameters, card, LIMITS)
    touched, side = load(found.prepared)["mask"] > 0, card.pixel_multiple
    height, width = touched.shape[0] // side, touched.shape[1] // side
    cells = torch.from_numpy(touched.reshape(height, side, width, side).any((1, 3)))
    where = region(cells, parameters.halo)
    return found.tokens, found.tokens if where is None else len(where.computed)


def check_work(jobs: Sequence[Job], heard: Heard) -> None:
    """Whether denoisers were given the work that is simulated.

    Raises:
        SystemExit: a row that they told of is none of the jobs'.
    """
    known = Counter((shape.computed, shape.steps) for job in jobs for shape in job.demand.shapes)
    told = Counter((row.computed_tokens or row.tokens, row.steps) for row in heard.rows.values())
    if unknown := told - known:
        raise SystemExit(f"denoisers had rows that are not simulated, (tokens, steps): {dict(unknown)}")


def simulated(
    jobs: Sequence[Job], known: Calibration, denoisers: int, templates: Templates, seeds: int
) -> list[float]:
    """Latencies in seconds, of as many runs as there are seeds of noise; all processes share this machine's cores."""
    found: list[float] = []
    for seed in range(seeds):
        run = Simulation(
            (known.machine,) * denoisers,
            jobs,
            Options(seed=seed),
            templates=templates,
            stages=known.stages,
            cores=known.cores,
        ).run()
        found += run.latencies()
    return found


async def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = options_of(arguments)
    work = production(options.templates)
    pictures, card = Pictures(options.side, options.seed), read_model_card(TRAINED, None)
    burst = draw([0.0] * options.burst, work, options.seed + 1)
    alone = draw([0.0] * (options.alone + WARM), work, options.seed + 2)
    templates = Templates(preloaded=tuple(template_name(number) for number in range(options.templates)))
    lines: list[dict[str, Any]] = []
    curves: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="gio-") as folder:
        await record(Path(folder), burst, pictures)
        async with listening(options.denoisers, Path(folder)) as (stack, heard):
            await served([stack.url], burst[: options.burst // 2], pictures)  # warms up
            ended = await served([stack.url], burst, pictures)
            most = saturation(ended)
            known = await calibrated(stack, heard, burst, alone, pictures, card)
            compute, stages = known.compute, known.stages
            print(
                f"saturated at {most:.3f} requests/s; steps: R² {compute.r2:.3f}, noise {known.machine.noise:.2f}; "
                f"{known.cores:.2f} cores; {stages}"
            )
            for share in options.shares:
                rate = share * most
                requests = draw(arrival_times(rate, options.seconds, options.seed), work, options.seed)
                heard.rows.clear()
                live = _latencies(await served([stack.url], requests, pictures))
                jobs = jobs_of(requests, pictures, card, known.text)
                check_work(jobs, heard)
                told = simulated(jobs, known, options.denoisers, templates, options.simulations)
                lines.append(_line(share, rate, live, told))
                print(*(f"{name} {value}" for name, value in lines[-1].items()), sep=", ", flush=True)
                for name, values in (("live", live), ("simulated", told)):
                    curves[f"{name}, {share:g}"] = _distribution(values)
    OUT.mkdir(parents=True, exist_ok=True)
    chart = svg(
        "Share of requests that have ended", "seconds", "share", curves, logarithmic=False, drawn=Drawn.LINE
    )
    (OUT / "simulator_fidelity.svg").write_text(chart, encoding="utf-8")
    workload = {
        **vars(options),
        "model": "fresco, float32, a thread a process",
        "masks and steps": "production",
        "aim": "mean within 10 %, P95 within 20 %",
        "saturation_per_s": round(most, 4),
        "saturation": f"{options.burst} requests at once, over the time until the last has ended",
        "calibration": {
            "samples": known.compute.samples,
            "r2": round(known.compute.r2, 4),
            "error_p50": round(known.compute.error_p50, 4),
            "noise": round(known.machine.noise, 4),
            "cores": round(known.cores, 3),
            "weights": dict(zip(COMPUTE, known.compute.weights, strict=True)),
            "encode_ms": round(known.stages.encode_ms, 1),
            "finish_ms": round(known.stages.finish_ms, 1),
            "hops_ms": round(known.stages.hops_ms, 1),
        },
    }
    write("simulator_fidelity", lines, workload=workload)


def _latencies(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.latency_s for outcome in outcomes]


def _distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    ordered = sorted(values)
    return [(value, (place + 1) / len(ordered)) for place, value in enumerate(ordered)]


def _line(share: float, rate: float, live: Sequence[float], told: Sequence[float]) -> dict[str, Any]:
    seen, said = _spread(live), _spread(told)
    return {
        "of saturation": share,
        "requests/s": round(rate, 4),
        "mean error": round(said.mean / seen.mean - 1, 3),
        "P95 error": round(said.p95 / seen.p95 - 1, 3),
        "live mean s": round(seen.mean, 3),
        "simulated mean s": round(said.mean, 3),
        "live P50 s": round(seen.p50, 3),
        "simulated P50 s": round(said.p50, 3),
        "live P95 s": round(seen.p95, 3),
        "simulated P95 s": round(said.p95, 3),
        "requests": len(live),
        "note": ""
        if abs(said.mean / seen.mean - 1) <= 0.1 and abs(said.p95 / seen.p95 - 1) <= 0.2
        else "aim missed",
    }


def _spread(values: Sequence[float]) -> Spread:
    found = spread(values)
    assert found is not None
    return found


if __name__ == "__main__":
    asyncio.run(main())
