"""The samplers' step of a batch: each row's next states, from its own matrix, its old states, output and noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from giornata.packed.moving import moved
from giornata_denoiser.engine.assembly import BatchTensors
from giornata_denoiser.families.protocol import Network
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.track import NOISE, OUTPUT, STATES


class SamplerState(NamedTuple):
    """A row's states after a step, at the tokens of its region."""

    latent: Tensor
    """(computed, channels) in the network's dtype, as a scheduler rounds it."""
    memory: Tensor | None = None
    """(states, computed, channels), at least float32; None for one-step samplers."""


class StepNoise(NamedTuple):
    """What a row's generator gave for its next step."""

    noise: Tensor | None = None
    """(tokens, channels) on the CPU, all of the picture; None where the step adds none."""
    generator: Tensor | None = None
    """Its state afterwards."""


def draw(row: Row, network: Network) -> StepNoise:
    """The noise of a row's next step.

    It is drawn as a scheduler draws it: on the CPU, for all latent pixels of the picture.
    """
    if not row.track.draws[row.step] or row.generator is None:
        return StepNoise(None, row.generator)
    generator = torch.Generator("cpu")
    generator.set_state(row.generator)
    shape = network.unpacked(row.latent, row.grid).shape
    pixels = torch.randn((1, *shape), generator=generator, dtype=row.track.noise_dtype or network.dtype)
    return StepNoise(network.packed(pixels[0]), generator.get_state())


def advance(
    assembly: BatchTensors,
    rows: Sequence[Row],
    latents: Tensor,
    outputs: Tensor,
    noises: Sequence[Tensor | None],
) -> list[SamplerState]:
    """Every row's states after its next step.

    `latents` and `outputs` are (computed_tokens, channels), packed by row; `noises` are by row, see :class:`StepNoise`.
    Rows without memory step together, element by element; each row with memory is one matrix product. So a row's
    arithmetic does not depend on the others.
    """
    lengths = assembly.computed_lengths
    placed = [_placed(noise, region, outputs) for noise, region in zip(noises, assembly.regions, strict=True)]
    if not any(row.track.remembered for row in rows):
        coefficients = torch.stack(
            [matrices[row.step, 0] for matrices, row in zip(assembly.matrices, rows, strict=True)]
        ).index_select(0, assembly.row_of_computed)
        noise = _packed(placed, lengths, outputs)
        stepped = _one_state(coefficients, latents, outputs, noise)
        return [SamplerState(latent) for latent in torch.split(stepped, lengths)]
    return [
        _row(matrices[row.step], row, latent, output, noise, region)
        for matrices, row, latent, output, noise, region in zip(
            assembly.matrices,
            rows,
            torch.split(latents, lengths),
            torch.split(outputs, lengths),
            placed,
            assembly.regions,
            strict=True,
        )
    ]


def _row(  # noqa: PLR0917 - a row's own parts
    matrix: Tensor, row: Row, latent: Tensor, output: Tensor, noise: Tensor | None, region: Tensor | None
) -> SamplerState:
    if not row.track.remembered:
        return SamplerState(_one_state(matrix, latent, output, noise))
    memory = row.memory
    if memory is not None:
        memory = moved(memory, latent.device)
        memory = memory if region is None else memory.index_select(1, region)
    stepped = _several_states(matrix, latent, output, noise, memory)
    return SamplerState(stepped[0].to(output.dtype), stepped[1:])


def _one_state(matrix: Tensor, latent: Tensor, output: Tensor, noise: Tensor | None) -> Tensor:
    """(tokens, channels): the new latent of rows without memory; `matrix` is (tokens, 3) or (1, 3).

    Each product is rounded to float32 before it is added, as in the `FlowMatchEulerDiscreteScheduler` of diffusers: in
    float32, flow matching is equal to it bit for bit.
    """
    of_noise, of_output, of_latent = matrix.unsqueeze(-1).unbind(1)
    stepped = of_latent * latent + of_output * output
    if noise is not None:
        stepped += of_noise * noise
    return stepped.to(output.dtype)


def _several_states(
    matrix: Tensor, latent: Tensor, output: Tensor, noise: Tensor | None, memory: Tensor | None
) -> Tensor:
    """(states, tokens, channels), at least float32: `matrix`, (states, 2 + states), times what there is."""
    parts = [each.unsqueeze(0) for each in (noise, output, latent) if each is not None]
    if memory is not None:
        parts.append(memory)
    first = NOISE if noise is not None else OUTPUT
    last = STATES + 1 if memory is None else matrix.shape[1]
    wide = torch.promote_types(output.dtype, torch.float32)
    old = torch.cat([part.to(wide) for part in parts])
    return (matrix[:, first:last].to(wide) @ old.flatten(1)).view(len(matrix), *output.shape)


def _placed(noise: Tensor | None, region: Tensor | None, like: Tensor) -> Tensor | None:
    """A row's noise at its region's tokens, where `like` is."""
    if noise is None:
        return None
    noise = moved(noise, like.device)
    return noise if region is None else noise.index_select(0, region)


def _packed(noises: Sequence[Tensor | None], lengths: Sequence[int], like: Tensor) -> Tensor | None:
    """(computed_tokens, channels): 0 for rows that add none; None if no row does."""
    if all(noise is None for noise in noises):
        return None
    return torch.cat(
        [
            like.new_zeros(length, like.shape[1]) if noise is None else noise
            for noise, length in zip(noises, lengths, strict=True)
        ]
    )
