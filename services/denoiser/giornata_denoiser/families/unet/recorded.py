"""What a recording keeps of a block, by tile; and what a block takes of it."""

from __future__ import annotations

import torch
from torch import Tensor

from giornata.packed.uses import ActivationRecorder
from giornata.wire.blocks import BORDER, MOMENTS
from giornata_denoiser.families.unet.structure import LeafModule
from giornata_denoiser.families.unet.tiling import border_cells


def moments(tiles: Tensor, groups: int) -> Tensor:
    """(tiles, 2, groups): mean and sum of squared differences from it, of (tiles, height, width, channels).

    They are float32, or float64 where the input is. In two passes over whole rows of channels, several times as fast as
    `torch.var_mean` over the cells and channels of a group.
    """
    cells = tiles.flatten(1, 2).to(torch.promote_types(tiles.dtype, torch.float32))
    of_group = cells.shape[2] // groups
    mean = cells.mean(1).view(-1, groups, of_group).mean(2)
    apart = cells - mean.repeat_interleave(of_group, 1).unsqueeze(1)
    squares = apart.square_().sum(1).view(-1, groups, of_group).sum(2)
    return torch.stack((mean, squares), 1)


def keep_border(recorder: ActivationRecorder, leaf: LeafModule, tiles: Tensor) -> None:
    """Keep what the tiles around read of a convolution's input, (tiles, side, side, channels)."""
    if leaf.block is not None:
        cells = tiles.flatten(1, 2).index_select(1, border_cells(leaf.reading, tiles.device))
        recorder.part(leaf.block, BORDER, cells.flatten(1))


def keep_moments(recorder: ActivationRecorder, leaf: LeafModule, found: Tensor) -> None:
    """Keep :func:`moments` of a norm's input."""
    if leaf.block is not None:
        recorder.part(leaf.block, MOMENTS, found.flatten(1))


def keep_attended(recorder: ActivationRecorder, leaf: LeafModule, key: Tensor, value: Tensor) -> None:
    """Keep keys and values, (tiles, cells, heads, head_dim): to a recording the cells of a tile are more heads."""
    if leaf.block is not None:
        recorder.keys_values(leaf.block, key.flatten(1, 2), value.flatten(1, 2))
