"""The results of a step, row by row. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from giornata.wire.errors import GiornataError, InternalError, RowPoisoned
from giornata.wire.workers import StepCacheCounters
from giornata_denoiser.engine.adapters import LoraNotLoaded
from giornata_denoiser.engine.denoise_step import StepOutput
from giornata_denoiser.engine.protocol import RowPreview
from giornata_denoiser.engine.step_plan import StepPlan
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import Entry


def advance_rows(
    rows: Sequence[Row],
    plan: StepPlan,
    stepped: StepOutput,
    entries: Sequence[Entry | None],
    finite: Sequence[bool],
) -> tuple[Row, ...]:
    """The rows after the step, but for those whose latent is not finite."""
    advanced = []
    for index, row in enumerate(rows):
        if finite[index]:
            learning = plan.learning[index]
            advanced.append(
                row.advanced(
                    stepped.latents[index],
                    stepped.memory[index],
                    stepped.generators[index],
                    entry=entries[index],
                    corrections=tuple([each.correction() for each in learning]) if learning else None,
                    cached=stepped.cached[index],
                )
            )
    return tuple(advanced)


def cached_blocks(rows: Sequence[Row], stepped: StepOutput, depth: int) -> StepCacheCounters:
    """Blocks of the rows with step caches, of a network of so many blocks."""
    computed = skipped = 0
    for row, less in zip(rows, stepped.skipped, strict=True):
        if row.step_cache is not None:
            computed += len(row.prompts) * depth - less
            skipped += less
    return StepCacheCounters(computed_blocks=computed, skipped_blocks=skipped)


def previews(rows: Sequence[Row], pictures: Sequence[Tensor | None]) -> tuple[RowPreview, ...]:
    """Return what `rows`, as they were before the step, are shown as after it."""
    return tuple(
        RowPreview(row.key, row.step + 1, row.steps, index, picture.cpu().numpy())
        for row, picture in zip(rows, pictures, strict=True)
        if picture is not None and (index := row.next_preview) is not None
    )


def row_error(cause: Exception) -> GiornataError:
    """Return how a row that raised when it was computed alone is answered."""
    if isinstance(cause, torch.OutOfMemoryError):
        error: GiornataError = InternalError("The denoiser ran out of memory on this picture.")
    elif isinstance(cause, LoraNotLoaded):
        error = InternalError("A LoRA of this picture was not loaded.")
    else:
        error = RowPoisoned("The denoiser could not compute this picture.")
    error.__cause__ = cause
    return error
