"""The runs of ``giornata bench serve``: every load against every server, and the report of what there is at the end."""

from __future__ import annotations

import asyncio
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from giornata import __version__
from giornata.wire.errors import ErrorBody
from giornata_lab.loadgen.driver import ApiDialect, ImagesApi, drive, open_images_api
from giornata_lab.loadgen.outcomes import RequestOutcome, figures
from giornata_lab.loadgen.pictures import TemplatePicture, WorkloadImages, made, material
from giornata_lab.loadgen.report import MeasuredRun, charts, notes, table, value
from giornata_lab.loadgen.schedule import OfferedLoad
from giornata_lab.loadgen.workload import WorkloadRequest
from giornata_tools.cli.edit.order import writing
from giornata_tools.clients.edits import RequestRefused, without_password
from giornata_tools.provenance import versions
from giornata_tools.terminal import INTERRUPTED, counting, show

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
