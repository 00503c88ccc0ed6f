"""Putting a batch together: the packed tensors that stay the same while its rows do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from giornata_denoiser.families.protocol import Family, Sequences
from giornata_denoiser.packing import layout, segment_index
from giornata_denoiser.row import Row


@dataclass(frozen=True, eq=False)
class Guided:
    """The rows with true classifier-free guidance; their negative sequences follow all positive ones."""

    rows: Tensor
    """(guided_rows,) int64 on the device: their indices in the batch."""
    tokens: Tensor
    """(guided_tokens,) int64: their image tokens in the order packed by row."""
    scale: Tensor
    """(guided_tokens, 1) float32, `true_cfg_scale`."""


@dataclass(frozen=True, eq=False)
class Assembly:
    """Packed tensors of a batch. Image tokens are packed by row; those of negative sequences follow."""

    sequences: Sequences
    row_of_token: Tensor
    """(row_tokens,) int64: batch index of each image token's row."""
    row_lengths: tuple[int, ...]
    """Image tokens of each row."""
    guided: Guided | None


def assemble(family: Family, rows: Sequence[Row]) -> Assembly:
    """Pack `rows`. What changes from step to step (latents, sigmas) is not in it, nor what steps read row by row."""
    guided_rows = [index for index, row in enumerate(rows) if row.negative is not None]
    prompts = [row.prompt for row in rows] + [row.negative for row in rows if row.negative is not None]
    owners = [*rows, *(rows[index] for index in guided_rows)]
    lengths = tuple(row.image_tokens for row in rows)
    row_of_token = segment_index(lengths)
    sequences = Sequences(
        layout=layout([len(p.embeds) for p in prompts], [row.image_tokens for row in owners], family.device),
        text=torch.cat([p.embeds for p in prompts]),
        pooled=torch.stack([p.pooled for p in prompts]),
        guidance=torch.tensor([row.guidance_scale for row in owners], dtype=torch.float32).to(family.device),
        rotary=(torch.cat([p.rotary[0] for p in prompts]), torch.cat([p.rotary[1] for p in prompts])),
    )
    return Assembly(
        sequences=sequences,
        row_of_token=row_of_token.to(family.device),
        row_lengths=lengths,
        guided=_guided(rows, guided_rows, row_of_token, family.device) if guided_rows else None,
    )


def _guided(rows: Sequence[Row], indices: list[int], row_of_token: Tensor, device: torch.device) -> Guided:
    tokens = torch.isin(row_of_token, torch.tensor(indices)).nonzero().squeeze(1)
    scales = torch.tensor([row.true_cfg_scale for row in rows], dtype=torch.float32)
    return Guided(
        rows=torch.tensor(indices).to(device),
        tokens=tokens.to(device),
        scale=scales[row_of_token[tokens]].unsqueeze(1).to(device),
    )
