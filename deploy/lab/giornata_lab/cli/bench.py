"""``giornata bench``: measure a server from outside, or serve diffusers' own pipeline, to compare with."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from giornata import __version__
from giornata.wire.errors import ErrorBody
from giornata_lab.cli import workload
from giornata_lab.cli.workload import counting
from giornata_lab.loadgen import workload as facts
from giornata_lab.loadgen.driver import (
    ApiDialect,
    ImagesApi,
    TemplatePicture,
    WorkloadImages,
    drive,
    given,
    made,
    material,
    open_images_api,
)
from giornata_lab.loadgen.outcomes import RequestOutcome, figures
from giornata_lab.loadgen.report import MeasuredRun, charts, notes, table, value
from giornata_lab.loadgen.traces import OfferedLoad, drawn, read_trace_file, replayed
from giornata_lab.loadgen.workload import (
    MAX_SEED,
    AdapterWorkload,
    MaskShape,
    Workload,
    WorkloadRequest,
    zipf,
)
from giornata_lab.provenance import versions
from giornata_tools import checkout, terminal
from giornata_tools.cli import extras, options
from giornata_tools.cli.edit import writing
from giornata_tools.cli.options import gateway_of, usage_errors
from giornata_tools.clients.edits import RequestRefused, without_password
from giornata_tools.lora_profiler.probes import SUFFIXES
from giornata_tools.terminal import INTERRUPTED, show

REPORT: Final = "report.json"


@dataclass(frozen=True)
class BenchTarget:
    """A server."""

    name: str
    url: str


@dataclass(frozen=True)
class BenchPlan:
    """What is measured, and how."""

    targets: tuple[BenchTarget, ...]
    api: ApiDialect
    api_key: str | None
    loads: tuple[OfferedLoad, ...]
    templates: Mapping[int, TemplatePicture] | None
    """None: they are generated."""
    size: tuple[int, int]
    """Width and height of generated pictures, in pixels."""
    fields: Mapping[str, str]
    """Fields of every request's form."""
    slo_s: float | None
    in_flight: int
    timeout_s: float
    seed: int
    out: Path
    options: Mapping[str, Any]
    """The options as typed, for the report."""


async def run(plan: BenchPlan) -> int:
    """Measure and report; the exit status: 1 where nothing succeeded or nothing could be written."""
    runs: list[MeasuredRun] = []
    interrupted = False
    try:
        with writing(str(plan.out)):  # a measurement that took an hour is not to be lost
            plan.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=plan.out).close()
        await _measure(plan, runs)
    except RequestRefused as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    except asyncio.CancelledError:
        interrupted = True
        click.echo("Stopped; this is what there is.", err=True)
    if runs:
        _report(plan, runs, interrupted=interrupted)
    if interrupted:
        return INTERRUPTED
    return 0 if any(run.figures.succeeded for run in runs) else 1


async def _measure(plan: BenchPlan, runs: list[MeasuredRun]) -> None:
    """Fill `runs`, with the one that is cancelled too.

    Raises:
        Refused: a server does not answer the first request, sent ahead of all, with a picture.
    """
    await _try(plan, plan.loads[0].requests[0])
    for load in plan.loads:
        files = await asyncio.to_thread(_material, plan, load.requests)
        for target in plan.targets:
            async with _opened(plan, target, files) as api:
                await _run(plan, target, load, api, runs)


async def _run(
    plan: BenchPlan, target: BenchTarget, load: OfferedLoad, api: ImagesApi, runs: list[MeasuredRun]
) -> None:
    outcomes: list[RequestOutcome] = []
    what = "trace" if load.rate is None else f"{load.rate:g}/s"
    with counting(f"{target.name} {what}", len(load.requests)) as count:

        def record(outcome: RequestOutcome) -> None:
            outcomes.append(outcome)
            count(len(outcomes))

        try:
            await drive(load.requests, api.send, record, limit=plan.in_flight)
        finally:
            found = figures(
                load.requests, outcomes, warmup_s=load.warmup_s, seconds=load.seconds, slo_s=plan.slo_s
            )
            runs.append(MeasuredRun(target.name, load.rate, load.warmup_s, tuple(outcomes), found))


