"""Does the simulator tell what happens? Live runs at shares of saturation, and the same requests on a virtual clock.

Before and after every live run, what steps, stages and messages take is measured on runs of their own, since the
machine is not equally fast at all times; and once how long a burst takes that all denoisers compute at once
(`calibration.py`). Requests with another seed arrive by chance, live and simulated: masks, step counts and times are
the same, and nothing that the live run measured is told to the simulator.
Writes ``out/bench/simulator_fidelity.json`` and a chart of both distributions at every rate.

To see in a minute or two that it runs: ``--denoisers 1 --side 64 --templates 1 --seconds 4 --shares 0.5 --alone 1
--burst 2 --simulations 1``. Its figures say nothing.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import psutil

from giornata.model_cards import read_model_card
from giornata.planning.operations import COMPUTE
from giornata.scheduling.adapters import NeededLora
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata_lab.bench.reporting.report import OUT, write
from giornata_lab.bench.systems.calibration import (
    WARM,
    Calibration,
    CalibrationRound,
    HeardTelemetry,
    Idle,
    calibrated,
    contended,
    idle,
    listening,
    measured,
    simulated,
)
from giornata_lab.bench.systems.live import PROMPT, LivePictures, production, record, saturation, served
from giornata_lab.bench.systems.loras import TAKEN_IN_S, ready_loras, taken_in, write_loras
from giornata_lab.flags import Several, option, parsed
from giornata_lab.loadgen.charts import Chart, Points, PointStyle, distribution
from giornata_lab.loadgen.drawing import figure, svg
from giornata_lab.loadgen.outcomes import DistributionSummary, spread
from giornata_lab.loadgen.workload import (
    AdapterWorkload,
    ArrivalBursts,
    Workload,
    WorkloadRequest,
    arrival_times,
    crowded_times,
    draw,
)
from giornata_lab.simulation.adapters import adapted
from giornata_lab.simulation.jobs import DIGEST, MODEL, SimulatedJob, template_name
from giornata_lab.simulation.templates import TemplateSetting
from giornata_prepost.images.stages import PixelLimits, inspect
from giornata_tools.checkout import TRAINED
from giornata_tools.launcher.stack import Stack

LIMITS: Final = PixelLimits(max_pixels=1 << 24, budget_pixels=1 << 22)
STRAYS: Final = 0.05
"""Share of the rows that may be none of the jobs'."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--denoisers", type=int, default=2),
            option("--side", type=int, default=256, help="of the pictures, in pixels"),
            option("--templates", type=int, default=4, help="distinct pictures"),
            option("--seconds", type=float, default=120.0, help="of arrivals at each rate"),
            option("--shares", type=Several(float), default=[0.3, 0.6, 0.9], help="of saturation"),
            option("--alone", type=int, default=10, help="edits that measure stages, a round"),
            option("--burst", type=int, default=48, help="edits that measure saturation"),
            option(
                "--loras", type=int, default=0, help="distinct small LoRAs, by Zipf's law of 1.1; 0: none"
            ),
            option("--stores", type=int, default=1, help="LoRA stores"),
            option("--crowds", type=float, default=1.0, help="times as many requests for a while"),
            option("--simulations", type=int, default=5, help="of each live run"),
            option("--seed", type=int, default=0),
        ],
        arguments,
    )


def jobs_of(
    requests: Sequence[WorkloadRequest],
    pictures: LivePictures,
    card: ModelCard,
    text: int,
    sizes: Mapping[str, int],
) -> list[SimulatedJob]:
    """The requests as the simulator takes them, with the tokens that their masks really touch.

    `sizes` are bytes of LoRAs by their ids.
    """
    files = pictures.material(requests)
    made = []
    for number, request in enumerate(requests):
        image, computed = _tokens(files.templates[request.template].file, files.masks[request], card)
        shape = RowShape(text, image, computed, request.steps or card.default_steps)
        demand = JobDemand(MODEL, DIGEST, (shape,), template_name(request.template))
        plain = SimulatedJob(f"j{number}", request.at_s, demand)
        made.append(adapted(plain, [NeededLora(name, sizes[name]) for name in request.adapters]))
    return made


def _tokens(image: bytes, mask: bytes, card: ModelCard) -> tuple[int, int]:
    """Tokens of the picture; and of its region, halo included."""
    parameters = EditParameters(prompt=PROMPT)
    found = inspect(image, mask, parameters, card, LIMITS).measures
    return found.tokens, found.tokens if found.compute_set is None else found.compute_set[1].count


