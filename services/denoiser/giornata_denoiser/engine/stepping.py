"""One denoising step of a whole batch: forward, guidance, Euler, and what the family does after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from giornata.packed.sequences import Sequences
from giornata.packed.tracing import UNTRACED, Tracing
from giornata.packed.uses import Use
from giornata_denoiser.engine.assembly import Assembly
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.sigmas import combine_guidance, euler_step, scale_noise


class Stepped(NamedTuple):
    """What a step made of the rows, one of each a row."""

    latents: tuple[Tensor, ...]
    """(tokens, 4 * latent_channels) each, after the step."""
    clean: tuple[Tensor | None, ...]
    """Likewise, of the picture that the step predicts as the end; None for rows that are not shown after it."""


def denoise_step(
    family: Family,
    assembly: Assembly,
    rows: Sequence[Row],
    uses: Sequence[Use] = (),
    trace: Tracing = UNTRACED,
) -> Stepped:
    """Every row's latent after its next step.

    Outside a row's region the latent is the template's at the row's noise level: the straight line between picture
    and noise, which a rectified flow follows where nothing is repainted.

    Args:
        family: the checkpoint's.
        assembly: of the same rows, in the same order.
        rows: none of them done.
        uses: what each sequence does with a template; see :meth:`Family.velocity`.
        trace: told of every block.
    """
    sigma = torch.stack([row.sigmas.sigmas[row.step] for row in rows])
    next_sigma = torch.stack([row.sigmas.sigmas[row.step + 1] for row in rows])
    timestep = torch.stack([row.sigmas.timesteps[row.step] for row in rows])
    levels = torch.stack((next_sigma - sigma, next_sigma, sigma, timestep)).to(family.device)
    delta, next_sigma, sigma, timestep = levels
    latent = torch.cat([row.latent for row in rows])
    image = family.model_input(latent, [row.conditioning for row in rows])
    velocity = _velocity(partial(family.velocity, uses=uses, trace=trace), assembly, image, timestep)
    computed = latent if assembly.computed is None else latent.index_select(0, assembly.computed)
    stepped = euler_step(computed, velocity, delta.index_select(0, assembly.row_of_computed).unsqueeze(1))
    latents = tuple(
        _completed(family, row, part, reached)
        for row, part, reached in zip(
            rows,
            torch.split(stepped, list(assembly.computed_lengths)),
            torch.split(next_sigma, 1),
            strict=True,
        )
    )
    parts = zip(
        rows,
        torch.split(computed, list(assembly.computed_lengths)),
        torch.split(velocity, list(assembly.computed_lengths)),
        torch.split(sigma, 1),
        strict=True,
    )
    clean = tuple(
        None if row.next_preview is None else _clean(family, row, now, part, level)
        for row, now, part, level in parts
    )
    return Stepped(latents, clean)


def _completed(family: Family, row: Row, computed: Tensor, sigma: Tensor) -> Tensor:
    """The row's whole latent, (tokens, channels), of noise level `sigma` (1,), from what was computed of it."""
    latent = computed
    if row.region is not None:
        latent = scale_noise(row.conditioning["image_latents"], sigma, row.conditioning["noise"])
        latent[row.region.computed] = computed
    return family.after_step(latent, row.conditioning, sigma)


def _clean(family: Family, row: Row, latent: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """x0 = x - sigma * v, as the family leaves a latent after its last step: outside the mask, the template."""
    clean = euler_step(latent, velocity, -sigma.unsqueeze(1))
    return _completed(family, row, clean, torch.zeros_like(sigma))


def _velocity(
    forward: Callable[[Sequences, Tensor, Tensor], Tensor],
    assembly: Assembly,
    image: Tensor,
    timestep: Tensor,
) -> Tensor:
    """Velocity of every row's region, (computed_tokens, channels).

    Args:
        forward: velocity of all sequences.
        assembly: of the batch.
        image: (row_tokens, in_channels), packed by row.
        timestep: (rows,) float32.
    """
    guided = assembly.guided
    if guided is None:
        return forward(assembly.sequences, image, timestep)
    image = torch.cat((image, image.index_select(0, guided.tokens)))
    timestep = torch.cat((timestep, timestep.index_select(0, guided.rows)))
    velocity = forward(assembly.sequences, image, timestep)
    positive, negative = torch.split(velocity, [len(velocity) - len(guided.computed), len(guided.computed)])
    combined = combine_guidance(positive.index_select(0, guided.computed), negative, guided.scale)
    return positive.index_copy(0, guided.computed, combined)
