"""How well a yardstick paints: held-out edits through diffusers' own pipeline, judged as `giornata quality` does.

``python -m giornata_lab.model.train.evaluate FOLDER --side 64`` takes a checkpoint, or a folder in which the UNet is
being trained: the averaged weights of its last save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
import numpy as np
import torch
from diffusers import StableDiffusionInpaintPipeline

from giornata_lab.model.painting import edits
from giornata_lab.model.scenes import SceneTask
from giornata_lab.model.train import export, stage, unet
from giornata_lab.quality import cases
from giornata_lab.quality.cases import QualityCaseSpec
from giornata_lab.quality.metrics import Scored, ScoredAddition, ScoredRemoval, score, together

AT_ONCE: Final = 16
DRAWN_SIDE: Final = 128
"""Side of the cases that are spread over colours, shapes and grounds; `--side` draws them smaller or larger."""
LEAST_SIDE: Final = 64
"""Smaller pictures have no room for a mask of `cases.LEAST_MASK_PX` and something beside it."""


def opened(folder: Path) -> StableDiffusionInpaintPipeline:
    """The pipeline of a checkpoint, or of the average in a training folder, in float32.

    Raises:
        click.ClickException: the folder is neither.
    """
    if (folder / "model_index.json").exists():
        pipeline = StableDiffusionInpaintPipeline.from_pretrained(folder, dtype=torch.float32)
    else:
        path = folder / f"{unet.UNET.title}.pt"
        state = stage.load(path)
        if state is None:
            raise click.ClickException(f"{folder} is no checkpoint, and {path.name} is not in it")
        click.echo(f"step {state['step']} of {state['steps']}")
        pipeline = export.unet_pipeline(folder, state["average"])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def chosen(task: SceneTask, side: int, count: int) -> list[QualityCaseSpec]:
    """`count` edits of one task, spread over the held-out ones, in pictures of `side` pixels."""
    slots = [slot for slot in cases.slots() if slot.task is task and slot.side == DRAWN_SIDE]
    return [replace(slot, side=side) for slot in cases.spread(slots, count)] if count else []


def told(scored: Sequence[Scored]) -> str:
    """One line for each task."""
    added = [one for one in scored if isinstance(one, ScoredAddition)]
    removed = [one for one in scored if isinstance(one, ScoredRemoval)]
    lines = []
    if added:
        both, colour, shape = (
            np.mean([getattr(one, name) for one in added])
            for name in ("both_right", "colour_right", "shape_right")
        )
        lines.append(f"{len(added)} additions: {both:.1%} right (colour {colour:.1%}, shape {shape:.1%})")
    if removed:
        psnr = np.mean([one.psnr_db for one in removed])
        ratio = together(one.seam for one in removed).ratio
        lines.append(
            f"{len(removed)} removals: PSNR {psnr:.1f} dB in the mask, seam {ratio:.2f} of the truth's"
        )
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--side", type=click.IntRange(LEAST_SIDE), default=unet.SHOWN_SIDE, help="Of the pictures, in pixels."
)
@click.option("--additions", type=int, default=96, help="Edits that paint a thing.")
@click.option("--removals", type=int, default=24, help="Edits that complete the background.")
@click.option("--steps", type=int, default=unet.STEPS)
@click.option("--guidance", type=float, default=unet.GUIDANCE)
@click.option("--threads", type=int, default=1, help="CPU threads.")
def main(
    *, folder: Path, side: int, additions: int, removals: int, steps: int, guidance: float, threads: int
) -> None:
    """Judge the yardstick in FOLDER by held-out edits."""
    torch.set_num_threads(threads)
    pipeline = opened(folder)
    slots = chosen(SceneTask.ADD, side, additions) + chosen(SceneTask.REMOVE, side, removals)
    scored: list[Scored] = []
    for first in range(0, len(slots), AT_ONCE):
        batch = [cases.draw(slot) for slot in slots[first : first + AT_ONCE]]
        pictures = edits(
            pipeline,
            [case.scene for case in batch],
            [case.slot.index for case in batch],
            num_inference_steps=steps,
            guidance_scale=guidance,
        )
        scored += [score(case, edit) for case, edit in zip(batch, pictures, strict=True)]
    click.echo(f"{side} pixels, {steps} steps, guidance {guidance:g}")
    click.echo(told(scored))


if __name__ == "__main__":
    main()
