"""Steps of empty pictures before the first edit: they load kernels, and refuse a model that cannot compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor

from giornata.packed.region import Region, beside, region
from giornata.scheduling.batch import Capacity, RowKey
from giornata.tensors import NEGATIVE
from giornata.wire.errors import Failed
from giornata.wire.values import Mode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.families.rows import build_row, text_shapes
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.snapshot import GENERATOR
from giornata_denoiser.rows.template import Form, Recording, template_generator

GRID: Final = (16, 16)
"""Height and width of the picture in tokens."""


def rehearse(checkpoint: Checkpoint) -> None:
    """Compute two steps in this thread; on a GPU also a template and edits that take from it, in each form.

    Triton compiles a kernel where it is first launched, which takes seconds: no edit is to wait for that.

    Raises:
        Failed: a step raised, or its result is not finite.
    """
    family, text_tokens = checkpoint.family, checkpoint.card.max_text_tokens
    made = partial(practice_row, checkpoint, grid=GRID, text_tokens=text_tokens, values=torch.zeros)
    rows = [made(RowKey("rehearsal", 0, index)) for index in range(2)]
    kept = [form for form in Form if any(spec.channels([Mode(form)]) for spec in family.specs)]
    if family.device.type != "cuda":
        _finished(family, rows[:1])
        return
    where = beside(cast("Region", region(torch.eye(*GRID) > 0)), family.network.companions(GRID))
    for form in kept:
        [run] = _finished(family, [replace(rows[0], records=RecordingSpec(frozenset({form}), 8))])
        taken = Recording("rehearsal", GRID, run.entries)
        _finished(family, [replace(row, region=where, template=taken) for row in rows])


def _finished(family: ModelFamily, rows: Sequence[Row]) -> list[Row]:
    how = ReuseOptions(device=device_for(family.device, 0))
    engine = Engine(family, Capacity(rows=len(rows), tokens=1 << 20), lambda: 0.0, reusing=how)
    engine.batch.submit(rows)
    done: list[Row] = []
    while (report := engine.step()) is not None:  # a step may be judged in the next one
        for failure in report.failed:
            raise Failed("The model cannot compute a picture; is its dtype right?") from failure.error
        done += [row for row in report.advanced if row.done]
    return done


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
