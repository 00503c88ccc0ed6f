"""Putting a batch together: the packed tensors that stay the same while its rows do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from giornata.packed.low_rank import SequenceLoras
from giornata.packed.moving import moved
from giornata.packed.packing import Segments
from giornata_denoiser.families.protocol import ModelFamily, SequenceInputs
from giornata_denoiser.rows.row import Row


@dataclass(frozen=True, eq=False)
class DeviceInputs:
    """A row's inputs on the engine's device: copied when it joins, kept while it runs."""

    sequences: tuple[SequenceInputs, ...]
    conditioning: Mapping[str, Tensor]
    """(tokens, channels) each."""
    source: Mapping[str, Tensor]
    """The row's own conditioning; `conditioning` is a copy of it. Every row is built with its own."""
    matrices: Tensor
    """(steps, states, 2 + states): those of the row's track."""
    low_rank: SequenceLoras | None = None
    """The LoRAs under which the sequences are prepared."""


def place(row: Row, family: ModelFamily, low_rank: SequenceLoras | None = None) -> DeviceInputs:
    """The inputs of `row` on the family's device; its own tensors where they are there already.

    They are for steps in which `low_rank` acts.
    """
    device = family.device
    region = None if row.region is None else row.region.on(device)
    prompts, times = [prompt.to(device) for prompt in row.prompts], moved(row.track.times, device)
    conditioning = {name: moved(tensor, device) for name, tensor in row.conditioning.items()}
    prepared = (
        family.network.prepare(prompt, times, conditioning, row.beside, low_rank=low_rank)
        for prompt in prompts
    )
    return DeviceInputs(
        tuple(
            SequenceInputs(
                prompt, row.grid, region, row.companions, made, row.beside, half if len(prompts) > 1 else None
            )
            for half, (prompt, made) in enumerate(zip(prompts, prepared, strict=True))
        ),
        conditioning,
        row.conditioning,
        moved(row.track.matrices, device),
        low_rank,
    )


@dataclass(frozen=True, eq=False)
class GuidedRows:
    """The rows with true classifier-free guidance; their negative sequences follow all positive ones."""

    rows: tuple[int, ...]
    """Their indices in the batch."""
    tokens: Tensor
    """(guided_tokens,) int64: all of their image tokens, in the order packed by row."""
    computed: Tensor
    """(guided_computed,) int64: as `tokens`, in the order of computed tokens."""
    scale: Tensor
    """(guided_computed, 1) float32, `true_cfg_scale`."""


@dataclass(frozen=True, eq=False)
class BatchTensors:
    """Packed tensors of a batch. Image tokens are packed by row; those of negative sequences follow."""

    batch: object
    """What the network predicts over; None where it computes nothing."""
    conditioning: tuple[Mapping[str, Tensor], ...]
    """Conditioning by sequence; positive sequences come first."""
    computed: Tensor | None
    """(computed_tokens,) int64: the tokens of the rows' regions among all tokens; None where that is all of them."""
    regions: tuple[Tensor | None, ...]
    """Each row's (computed,) int64, the tokens of its region; None for all of its picture."""
    row_of_computed: Tensor
    """(computed_tokens,) int64: batch index of each one's row."""
    computed_lengths: list[int]
    """Computed tokens of each row."""
    guided: GuidedRows | None
    matrices: tuple[Tensor, ...]
    """Each row's (steps, states, 2 + states), those of its track."""


def assemble(
    family: ModelFamily,
    rows: Sequence[Row],
    placed: Sequence[DeviceInputs] | None = None,
    *,
    computes: bool = True,
) -> BatchTensors:
    """Pack `rows`. What changes from step to step (latents, noise levels) is not in it.

    `placed` are their inputs, in the same order; by default they are placed now. Where the network `computes` nothing,
    the assembly has no batch.
    """
    device = family.device
    placed = [place(row, family) for row in rows] if placed is None else placed
    guided_rows = [index for index, row in enumerate(rows) if len(row.prompts) > 1]
    lengths = tuple(row.computed_tokens for row in rows)
    row_of_computed = Segments(lengths).sequence
    regions = tuple(
        None if region is None else region.computed
        for region in (each.sequences[0].region for each in placed)
    )
    return BatchTensors(
        batch=family.network.assemble(
            [each.sequences[0] for each in placed] + [placed[index].sequences[1] for index in guided_rows]
        )
        if computes
        else None,
        conditioning=tuple(placed[index].conditioning for index in (*range(len(rows)), *guided_rows)),
        computed=_computed(rows, regions, device),
        regions=regions,
        row_of_computed=moved(row_of_computed, device),
        computed_lengths=list(lengths),
        guided=_guided(rows, guided_rows, row_of_computed, device) if guided_rows else None,
        matrices=tuple(each.matrices for each in placed),
    )


def _computed(rows: Sequence[Row], regions: Sequence[Tensor | None], device: torch.device) -> Tensor | None:
    if all(region is None for region in regions):
        return None
    lengths = [row.image_tokens for row in rows]
    tokens = torch.split(torch.arange(sum(lengths), device=device), lengths)
    return torch.cat(
        [
            part if region is None else part.index_select(0, region)
            for part, region in zip(tokens, regions, strict=True)
        ]
    )


def _guided(
    rows: Sequence[Row], indices: list[int], row_of_computed: Tensor, device: torch.device
) -> GuidedRows:
    chosen = torch.tensor(indices)
    row_of_token = Segments(tuple(row.image_tokens for row in rows)).sequence
    computed = torch.isin(row_of_computed, chosen).nonzero().squeeze(1)
    scales = torch.tensor([row.true_cfg_scale for row in rows], dtype=torch.float32)
    return GuidedRows(
        rows=tuple(indices),
        tokens=moved(torch.isin(row_of_token, chosen).nonzero().squeeze(1), device),
        computed=moved(computed, device),
        scale=moved(scales[row_of_computed[computed]].unsqueeze(1), device),
    )
