"""One denoising step of a whole batch: forward, guidance, the schedule's step, and the blend after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from giornata.packed.tracing import UNTRACED, Tracing
from giornata.packed.uses import Use
from giornata_denoiser.engine.assembly import Assembly
from giornata_denoiser.families.protocol import ModelFamily, Network
from giornata_denoiser.rows.row import Row


class Stepped(NamedTuple):
    """What a step made of the rows, by row."""

    latents: tuple[Tensor, ...]
    """(tokens, channels) each, after the step."""
    clean: tuple[Tensor | None, ...]
    """Latents of the pictures that the step predicts as the end; None for rows that are not shown after it."""
    memory: tuple[tuple[Tensor, ...], ...]
    """What the solver remembers of each row: as its latent each, 0 outside of its region."""


def denoise_step(
    family: ModelFamily,
    assembly: Assembly,
    rows: Sequence[Row],
    uses: Sequence[Use] = (),
    trace: Tracing = UNTRACED,
) -> Stepped:
    """Every row's latent after its next step: outside its region the template's at the row's noise level.

    The assembly is of the same rows, none of them done; for `uses` see :meth:`Network.predict`.
    """
    schedule, lengths = family.schedule, assembly.computed_lengths
    steps = [row.step for row in rows]
    # (rows, 2, n): before the step and after it.
    numbers = torch.stack([each[step : step + 2] for each, step in zip(assembly.numbers, steps, strict=True)])
    latents = [row.latent.to(family.device) for row in rows]  # only rows that join have theirs elsewhere
    seen = [schedule.scaled(latent, now) for latent, now in zip(latents, numbers[:, 0], strict=True)]
    output = _output(family.network, assembly, torch.cat(seen), steps, uses=uses, trace=trace)
    computed = _taken(assembly, latents)
    now, then = numbers.index_select(0, assembly.row_of_computed).unbind(1)
    stepped, memory = schedule.step(computed, output, _memory(family, assembly, rows), now, then)
    completed = tuple(
        _completed(family, assembly, index, part, numbers[index, 1])
        for index, part in enumerate(torch.split(stepped, lengths))
    )
    clean: list[Tensor | None] = [None] * len(rows)
    for index, row in enumerate(rows):
        if row.next_preview is not None:
            was, predicted = (torch.split(packed, lengths)[index] for packed in (computed, output))
            end = schedule.clean(was, predicted, numbers[index, 0])
            clean[index] = _completed(family, assembly, index, end, assembly.numbers[index][-1])
    return Stepped(completed, tuple(clean), _remembered(assembly, rows, memory))


def _taken(assembly: Assembly, whole: Sequence[Tensor]) -> Tensor:
    """(computed_tokens, channels): the regions' tokens of every row's (tokens, channels)."""
    packed = torch.cat(list(whole))
    return packed if assembly.computed is None else packed.index_select(0, assembly.computed)


def _completed(family: ModelFamily, assembly: Assembly, index: int, computed: Tensor, at: Tensor) -> Tensor:
    """A row's whole latent, (tokens, channels), from what was computed of it.

    `computed` is (computed, channels), the tokens of its region; `at` is (n,), the numbers of their noise level.
    """
    region, conditioning = assembly.regions[index], assembly.conditioning[index]
    generated = "image_latents" not in conditioning
    if generated or (region is None and not family.network.blends):
        return computed
    outside = family.schedule.noised(conditioning["image_latents"], conditioning["noise"], at)
    latent = computed
    if region is not None:
        latent = outside.clone() if family.network.blends else outside
        latent[region] = computed
    return blend(latent, outside, conditioning["mask"]) if family.network.blends else latent


def blend(latent: Tensor, outside: Tensor, mask: Tensor) -> Tensor:
    """Put the noised picture where the mask is 0, as inpainting pipelines of diffusers do after each step.

    All are (tokens, channels): the result of the step, the picture at its noise level, and 1 where it is repainted.
    """
    return (1 - mask) * outside + mask * latent


def _memory(family: ModelFamily, assembly: Assembly, rows: Sequence[Row]) -> tuple[Tensor, ...]:
    """What the solver remembers of all rows, (computed_tokens, channels) each; zeros for rows that begin."""
    parts = range(family.schedule.memory)
    held = [row.memory or tuple(torch.zeros_like(row.latent) for _ in parts) for row in rows]
    return tuple(_taken(assembly, [each[part].to(family.device) for each in held]) for part in parts)


def _remembered(
    assembly: Assembly, rows: Sequence[Row], memory: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], ...]:
    """`memory`, (computed_tokens, channels) each, by row and with 0 outside of its region."""
    parts = [torch.split(packed, assembly.computed_lengths) for packed in memory]
    return tuple(
        tuple(_scattered(part[index], assembly.regions[index], row.image_tokens) for part in parts)
        for index, row in enumerate(rows)
    )


def _scattered(part: Tensor, region: Tensor | None, tokens: int) -> Tensor:
    return part if region is None else part.new_zeros(tokens, part.shape[1]).index_copy_(0, region, part)


def _output(
    network: Network,
    assembly: Assembly,
    latents: Tensor,
    steps: Sequence[int],
    *,
    uses: Sequence[Use],
    trace: Tracing,
) -> Tensor:
    """The network's output at every row's region, (computed_tokens, channels), guidance included.

    `latents` are (row_tokens, channels), packed by row; `steps` are by row.
    """
    guided = assembly.guided
    if guided is not None:
        latents = torch.cat((latents, latents.index_select(0, guided.tokens)))
        steps = [*steps, *(steps[row] for row in guided.rows)]
    output = network.predict(assembly.batch, latents, assembly.conditioning, steps, uses=uses, trace=trace)
    if guided is None:
        return output
    positive, negative = torch.split(output, [len(output) - len(guided.computed), len(guided.computed)])
    combined = network.guided(positive.index_select(0, guided.computed), negative, guided.scale)
    return positive.index_copy(0, guided.computed, combined)
