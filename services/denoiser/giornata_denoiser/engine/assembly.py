"""Putting a batch together: the packed tensors that stay the same while its rows do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from giornata.packed.packing import bounds, layout, segment_index
from giornata.packed.sequences import Sequences
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.rows.row import Row


@dataclass(frozen=True, eq=False)
class Guided:
    """The rows with true classifier-free guidance; their negative sequences follow all positive ones."""

    rows: Tensor
    """(guided_rows,) int64 on the device: their indices in the batch."""
    tokens: Tensor
    """(guided_tokens,) int64: all of their image tokens, in the order packed by row."""
    computed: Tensor
    """(guided_computed,) int64: likewise, in the order of computed tokens."""
    scale: Tensor
    """(guided_computed, 1) float32, `true_cfg_scale`."""


@dataclass(frozen=True, eq=False)
class Assembly:
    """Packed tensors of a batch. Image tokens are packed by row; those of negative sequences follow."""

    sequences: Sequences
    computed: Tensor | None
    """(computed_tokens,) int64: the tokens of the rows' regions among all tokens; None where that is all of them."""
    row_of_computed: Tensor
    """(computed_tokens,) int64: batch index of each one's row."""
    computed_lengths: tuple[int, ...]
    """Computed tokens of each row."""
    guided: Guided | None


def assemble(family: Family, rows: Sequence[Row]) -> Assembly:
    """Pack `rows`. What changes from step to step (latents, sigmas) is not in it, nor what steps read row by row."""
    guided_rows = [index for index, row in enumerate(rows) if row.negative is not None]
    prompts = [row.prompt for row in rows] + [row.negative for row in rows if row.negative is not None]
    owners = [*rows, *(rows[index] for index in guided_rows)]
    sequences = Sequences(
        layout=layout([len(p.embeds) for p in prompts], [row.image_tokens for row in owners], family.device),
        text=torch.cat([p.embeds for p in prompts]),
        pooled=torch.stack([p.pooled for p in prompts]),
        guidance=torch.tensor([row.guidance_scale for row in owners], dtype=torch.float32).to(family.device),
        rotary=(torch.cat([p.rotary[0] for p in prompts]), torch.cat([p.rotary[1] for p in prompts])),
        regions=tuple(row.region for row in owners),
    )
    lengths = tuple(row.computed_tokens for row in rows)
    row_of_computed = segment_index(lengths)
    return Assembly(
        sequences=sequences,
        computed=_computed(rows, family.device),
        row_of_computed=row_of_computed.to(family.device),
        computed_lengths=lengths,
        guided=_guided(rows, guided_rows, row_of_computed, family.device) if guided_rows else None,
    )


def _computed(rows: Sequence[Row], device: torch.device) -> Tensor | None:
    if all(row.region is None for row in rows):
        return None
    starts = [start for start, _ in bounds([row.image_tokens for row in rows])]
    parts = [
        torch.arange(start, start + row.image_tokens, device=device)
        if row.region is None
        else row.region.computed + start
        for start, row in zip(starts, rows, strict=True)
    ]
    return torch.cat(parts)


def _guided(rows: Sequence[Row], indices: list[int], row_of_computed: Tensor, device: torch.device) -> Guided:
    chosen = torch.tensor(indices)
    row_of_token = segment_index([row.image_tokens for row in rows])
    computed = torch.isin(row_of_computed, chosen).nonzero().squeeze(1)
    scales = torch.tensor([row.true_cfg_scale for row in rows], dtype=torch.float32)
    return Guided(
        rows=chosen.to(device),
        tokens=torch.isin(row_of_token, chosen).nonzero().squeeze(1).to(device),
        computed=computed.to(device),
        scale=scales[row_of_computed[computed]].unsqueeze(1).to(device),
    )