@dataclass(frozen=True)
class Work:
    """How the rows that denoisers told of differ from those that are simulated."""

    in_full: int = 0
    """Computed in full though they could reuse, since the costs measured at the start said so."""
    widened: int = 0
    """Computed with a wider region, for which corrections were there already."""
    strays: int = 0
    """Rows of none of the jobs: a denoiser that was frozen tells of its last rows again."""


def check_work(jobs: Sequence[SimulatedJob], heard: HeardTelemetry) -> Work:
    """Return whether denoisers were given the work that is simulated.

    Raises:
        SystemExit: a job's row was not told, or more than :data:`STRAYS` of the rows are none of the jobs'.
    """
    known = Counter((shape.computed, shape.steps) for job in jobs for shape in job.demand.shapes)
    told = Counter((row.computed_tokens or row.tokens, row.steps) for row in heard.rows.values())
    most = max(row.tokens for row in heard.rows.values())
    unknown = sorted((told - known).elements())
    in_full = widened = 0
    for computed, steps in sorted((known - told).elements()):
        found = next((row for row in unknown if row[1] == steps and row[0] >= computed), None)
        if found is None:
            raise SystemExit(f"no denoiser told of a job's row of {computed} tokens and {steps} steps")
        unknown.remove(found)
        in_full += found[0] == most
        widened += found[0] < most
    if len(unknown) > STRAYS * known.total():
        raise SystemExit(f"denoisers told of rows that are not simulated (tokens, steps): {unknown}")
    return Work(in_full, widened, len(unknown))


@dataclass(frozen=True)
class Live:
    """A live run."""

    jobs: Sequence[SimulatedJob]
    """Its requests, as the simulator takes them."""
    latencies: Sequence[float]
    """In seconds."""
    work: Work
    stolen: float
    """Cores that other guests of the machine took."""


@dataclass(frozen=True)
class Bench:
    """The live system, and what edits it."""

    stack: Stack
    heard: HeardTelemetry
    options: SimpleNamespace
    work: Workload
    pictures: LivePictures
    card: ModelCard
    rest: Idle
    """While nobody edits."""
    sizes: Mapping[str, int]
    """Bytes of LoRAs by their ids."""
    burst: Sequence[WorkloadRequest]
    """Requests that came at once."""
    burst_s: float
    """Until the last of them had ended."""

    @property
    def templates(self) -> TemplateSetting:
        """As every denoiser has them."""
        return TemplateSetting(
            preloaded=tuple(template_name(number) for number in range(self.options.templates))
        )

    async def round(self, number: int) -> CalibrationRound:
        """Measure what things take, with edits of its own."""
        seed = self.options.seed + 1000 + 2 * number
        alone = draw([0.0] * (self.options.alone + WARM), self.work, seed)
        together = draw([0.0] * self.heard.capacity[0], self.work, seed + 1)
        return await measured(self.stack, self.heard, number, together, alone, self.pictures, self.rest)

    def calibrated(self, rounds: Sequence[CalibrationRound]) -> Calibration:
        """Return what things take by `rounds`."""
        alone = [edit.request for told in rounds for edit in told.alone]
        jobs = jobs_of(alone, self.pictures, self.card, self.heard.text, self.sizes)
        known = calibrated(rounds, self.heard, jobs, self.templates, self.rest)
        burst = jobs_of(self.burst, self.pictures, self.card, self.heard.text, self.sizes)
        return contended(known, burst, self.burst_s, self.options.denoisers, self.templates)

    async def live(self, rate: float) -> Live:
        """Requests by chance at `rate` a second; one where none would arrive."""
        seconds, seed = self.options.seconds, self.options.seed
        crowds = ArrivalBursts(self.options.crowds, seconds / 8, seconds / 3)
        times = crowded_times(rate, seconds, seed, crowds) if crowds.factor > 1 else []
        times = times or arrival_times(rate, seconds, seed) or [0.0]
        requests = draw(times, self.work, self.options.seed)
        self.heard.forget_rows()
        began_s, stolen_s = time.perf_counter(), psutil.cpu_times().steal
        outcomes = await served([self.stack.url], requests, self.pictures)
        took_s, stolen_s = time.perf_counter() - began_s, psutil.cpu_times().steal - stolen_s
        jobs = jobs_of(requests, self.pictures, self.card, self.heard.text, self.sizes)
        latencies = [outcome.latency_s for outcome in outcomes]
        return Live(jobs, latencies, check_work(jobs, self.heard), stolen_s / took_s)


