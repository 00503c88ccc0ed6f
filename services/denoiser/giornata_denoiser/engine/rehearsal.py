"""Steps of empty pictures before the first edit: they load kernels, and refuse a model that cannot compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, cast

import torch
from torch import Tensor, nn

from giornata.packed.compute_set import Region, make_region, with_companions
from giornata.packed.low_rank import FactorSpan, LowRankFactors, add_products
from giornata.scheduling.batch import Capacity, RowKey
from giornata.tensors import NEGATIVE
from giornata.wire.errors import Failed
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.families.rows import build_row, text_shapes
from giornata_denoiser.rows.row import GENERATOR, RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, template_generator

GRID: Final = (16, 16)
"""Height and width of the picture in tokens."""
RANK: Final = 16
"""That of most LoRAs that are published."""


def rehearse(checkpoint: Checkpoint) -> None:
    """Compute two steps in this thread; on a GPU also a template and edits that take from it, in each form.

    One of these is guided where the model can be, and LoRAs' products are computed; what ControlNets add takes no other
    kernels. Triton compiles one where it is first launched, and libraries load theirs: no edit is to wait for that.

    Raises:
        Failed: a step raised, its result is not finite, or it does not fit into the GPU's memory.
    """
    family, card = checkpoint.family, checkpoint.card
    made = partial(practice_row, checkpoint, grid=GRID, text_tokens=card.max_text_tokens, values=torch.zeros)
    guided = (False, card.takes_negative_prompt)
    rows = [made(RowKey("rehearsal", 0, index), guided=each) for index, each in enumerate(guided)]
    if family.device.type != "cuda":
        _finished(family, rows[:1])
        return
    kept = [form for form in CacheForm if any(spec.channels([BlockMode(form)]) for spec in family.specs)]
    where = with_companions(
        cast("Region", make_region(torch.eye(*GRID) > 0)), family.network.companions(GRID)
    )
    try:
        for form in kept:
            [run] = _finished(family, [replace(rows[0], records=RecordingSpec(frozenset({form}), 8))])
            taken = CachedTemplate("rehearsal", GRID, run.entries)
            _finished(family, [replace(row, region=where, template=taken) for row in rows])
        _multiply_low_ranks(family)
    except torch.OutOfMemoryError as error:
        free, total = (size >> 20 for size in torch.cuda.mem_get_info(family.device))
        message = f"The GPU's memory holds {card.name} and no step; `giornata doctor` tells what fits."
        raise Failed(message, received=f"{free} of {total} MiB free") from error


def _multiply_low_ranks(family: ModelFamily) -> None:
    """Compute a LoRA's product of each size, past the hooks: a network that meets no LoRA is called without."""
    tokens = GRID[0] * GRID[1]
    zeros = partial(torch.zeros, device=family.device, dtype=family.dtype)
    layers = (layer for layer in family.network.layers.values() if isinstance(layer, nn.Linear))
    for outputs, inputs in {layer.weight.shape for layer in layers}:
        acting = FactorSpan(LowRankFactors(zeros(RANK, inputs), zeros(outputs, RANK)), 0, tokens)
        add_products(zeros(tokens, inputs), zeros(tokens, outputs), [acting])


def _finished(family: ModelFamily, rows: Sequence[Row]) -> list[Row]:
    how = ReuseOptions(device=device_for(family.device, 0))
    engine = Engine(family, Capacity(rows=len(rows), tokens=1 << 20), lambda: 0.0, reusing=how)
    engine.batch.submit(rows)
    done: list[Row] = []
    while (report := engine.step()) is not None:  # a step may be judged in the next one
        for failure in report.failed:
            cause = failure.error.__cause__ or failure.error
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause
            message = "The model cannot compute a picture; is its dtype right?"
            raise Failed(message, received=repr(cause)) from failure.error
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
) -> Row:
    """A row whose sizes matter and whose values do not: `values` makes a tensor of a shape."""
    family, tokens = checkpoint.family, grid[0] * grid[1]
    return build_row(
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
