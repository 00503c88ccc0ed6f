"""One denoising step of a whole batch: forward, guidance, the samplers' step, and the blend after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from giornata.packed.moving import moved
from giornata.packed.tracing import UNTRACED, LaneTracer
from giornata.packed.uses import BlockInputs, by_sequence
from giornata_denoiser.engine.assembly import BatchTensors
from giornata_denoiser.engine.sampling import advance, draw
from giornata_denoiser.engine.step_caching import remembered
from giornata_denoiser.families.protocol import ModelFamily, Network
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.step_cache import TaylorExpansion
from giornata_denoiser.rows.track import SamplerTable


class StepOutput(NamedTuple):
    """What a step made of the rows, by row."""

    latents: tuple[Tensor, ...]
    """(tokens, channels) each, after the step."""
    clean: tuple[Tensor | None, ...]
    """Latents of the pictures that the step predicts as the end; None for rows that are not shown after it."""
    memory: tuple[Tensor | None, ...]
    """(states, tokens, channels) each, what the solver remembers, 0 outside of the row's region; None for nothing."""
    generators: tuple[Tensor | None, ...]
    """Where each row's random numbers go on; see :attr:`Row.generator`."""
    cached: tuple[TaylorExpansion | None, ...]
    """What each row remembers for its step cache."""
    skipped: tuple[int, ...]
    """Blocks that step caches stood in for, of all of the row's sequences."""


def denoise_step(
    family: ModelFamily,
    assembly: BatchTensors,
    rows: Sequence[Row],
    uses: Sequence[BlockInputs] = (),
    trace: LaneTracer = UNTRACED,
) -> StepOutput:
    """Every row's latent after its next step: outside its region the template's at the row's noise level.

    The assembly is of the same rows, none of them done; for `uses` see :meth:`Network.predict`.
    """
    latents = [moved(row.latent, family.device) for row in rows]  # only rows that join have theirs elsewhere
    seen = torch.cat([row.scaled(latent) for latent, row in zip(latents, rows, strict=True)])
    steps, guided = [row.step for row in rows], assembly.guided
    if guided is not None:
        seen = torch.cat((seen, seen.index_select(0, guided.tokens)))
        steps = [*steps, *(steps[row] for row in guided.rows)]
    outputs = family.network.predict(
        assembly.batch, seen, assembly.conditioning, steps, uses=uses, trace=trace
    )
    answers = _by_row(assembly, rows, outputs)
    cached = [remembered(row, answer) for row, answer in zip(rows, answers, strict=True)]
    return _stepped(family, assembly, rows, latents, outputs, cached)


def extrapolated_step(
    family: ModelFamily, assembly: BatchTensors, rows: Sequence[Row], known: Sequence[TaylorExpansion]
) -> StepOutput:
    """:func:`denoise_step` of rows of which the network computes nothing: their outputs are what is `known` of them."""
    latents = [moved(row.latent, family.device) for row in rows]
    answers = [each.at(row.step).to(family.dtype) for each, row in zip(known, rows, strict=True)]
    outputs = torch.cat(by_sequence([list(answer) for answer in answers]))
    skipped = [len(row.prompts) * family.depth for row in rows]
    stepped = _stepped(family, assembly, rows, latents, outputs, [row.cached for row in rows])
    return stepped._replace(skipped=tuple(skipped))


def _stepped(  # noqa: PLR0917 - all that a step is made of
    family: ModelFamily,
    assembly: BatchTensors,
    rows: Sequence[Row],
    latents: Sequence[Tensor],
    outputs: Tensor,
    cached: Sequence[TaylorExpansion | None],
) -> StepOutput:
    """The rows after the samplers' step, from the outputs of all sequences, (computed_tokens, channels)."""
    lengths = assembly.computed_lengths
    output, computed = _guided(family.network, assembly, outputs), _taken(assembly, latents)
    drawn = [draw(row, family.network) for row in rows]
    states = advance(assembly, rows, computed, output, [each.noise for each in drawn])
    clean: list[Tensor | None] = [None] * len(rows)
    for index, row in enumerate(rows):
        if row.next_preview is not None:
            was, predicted = (torch.split(packed, lengths)[index] for packed in (computed, output))
            end = row.track.predicted(was, predicted, row.step)
            clean[index] = _completed(family, assembly, index, end, row.track, level=row.steps)
    return StepOutput(
        tuple(
            _completed(family, assembly, index, state.latent, row.track, level=row.step + 1)
            for index, (state, row) in enumerate(zip(states, rows, strict=True))
        ),
        tuple(clean),
        tuple(
            _scattered(state.memory, region, row.image_tokens)
            for state, region, row in zip(states, assembly.regions, rows, strict=True)
        ),
        tuple(each.generator for each in drawn),
        tuple(cached),
        (0,) * len(rows),
    )


def _by_row(assembly: BatchTensors, rows: Sequence[Row], outputs: Tensor) -> list[Tensor | None]:
    """(sequences, computed, channels) of each row that extrapolates later outputs; None of others."""
    if not any(row.step_cache is not None for row in rows):
        return [None] * len(rows)
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


def _taken(assembly: BatchTensors, whole: Sequence[Tensor]) -> Tensor:
    """(computed_tokens, channels): the regions' tokens of every row's (tokens, channels)."""
    packed = torch.cat(list(whole))
    return packed if assembly.computed is None else packed.index_select(0, assembly.computed)


def _completed(
    family: ModelFamily,
    assembly: BatchTensors,
    index: int,
    computed: Tensor,
    track: SamplerTable,
    *,
    level: int,
) -> Tensor:
    """A row's whole latent, (tokens, channels), from what was computed of it.

    `computed` is (computed, channels), the tokens of its region; `level` is the one of `track` that they are at.
    """
    region, conditioning = assembly.regions[index], assembly.conditioning[index]
    generated = "image_latents" not in conditioning
    if generated or (region is None and not family.network.blends):
        return computed
    outside = track.noised(conditioning["image_latents"], conditioning["noise"], level)
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


def _scattered(memory: Tensor | None, region: Tensor | None, tokens: int) -> Tensor | None:
    """(states, computed, channels) at the places of a region, 0 elsewhere."""
    if memory is None or region is None:
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