async def _try(plan: BenchPlan, request: WorkloadRequest) -> None:
    """Have every server answer one request."""
    files = await asyncio.to_thread(_material, plan, [request])
    for target in plan.targets:
        async with _opened(plan, target, files) as api:
            answer = await api.send(request)
        if answer.code is not None:
            said = f"{target.name} at {without_password(target.url)} does not answer an edit with a picture: "
            raise RequestRefused(ErrorBody(code=answer.code, message=f"{said}{answer.message}"))


def _material(plan: BenchPlan, requests: Sequence[WorkloadRequest]) -> WorkloadImages:
    return material(requests, plan.templates or made(requests, *plan.size, plan.seed))


def _opened(
    plan: BenchPlan, target: BenchTarget, files: WorkloadImages
) -> AbstractAsyncContextManager[ImagesApi]:
    return open_images_api(
        target.url, files, plan.fields, api=plan.api, api_key=plan.api_key, timeout_s=plan.timeout_s
    )


def _report(plan: BenchPlan, runs: list[MeasuredRun], *, interrupted: bool) -> None:
    told = {
        "workload": {**plan.options, "warmed_up": "one request ahead of the first run of each server"},
        "interrupted": interrupted,
        "versions": {"giornata": __version__, **versions(["aiohttp"]), "python": platform.python_version()},
        "runs": [value(run) for run in runs],
    }
    (plan.out / REPORT).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    from giornata_lab.loadgen.drawing import figure, svg

    for name, chart in charts(runs).items():
        (plan.out / name).write_text(svg(figure(chart)), encoding="utf-8")
    show(table(runs))
    for note in notes(runs):
        click.echo(note)
    click.echo(f"{plan.out / REPORT} has all of it; charts lie beside it.")


NAMES: Final = ("giornata", "baseline")
"""What --url and --against are called."""
OWN: Final = ("image", "mask", "n", "num_inference_steps", "prompt", "seed")
"""Fields that options of their own stand for, or that requests differ in."""
SIDES: Final = range(16, 4097)
"""Accepted width and height of a generated picture, in pixels."""

Options = Mapping[str, Any]
"""Values by name; :mod:`giornata_lab.cli.workload` reads some of them as `Given`."""


