"""The model that an adapter is trained for: frozen, with everything that makes scenes its batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FluxFillPipeline

from giornata_lab.model.painter import Painter
from giornata_lab.model.train.painter import FillEncoder
from giornata_lab.model.train.run import Model, TrainingRun
from giornata_lab.model.train.stage import StagePlan, TrainingStateUnusable, digest
from giornata_tools.checkout import TRAINED
from giornata_tools.model.random.text_encoders import TextEncoders


@dataclass(frozen=True)
class FrozenFillCheckpoint:
    """A trained Flux-Fill checkpoint; no weight is learnt on."""

    painter: Painter
    encoder: FillEncoder
    digest: str
    """Digest of the painter's weights, as `stage.digest` tells it."""


def load(plan: StagePlan) -> FrozenFillCheckpoint:
    """The plan's checkpoint, or the one that ships, in float32 on the plan's device."""
    folder: Path = plan.start or TRAINED
    pipeline = FluxFillPipeline.from_pretrained(folder, dtype=torch.float32)
    text = TextEncoders(
        pipeline.text_encoder, pipeline.tokenizer, pipeline.text_encoder_2, pipeline.tokenizer_2
    )
    painter = Painter(pipeline.transformer, text).to(plan.device).eval()
    painter.requires_grad_(requires_grad=False)
    vae = pipeline.vae.to(plan.device).eval().requires_grad_(requires_grad=False)
    return FrozenFillCheckpoint(painter, FillEncoder(vae, text), digest(painter))


def begin(run: TrainingRun[Model], base: FrozenFillCheckpoint) -> None:
    """Note what a new run is trained for.

    Raises:
        Unusable: the run's state was trained for another model.
    """
    if run.step == 0:
        run.taught_by = base.digest
    elif run.taught_by != base.digest:
        raise TrainingStateUnusable(
            f"{run.path} was trained for another model than the present one: remove it to begin again"
        )
