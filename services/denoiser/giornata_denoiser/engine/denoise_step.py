"""One denoising step of a batch: forward, guidance, the samplers' step, and the blend after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from giornata.packed.packing import UNTRACED, BlockInputs, LaneTracer, by_sequence, to_device
from giornata_denoiser.engine.batch_tensors import BatchTensors
from giornata_denoiser.families.network import ModelFamily, Network
from giornata_denoiser.rows.parts import TaylorExpansion, remember_output
from giornata_denoiser.rows.row import NOISE, OUTPUT, STATES, Row


class SamplerState(NamedTuple):
    """A row's states after a step, at the tokens of its region."""

    latent: Tensor
    """(computed, channels) in the network's dtype, as a scheduler rounds it."""
    memory: Tensor | None = None
    """(states, computed, channels), at least float32; None for one-step samplers."""


class StepNoise(NamedTuple):
    """The noise that a row's generator gave for its next step."""

    noise: Tensor | None = None
    """(tokens, channels) on the CPU, all of the picture; None where the step adds none."""
    generator: Tensor | None = None
    """Its state afterwards."""


def draw_noise(row: Row, network: Network) -> StepNoise:
    """The noise of a row's next step.

    It is drawn as a scheduler draws it: on the CPU, for all latent pixels of the picture.
    """
    if row.generator is None or not row.track.draws[row.step]:
        return StepNoise(None, row.generator)
    generator = torch.Generator("cpu")
    generator.set_state(row.generator)
    shape = network.unpacked(row.latent, row.grid).shape
    pixels = torch.randn((1, *shape), generator=generator, dtype=row.track.noise_dtype or network.dtype)
    return StepNoise(network.packed(pixels[0]), generator.get_state())


