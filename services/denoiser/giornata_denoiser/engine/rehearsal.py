"""One step of an empty picture before the first edit: it loads kernels, and refuses a model that cannot compute."""

from __future__ import annotations

from typing import Final

import torch

from giornata.scheduling.batch import Capacity, RowKey
from giornata.wire.errors import Failed
from giornata_denoiser.checkpoints.checkpoint import Checkpoint
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.families.rows import build_row, text_shapes
from giornata_denoiser.rows.row import Row

GRID: Final = (16, 16)
"""Height and width of the picture in tokens."""


def rehearse(checkpoint: Checkpoint) -> None:
    """Compute a step in this thread.

    Raises:
        Failed: the step raised, or its result is not finite.
    """
    engine = Engine(checkpoint.family, Capacity(rows=1, tokens=1), lambda: 0.0)  # its times are not read
    engine.batch.submit([_empty_row(checkpoint)])
    report = engine.step()
    for failure in report.failed if report else ():
        raise Failed("The model cannot compute a picture; is its dtype right?") from failure.error


def _empty_row(checkpoint: Checkpoint) -> Row:
    family, tokens = checkpoint.family, GRID[0] * GRID[1]
    return build_row(
        family,
        RowKey("rehearsal", 0, 0),
        grid=GRID,
        track=family.schedule.track(steps=1, strength=1.0, cells=tokens),
        text={
            name: torch.zeros(shape)
            for name, shape in text_shapes(family, checkpoint.card.max_text_tokens).items()
        },
        conditioning={
            name: torch.zeros(tokens, channels) for name, channels in family.network.conditioning.items()
        },
        guidance_scale=checkpoint.card.default_guidance_scale,
    )
