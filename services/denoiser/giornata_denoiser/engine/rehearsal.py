"""Two steps of an empty picture before the first edit: it loads kernels, and refuses a model that cannot compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from giornata.packed.region import Region
from giornata.scheduling.batch import Capacity, RowKey
from giornata.tensors import NEGATIVE
from giornata.wire.errors import Failed
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.families.rows import build_row, text_shapes
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.snapshot import GENERATOR
from giornata_denoiser.rows.template import template_generator

GRID: Final = (16, 16)
"""Height and width of the picture in tokens."""


def rehearse(checkpoint: Checkpoint) -> None:
    """Compute two steps in this thread.

    Raises:
        Failed: a step raised, or its result is not finite.
    """
    engine = Engine(checkpoint.family, Capacity(rows=1, tokens=1), lambda: 0.0)  # its times are not read
    key, text_tokens = RowKey("rehearsal", 0, 0), checkpoint.card.max_text_tokens
    engine.batch.submit([practice_row(checkpoint, key, GRID, text_tokens, torch.zeros)])
    while (report := engine.step()) is not None:  # a step may be judged in the next one
        for failure in report.failed:
            raise Failed("The model cannot compute a picture; is its dtype right?") from failure.error


def practice_row(
    checkpoint: Checkpoint,
    key: RowKey,
    grid: tuple[int, int],
    text_tokens: int,
    values: Callable[..., Tensor],
    *,
    guided: bool = False,
    region: Region | None = None,
) -> Row:
    """A row whose sizes matter and whose values do not: `values` makes a tensor of a shape."""
    family, tokens = checkpoint.family, grid[0] * grid[1]
    row = build_row(
        family,
        key,
        grid=grid,
        track=family.schedule.track(
            sampler=family.schedule.default_sampler, steps=2, strength=1.0, cells=tokens
        ),
        text={
            f"{sign}{name}": values(*shape)
            for sign in (("", NEGATIVE) if guided else ("",))
            for name, shape in text_shapes(family, text_tokens).items()
        },
        conditioning={
            name: values(tokens, channels) for name, channels in family.network.conditioning.items()
        }
        | {GENERATOR: template_generator()},
        guidance_scale=checkpoint.card.embedded_guidance_scale,
        true_cfg_scale=2.0 if guided else None,
    )
    return replace(row, region=region)
