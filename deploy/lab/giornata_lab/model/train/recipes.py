"""The recipes of the models and adapters that ship: their stages in order, and what writes the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from giornata_lab.model.adapters import card
from giornata_lab.model.train import (
    adapter_export,
    autoencoder,
    control,
    decoder,
    export,
    guidance,
    lora,
    painter,
    segmenter,
    segmenter_export,
    unet,
)
from giornata_lab.model.train.stage import StagePlan
from giornata_lab.model.yardstick.architecture import LATENTS
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
            "guidance": RecipeStage(guidance.run, 500),
            "decoder": RecipeStage(decoder.run, 400),
        },
        export.fresco,
        TRAINED,
    ),
    "yardstick": Recipe(
        {
            "autoencoder": RecipeStage(partial(autoencoder.run, space=LATENTS), 1600),
            "unet": RecipeStage(unet.run, 11_000),
            "decoder": RecipeStage(decoder.run, 400),
        },
        export.yardstick,
        ROOT / "deploy" / "model" / "yardstick",
    ),
    "sinopia": Recipe(
        {segmenter.TITLE: RecipeStage(segmenter.run, 4500)}, segmenter_export.sinopia, SEGMENTER
    ),
    "lora": Recipe(
        {
            "outlined": RecipeStage(partial(lora.run, "outlined"), 2400),
            "swapped": RecipeStage(partial(lora.run, "swapped"), 3200),
        },
        adapter_export.loras,
        card.FOLDER,
    ),
    "control": Recipe({"outline": RecipeStage(control.run, 3000)}, adapter_export.controlnets, card.FOLDER),
}
"""Models, and adapters of the first one."""
ADAPTERS: Final = ("lora", "control")
"""Recipes that are trained on a finished checkpoint."""