def size(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT in pixels.

    Raises:
        ValueError: it is no such size.
    """
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    sides = tuple(map(int, found.groups())) if found else ()
    if not sides or not all(side in SIDES for side in sides):
        raise ValueError(f"{text} is no size such as 512x512, of sides from {SIDES[0]} to {SIDES[-1]} pixels")
    return sides[0], sides[1]


def plan_of(chosen: Options, typed: Collection[str]) -> BenchPlan:
    """The plan; `typed` are the options that were typed.

    Raises:
        click.UsageError: options that contradict each other, or a file that cannot be read.
    """
    loads = _loads(chosen, typed)
    return BenchPlan(
        targets=_targets(chosen),
        api=ApiDialect(chosen["api"]),
        # Never an argument, which others on the machine could read.
        api_key=os.environ.get("GIORNATA_API_KEY", "").strip() or None,
        loads=tuple(loads),
        templates=_given(chosen["images"], loads),
        size=chosen["picture_size"].value,
        fields=_fields(chosen),
        slo_s=chosen["slo"],
        in_flight=chosen["in_flight"],
        timeout_s=chosen["timeout"],
        seed=chosen["seed"],
        out=chosen["out"],
        options={name: _told(name, value) for name, value in chosen.items()},
    )


def _loads(chosen: Options, typed: Collection[str]) -> list[OfferedLoad]:
    if chosen["trace"] and (by_chance := {"rate", "cv", "duration"} & set(typed)):
        raise click.UsageError(f"--trace says when requests are due; leave out --{min(by_chance)}.")
    if "steps" in typed and chosen["api"] == ApiDialect.OPENAI:
        raise click.UsageError(
            "--api openai has no field for steps; leave out --steps, or say --api giornata."
        )
    if "speed" in typed and not chosen["trace"]:
        raise click.UsageError("--speed belongs to --trace.")
    shared = {"warmup_s": chosen["warmup"], "seed": chosen["seed"]}
    with usage_errors(chosen["trace"] or "No load"):
        if chosen["trace"]:
            lines = read_trace_file(chosen["trace"])
            return [replayed(lines, _workload(chosen), speed=chosen["speed"], **shared)]
        return drawn(
            chosen["rate"].value,
            _workload(chosen),
            cv=chosen["cv"],
            seconds=chosen["duration"],
            **shared,
        )


def _workload(chosen: Options) -> Workload:
    pictures = len(_files(chosen["images"])) if chosen["images"] else chosen["templates"]
    masks, steps, images = (chosen[name].value for name in ("masks", "steps", "n"))
    steps = None if chosen["api"] == ApiDialect.OPENAI else steps
    ids = tuple(chosen["lora"])
    loras = AdapterWorkload(chosen["loras"].value, zipf=chosen["lora_zipf"], names=ids) if ids else None
    return Workload(
        masks, steps, images, zipf(pictures, chosen["zipf"]), MaskShape(chosen["mask_shape"]), loras
    )


def _targets(chosen: Options) -> tuple[BenchTarget, ...]:
    urls = [chosen["url"], *([chosen["against"]] if chosen["against"] else [])]
    return tuple(BenchTarget(name, gateway_of(url)) for name, url in zip(NAMES, urls, strict=False))


def _fields(chosen: Options) -> dict[str, str]:
    found: dict[str, str] = {}
    with usage_errors("--field"):
        for text in chosen["fields"]:
            name, equals, value = text.partition("=")
            if not equals or not re.fullmatch(r"\w+", name):
                raise ValueError(f"{text} is not of the form NAME=VALUE")
            if name in OWN or name in found:
                raise ValueError(
                    f"{name} is set twice, or has an option of its own; set other fields, each once"
                )
            found[name] = value
    model = {"model": chosen["model"]} if chosen["model"] else {}
    return {"prompt": chosen["prompt"], **model, **found}


def _files(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not found:
        raise click.UsageError(f"--images: no file in {folder} ends with {', '.join(SUFFIXES)}.")
    return found


def _given(folder: Path | None, loads: Sequence[OfferedLoad]) -> dict[int, TemplatePicture] | None:
    if folder is None:
        return None
    with usage_errors("--images"):
        found = given([path.read_bytes() for path in _files(folder)])
    last = max(request.template for load in loads for request in load.requests)
    if last not in found:
        raise click.UsageError(
            f"--images: the trace edits template {last}; the folder's last is {len(found) - 1}."
        )
    return found


def _told(name: str, value: Any) -> Any:
    """An option for the report."""
    if name in {"url", "against"} and value:
        return without_password(value)
    return value if isinstance(value, int | float | None) else list(value) if name == "fields" else str(value)


@click.group()
def bench() -> None:
    """Measure a server under load."""


@bench.command(context_settings={"show_default": True})
@options.url_option
@click.option("--against", metavar="URL", help="Another server, measured in turn with the same requests.")
@click.option(
    "--api",
    type=click.Choice([str(api) for api in ApiDialect]),
    default=str(ApiDialect.GIORNATA),
    help="openai: only the fields of OpenAI's API; giornata: num_inference_steps and seed too.",
)
@workload.rate_option(default="1", help="Requests a second; a run for each.")
@workload.cv_option
@workload.trace_option(help=f"Replay a .csv or .jsonl file instead: {workload.TRACE}.")
@workload.speed_option
@workload.duration_option(default=60.0, help="Of each run, after the warm-up.")
@workload.warmup_option(default=10.0, help="Requests due before it are sent and left out of all figures.")
@workload.masks_option
@click.option(
    "--mask-shape", type=click.Choice([str(shape) for shape in MaskShape]), default=str(MaskShape.BLOB)
)
@workload.steps_option(help="A number, production's mix, or server: the server's default.")
@workload.images_option(help="Pictures a request asks for: a number, or production's mix.")
@click.option(
    "--templates", type=options.COUNT, default=8, help="Distinct pictures, where they are generated."
)
@workload.zipf_option
@click.option(
    "--images",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Take the pictures of a folder, by name; the first is the most popular.",
)
@workload.read_option(
    "--picture-size", parse=size, default="512x512", metavar="WIDTHxHEIGHT", help="Of generated pictures."
)
@click.option(
    "--lora",
    multiple=True,
    metavar="ID",
    help="A LoRA that requests may name, the most popular first; repeatable.",
)
@workload.read_option(
    "--loras",
    parse=workload.lora_numbers,
    default="production",
    metavar="N",
    help="Of a request, of these LoRAs: a number, or GenTD26's mix.",
)
@click.option("--lora-zipf", type=options.AT_LEAST_0, default=facts.LORA_ZIPF, help="Of their popularity.")
@click.option("--prompt", default="a red star", help="Of every edit.")
@click.option("--model", help="To name to the server.")
@click.option(
    "--field", "fields", multiple=True, metavar="NAME=VALUE", help="Any other field of the form; repeatable."
)
@click.option(
    "--slo", type=options.ABOVE_0, metavar="SECONDS", help="How long an answer may take to count as goodput."
)
@click.option(
    "--in-flight",
    type=options.COUNT,
    default=1000,
    help="Most requests without an answer; others are errors.",
)
@click.option(
    "--timeout", type=options.ABOVE_0, default=600.0, metavar="SECONDS", help="Longest wait for an answer."
)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, help="Of everything that is drawn.")
@options.folder_option("-o", "--out", default=Path("out/serve"), help="Where report and charts are written.")
@click.pass_context
def serve(ctx: click.Context, /, **given: Any) -> None:
    """Send each edit when it is due, answered or not the ones before, and measure.

    Latencies count from when a request was due. A table is printed; FOLDER gets report.json, with every request, and
    charts. Ctrl-C ends the measurement and reports what there is.
    """
    extras.require("bench", "lab")
    plan = plan_of(given, options.typed(ctx))
    ctx.exit(terminal.run(lambda: run(plan)))


@bench.command(context_settings={"show_default": True})
@options.model_option(
    "A diffusers folder or a hub id.", default=str(checkout.TRAINED), show_default="the one that ships"
)
@click.option("--host", default="127.0.0.1")
@click.option("--port", type=int, default=8100, help="0 takes any free one.")
@click.option("--batch", type=options.COUNT, default=8, metavar="N", help="Most pictures of a batch.")
@click.option(
    "--window-ms",
    type=float,
    default=100.0,
    metavar="MS",
    help="Longest wait of a picture for others, while the pipeline is free.",
)
@click.option("--queue", type=options.COUNT, default=1000, metavar="N", help="Most pictures that wait.")
@options.device_option
@options.dtype_option
@options.torch_threads_option("Threads that compute.", os.cpu_count())
@click.pass_context
def baseline(ctx: click.Context, /, **given: Any) -> None:
    """Serve a checkpoint by diffusers' own pipeline with static batching, to compare with."""
    extras.require("local", "lab")
    from giornata_lab.baseline import server
    from giornata_tools.launcher import up

    ctx.exit(up.run("baseline", partial(server.serve, server.BaselineOptions(**given))))
