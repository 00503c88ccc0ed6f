"""One step of an empty picture before the first edit: kernels get loaded, and what cannot compute never serves."""

from __future__ import annotations

from typing import Final

import torch

from giornata.scheduling.batch import Capacity, RowKey
from giornata.wire.errors import Failed
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.rows.row import Row, build_row
from giornata_denoiser.rows.sigmas import sigma_grid

GRID: Final = (16, 16)
"""Tokens: 256x256 pixels for Flux."""


def rehearse(checkpoint: Checkpoint) -> None:
    """Compute a step in this thread.

    Raises:
        Failed: the step raised, or its result is not finite.
    """
    engine = Engine(checkpoint.family, Capacity(rows=1, tokens=1), lambda: 0.0)  # nobody reads its times
    engine.batch.submit([_empty_row(checkpoint)])
    report = engine.step()
    for failure in report.failed if report else ():
        raise Failed("The model cannot compute a picture; is its dtype right?") from failure.error


def _empty_row(checkpoint: Checkpoint) -> Row:
    family, tokens = checkpoint.family, GRID[0] * GRID[1]
    joint_dim, pooled_dim = family.prompt_channels
    return build_row(
        family,
        RowKey("rehearsal", 0, 0),
        grid=GRID,
        sigmas=sigma_grid(checkpoint.scheduler, steps=1, strength=1.0, image_tokens=tokens),
        text={
            "prompt_embeds": torch.zeros(checkpoint.card.max_text_tokens, joint_dim),
            "pooled_prompt_embeds": torch.zeros(pooled_dim),
        },
        conditioning={name: torch.zeros(tokens, width) for name, width in family.conditioning.items()},
        guidance_scale=checkpoint.card.default_guidance_scale,
    )
