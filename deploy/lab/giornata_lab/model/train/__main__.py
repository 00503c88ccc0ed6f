"""Train a model that ships, stage by stage; each stage goes on where it was stopped.

python -m giornata_lab.model.train all                      the shipped recipe, from nothing to deploy/model/fresco
python -m giornata_lab.model.train painter                  one stage, or export
python -m giornata_lab.model.train --model yardstick unet   a stage of another model
python -m giornata_lab.model.train --model sinopia all      the segmenter
python -m giornata_lab.model.train lora                     the LoRAs, as `--model lora all`
python -m giornata_lab.model.train control                  the ControlNet, likewise
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import click
import torch

from giornata_lab.model.adapters import lessons
from giornata_lab.model.train import adapters, autoencoder, export, painter, segmenter, unet
from giornata_lab.model.train.run import StagePlan, TrainingStateUnusable
from giornata_lab.model.train.unet import LATENTS
from giornata_tools.checkout import ROOT, SEGMENTER, TRAINED


@dataclass(frozen=True)
class RecipeStage:
    """One stage, and the steps of the shipped weights."""

    run: Callable[[StagePlan], None]
    steps: int


@dataclass(frozen=True)
class Recipe:
    """How one model is made."""

    stages: Mapping[str, RecipeStage]
    export: Callable[[Path, Path], None]
    """Writes what a folder holds as a checkpoint into another."""
    checkpoint: Path
    """Where that ships."""


RECIPES: Final = {
    "fresco": Recipe(
        {
            "autoencoder": RecipeStage(autoencoder.run, 1600),
            "painter": RecipeStage(painter.run, 20_000),
            "guidance": RecipeStage(painter.distil, 500),
            "decoder": RecipeStage(autoencoder.refine, 400),
        },
        export.fresco,
        TRAINED,
    ),
    "yardstick": Recipe(
        {
            "autoencoder": RecipeStage(partial(autoencoder.run, space=LATENTS), 1600),
            "unet": RecipeStage(unet.run, 11_000),
            "decoder": RecipeStage(autoencoder.refine, 400),
        },
        export.yardstick,
        ROOT / "deploy" / "model" / "yardstick",
    ),
    "sinopia": Recipe({segmenter.TITLE: RecipeStage(segmenter.run, 4500)}, export.sinopia, SEGMENTER),
    "lora": Recipe(
        {
            "outlined": RecipeStage(partial(adapters.run_lora, "outlined"), 2400),
            "swapped": RecipeStage(partial(adapters.run_lora, "swapped"), 3200),
        },
        export.loras,
        lessons.FOLDER,
    ),
    "control": Recipe(
        {"outline": RecipeStage(adapters.run_control, 3000)}, export.controlnets, lessons.FOLDER
    ),
}
"""Models, and adapters of the first one."""
ADAPTERS: Final = ("lora", "control")
"""Recipes that are trained on a finished checkpoint."""


FOLDER: Final = click.Path(path_type=Path)
USUAL: Final = "; ".join(
    f"{model}: " + ", ".join(f"{name} {stage.steps}" for name, stage in recipe.stages.items())
    for model, recipe in RECIPES.items()
)


@click.command(context_settings={"show_default": True})
@click.argument("stage")
@click.option("--model", type=click.Choice(list(RECIPES)), default="fresco")
@click.option("--folder", type=FOLDER, default=Path("out/train"), help="State and results.")
@click.option("--steps", type=int, help=f"Of one stage, in total.  [default: {USUAL}]")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    help="Stop one stage after so long, its state saved.",
)
@click.option("--seed", type=int, default=0, help="Of weights, scenes and noise.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda.")
@click.option("--threads", type=int, default=torch.get_num_threads(), help="CPU threads.")
@click.option("--checkpoint", type=FOLDER, help="Folder that export writes.  [default: where it ships]")
def main(
    *,
    stage: str,
    model: str,
    folder: Path,
    steps: int | None,
    minutes: float | None,
    seed: int,
    device: str,
    threads: int,
    checkpoint: Path | None,
) -> None:
    """Train a model that ships, stage by stage; each stage goes on where it was stopped.

    STAGE is one of the model's, `export`, or `all`: the shipped recipe, from nothing to the checkpoint; or `lora` or
    `control`: all of the adapters' recipes of this name. Exit status: 1
    with a sentence; 130 after Ctrl-C, where the last save stays.
    """
    if stage in ADAPTERS:
        model, stage = stage, "all"
    recipe = RECIPES[model]
    stages = ["all", *recipe.stages, "export"]
    if stage not in stages:
        raise click.UsageError(f"{stage!r} is no stage of this model; it has: {', '.join(stages)}")
    if minutes and stage == "all":
        raise click.UsageError("--minutes goes with one stage: the next one builds on its end")
    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes if minutes else math.inf
    plan = StagePlan(folder, 0, seed, torch.device(device), deadline)
    try:
        for name, part in recipe.stages.items():
            if stage in {"all", name}:
                part.run(replace(plan, steps=steps or part.steps))
        if stage in {"all", "export"}:
            recipe.export(folder, checkpoint or recipe.checkpoint)
    except TrainingStateUnusable as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