async def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = options_of(arguments)
    work, pictures = production(options.templates), LivePictures(options.side, options.seed)
    burst = draw([0.0] * options.burst, work, options.seed + 1)
    lines: list[dict[str, Any]] = []
    calibrations: list[dict[str, Any]] = []
    curves: dict[str, Points] = {}
    with tempfile.TemporaryDirectory(prefix="gio-") as folder:
        await record(Path(folder), burst, pictures)
        loras = Path(folder) / "loras" if options.loras else None
        if loras is not None:
            write_loras(loras, options.loras)
        async with listening(options.denoisers, Path(folder), loras, options.stores) as (stack, heard):
            sizes: dict[str, int] = {}
            if loras is not None:
                await stack.watch.until(
                    taken_in(options.loras), TAKEN_IN_S, lambda _: "LoRAs are not taken in"
                )
                ids = await ready_loras(stack.url, options.loras)
                files = {path.stem: path.stat().st_size for path in loras.rglob("*.safetensors")}
                sizes = {ids[name]: files[name] for name in sorted(files)}
                drawn = AdapterWorkload({1: 0.85, 2: 0.15}, zipf=1.1, names=tuple(sizes))
                work = replace(work, adapters=drawn)
                burst = draw([0.0] * options.burst, work, options.seed + 1)
            rest = await idle(stack)
            await served([stack.url], burst[: options.burst // 2], pictures)  # warms up
            most = saturation(await served([stack.url], burst, pictures))
            print(f"saturated at {most:.3f} requests/s; idle: {rest}")
            card = read_model_card(TRAINED, None)
            bench = Bench(stack, heard, options, work, pictures, card, rest, sizes, burst, len(burst) / most)
            rounds = [await bench.round(0)]
            for number, share in enumerate(options.shares):
                live = await bench.live(share * most)
                rounds.append(await bench.round(number + 1))
                known = bench.calibrated(rounds[-2:])
                told = simulated(live.jobs, known, options.denoisers, bench.templates, options.simulations)
                lines.append(_line(share, share * most, live.latencies, told))
                calibrations.append(
                    _known(known) | {"live_work": vars(live.work), "live_stolen_cores": round(live.stolen, 3)}
                )
                print(*(f"{name} {value}" for name, value in lines[-1].items()), sep=", ", flush=True)
                for name, values in (("live", live.latencies), ("simulated", told)):
                    curves[f"{name}, {share:g}"] = distribution(values)
    OUT.mkdir(parents=True, exist_ok=True)
    chart = Chart("Share of requests that have ended", "seconds", "share", curves, PointStyle.LINE)
    (OUT / "simulator_fidelity.svg").write_text(svg(figure(chart)), encoding="utf-8")
    workload = {
        **vars(options),
        "model": "fresco, float32, a thread a process",
        "masks and steps": "production",
        "aim": "mean within 10 %, P95 within 20 %",
        "saturation_per_s": round(most, 4),
        "saturation": f"{options.burst} requests at once, over the time until the last has ended",
        "calibration": f"{options.alone} edits alone and {heard.capacity[0]} at once, before and after each live run",
        "calibrations": calibrations,
    }
    write("simulator_fidelity", lines, workload=workload)


def _known(known: Calibration) -> dict[str, Any]:
    return {
        "samples": known.compute.samples,
        "r2": round(known.compute.r2, 3),
        "noise": round(known.machine.noise, 3),
        "steps_after_to_before": round(known.drift, 3),
        "cores": round(known.cores, 2),
        "weights": dict(zip(COMPUTE, known.compute.weights, strict=True)),
        "encode_ms": round(known.stages.encode_ms, 1),
        "finish_ms": round(known.stages.finish_ms, 1),
        "relay_ms": round(known.stages.relay_ms, 1),
        "hops_ms": round(known.stages.hops_ms, 1),
    }


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


def _spread(values: Sequence[float]) -> DistributionSummary:
    found = spread(values)
    assert found is not None
    return found


if __name__ == "__main__":
    asyncio.run(main())