def advance_states(
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
    placed = [
        noise if noise is None else _at_region(to_device(noise, outputs.device), region)
        for noise, region in zip(noises, assembly.regions, strict=True)
    ]
    if not [row for row in rows if row.track.matrices.shape[1] > 1]:
        coefficients = torch.stack(
            [matrices[row.step, 0] for matrices, row in zip(assembly.matrices, rows, strict=True)]
        ).index_select(0, assembly.row_of_computed)
        noise = _packed(placed, lengths, outputs)
        stepped = _one_state(coefficients, latents, outputs, noise)
        return [SamplerState(latent) for latent in stepped.split_with_sizes(lengths)]
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
        memory = _at_region(to_device(memory, latent.device), region, 1)
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


def _at_region(tokens: Tensor, region: Tensor | None, dim: int = 0) -> Tensor:
    return tokens if region is None else tokens.index_select(dim, region)


def _packed(noises: Sequence[Tensor | None], lengths: Sequence[int], like: Tensor) -> Tensor | None:
    """(computed_tokens, channels): 0 for rows that add none; None if no row does."""
    if not [noise for noise in noises if noise is not None]:
        return None
    return torch.cat(
        [
            like.new_zeros(length, like.shape[1]) if noise is None else noise
            for noise, length in zip(noises, lengths, strict=True)
        ]
    )


class RowOutput(NamedTuple):
    """The result of one step for one row."""

    latent: Tensor
    """(tokens, channels) after the step."""
    memory: Tensor | None
    """(states, tokens, channels), what the solver remembers, 0 outside of the row's region; None for nothing."""
    generator: Tensor | None
    """Where the row's random numbers go on; see :attr:`Row.generator`."""
    cached: TaylorExpansion | None
    """What it remembers for its step cache."""
    clean: Tensor | None
    """The latent of the picture that the step predicts as the end; None where the row is not shown after it."""
    skipped: int
    """Blocks that its step cache stood in for, of all of its sequences."""


def denoise_step(
    family: ModelFamily,
    assembly: BatchTensors,
    rows: Sequence[Row],
    uses: Sequence[BlockInputs] = (),
    trace: LaneTracer = UNTRACED,
) -> list[RowOutput]:
    """Every row after its next step: outside its region the template run's at the row's noise level.

    The assembly is of the same rows, none of them done; for `uses` see :meth:`Network.predict`.
    """
    device = family.network.device
    latents = [  # only rows that join have theirs elsewhere
        row.latent if row.latent.device == device else to_device(row.latent, device) for row in rows
    ]
    seen = torch.cat([row.scaled(latent) for latent, row in zip(latents, rows, strict=True)])
    steps, guided = [row.step for row in rows], assembly.guided
    if guided is not None:
        seen = torch.cat((seen, seen.index_select(0, guided.tokens)))
        steps = [*steps, *(steps[row] for row in guided.rows)]
    outputs = family.network.predict(
        assembly.batch, seen, assembly.conditioning, steps, uses=uses, trace=trace
    )
    cached: list[TaylorExpansion | None] = [None] * len(rows)
    if [row for row in rows if row.step_cache]:
        answers = _by_row(assembly, rows, outputs)
        cached = [remember_output(row, answer) for row, answer in zip(rows, answers, strict=True)]
    return _stepped(family, assembly, rows, latents, outputs, cached)


def extrapolated_step(
    family: ModelFamily, assembly: BatchTensors, rows: Sequence[Row], known: Sequence[TaylorExpansion]
) -> list[RowOutput]:
    """:func:`denoise_step` of rows of which the network computes nothing: their outputs are what is `known` of them."""
    latents = [to_device(row.latent, family.device) for row in rows]
    answers = [each.at(row.step).to(family.dtype) for each, row in zip(known, rows, strict=True)]
    outputs = torch.cat(by_sequence([list(answer) for answer in answers]))
    made = _stepped(family, assembly, rows, latents, outputs, [row.cached for row in rows])
    return [
        each._replace(skipped=len(row.inputs.prompts) * family.depth)
        for each, row in zip(made, rows, strict=True)
    ]


def _stepped(  # noqa: PLR0917 - all that a step is made of
    family: ModelFamily,
    assembly: BatchTensors,
    rows: Sequence[Row],
    latents: Sequence[Tensor],
    outputs: Tensor,
    cached: Sequence[TaylorExpansion | None],
) -> list[RowOutput]:
    """The rows after the samplers' step, from the outputs of all sequences, (computed_tokens, channels)."""
    lengths, output = assembly.computed_lengths, _guided(family.network, assembly, outputs)
    computed = torch.cat(list(latents))
    if assembly.computed is not None:
        computed = computed.index_select(0, assembly.computed)
    drawn = [
        draw_noise(row, family.network) if row.track.draws[row.step] else StepNoise(None, row.generator)
        for row in rows
    ]
    states = advance_states(assembly, rows, computed, output, [each.noise for each in drawn])
    made: list[RowOutput] = []
    for index, (row, state) in enumerate(zip(rows, states, strict=True)):
        clean, memory = None, state.memory
        if row.wishes.partial_images and row.next_preview is not None:
            was, predicted = (torch.split(packed, lengths)[index] for packed in (computed, output))
            end = row.track.predicted(was, predicted, row.step)
            clean = _completed(family, assembly, index, row, end, row.steps)
        if memory is not None:
            memory = _scattered(memory, assembly.regions[index], row.image_tokens)
        latent = _completed(family, assembly, index, row, state.latent, row.step + 1)
        made.append(RowOutput(latent, memory, drawn[index].generator, cached[index], clean, skipped=0))
    return made


def _by_row(assembly: BatchTensors, rows: Sequence[Row], outputs: Tensor) -> list[Tensor | None]:
    """(sequences, computed, channels) of each row that extrapolates later outputs; None of others."""
    lengths = assembly.computed_lengths
    guided = () if assembly.guided is None else assembly.guided.rows
    parts = torch.split(outputs, [*lengths, *(lengths[row] for row in guided)])
    negative = dict(zip(guided, parts[len(rows) :], strict=True))
    return [
        torch.stack([parts[index], *([negative[index]] if index in negative else [])])
        if row.step_cache is not None
        else None
        for index, row in enumerate(rows)
    ]


def _completed(  # noqa: PLR0917 - a row and its parts
    family: ModelFamily, assembly: BatchTensors, index: int, row: Row, computed: Tensor, level: int
) -> Tensor:
    """A row's whole latent, (tokens, channels), from what was computed of it.

    `computed` is (computed, channels), the tokens of its region; `level` is the one of its track that they are at.
    """
    region, conditioning = assembly.regions[index], assembly.conditioning[index]
    blends, picture = family.network.blends, conditioning.get("image_latents")
    if picture is None or (region is None and not blends):
        return computed
    if not blends and (seen := row.picture_at(level)) is not None:
        picture = to_device(seen, family.device)
    outside = row.track.noised(picture, conditioning["noise"], level)
    latent = computed
    if region is not None:
        latent = outside.clone() if blends else outside
        latent[region] = computed
    return blend(latent, outside, conditioning["mask"]) if blends else latent


def blend(latent: Tensor, outside: Tensor, mask: Tensor) -> Tensor:
    """Put the noised picture where the mask is 0, as inpainting pipelines of diffusers do after each step.

    All are (tokens, channels): the result of the step, the picture at its noise level, and 1 where it is repainted.
    """
    return (1 - mask) * outside + mask * latent


def _scattered(memory: Tensor, region: Tensor | None, tokens: int) -> Tensor:
    """(states, computed, channels) at the places of a region, 0 elsewhere."""
    if region is None:
        return memory
    return memory.new_zeros(len(memory), tokens, memory.shape[2]).index_copy_(1, region, memory)


def _guided(network: Network, assembly: BatchTensors, outputs: Tensor) -> Tensor:
    """The rows' outputs, (computed_tokens, channels), from those of all sequences: guidance included."""
    guided = assembly.guided
    if guided is None:
        return outputs
    positive, negative = torch.split(outputs, [len(outputs) - len(guided.computed), len(guided.computed)])
    combined = network.guided(positive.index_select(0, guided.computed), negative, guided.scale)
    return positive.index_copy(0, guided.computed, combined)
