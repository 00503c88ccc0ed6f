"""Residuals that join a UNet's decoder: equal to what `UNet2DConditionModel` itself adds, on maps and on tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata.packed.compute_set import BlockInputs, CachedTokens, Region
from giornata.packed.packing import maps_to_tiles
from giornata.wire.values import BlockMode
from giornata_lab.bench.compute import tiny_unet
from giornata_lab.bench.compute.tiny_unet import Everything, RecordedUnetTokens
from tests.unit.denoiser.families.test_unet import EXACT, KINDS, L_SHAPE, STRIP, pair


@dataclass(frozen=True, eq=False)
class Added:
    """Satisfies `Residuals` with these samples, None among them; reads are counted."""

    samples: Sequence[Tensor | None]
    whole: bool
    read: list[int]

    def sample(self, block: int) -> Tensor | None:
        self.read.append(block)
        return self.samples[block]


def shapes(model: Any, grid: tuple[int, int], side: int) -> list[tuple[int, int, int]]:
    """(channels, height, width) of each skip connection, then of the middle's output."""
    height, width = grid[0] * side, grid[1] * side
    channels = list(model.config.block_out_channels)
    found, level = [(channels[0], height, width)], 0
    for level, block in enumerate(model.down_blocks):
        size = (height >> level, width >> level)
        found += [(channels[level], *size)] * len(block.resnets)
        found += [(channels[level], height >> level + 1, width >> level + 1)] * len(block.downsamplers or ())
    return [*found, (channels[-1], height >> level, width >> level)]


def added(maps: Sequence[Tensor], grid: tuple[int, int], region: Region | None = None) -> Added:
    samples = []
    for one in maps:
        tokens = maps_to_tiles(one[None], grid)[0].flatten(1)
        samples.append(tokens if region is None else tokens[region.computed])
    return Added(samples, region is None, [])


@pytest.mark.parametrize(("shape", "fill"), KINDS)
@torch.inference_mode()
def test_rows_with_and_without_share_a_forward(shape: str, fill: bool) -> None:
    model, of = pair(shape, fill)
    rows = [
        tiny_unet.picture(of, (4, 5), step=0, seed=1),
        tiny_unet.picture(of, (5, 4), words=9, step=1, seed=2),
        tiny_unet.picture(of, (4, 5), words=3, step=1, seed=3),
        tiny_unet.picture(of, (4, 5), words=4, step=0, seed=4),
    ]
    torch.manual_seed(9)
    maps = [[torch.randn(*one).double() for one in shapes(model, row.grid, of.side)] for row in rows]
    given = [maps[0], maps[1], None, maps[3]]
    wanted = [tiny_unet.alone(model, of, row, some) for row, some in zip(rows, given, strict=True)]
    batch = of.assemble([tiny_unet.inputs(of, row) for row in rows])
    recorders = [Everything() for _ in rows]

    def run(batch: Any, uses: Sequence[BlockInputs]) -> Tensor:
        return of.predict(
            batch,
            torch.cat([row.latent for row in rows]),
            [row.conditioning for row in rows],
            [row.step for row in rows],
            uses=uses,
        )

    whole = [None if some is None else added(some, row.grid) for some, row in zip(given, rows, strict=True)]
    uses = [
        BlockInputs(recorder=recorder, residuals=each)
        for recorder, each in zip(recorders, whole, strict=True)
    ]
    torch.testing.assert_close(run(batch, uses), torch.cat(wanted), atol=EXACT, rtol=0)
    assert whole[0] is not None
    assert sorted(whole[0].read) == list(range(len(maps[0]))), "each sample is read once"
    plain = tiny_unet.alone(model, of, rows[0])
    assert (plain - wanted[0]).abs().max() > 0.01

    where = [L_SHAPE, STRIP, L_SHAPE, None]
    batch = of.assemble([tiny_unet.inputs(of, row, at) for row, at in zip(rows, where, strict=True)])
    uses = [
        BlockInputs(residuals=each)
        if at is None
        else BlockInputs(
            CachedTokens((BlockMode.KV,) * len(of.blocks), RecordedUnetTokens(kept, at)), residuals=each
        )
        for at, kept, each in zip(
            where, recorders, [whole[0], added(maps[1], (5, 4), STRIP), None, whole[3]], strict=True
        )
    ]
    parts = [all_of if at is None else all_of[at.computed] for all_of, at in zip(wanted, where, strict=True)]
    torch.testing.assert_close(run(batch, uses), torch.cat(parts), atol=EXACT, rtol=0)


@torch.inference_mode()
def test_a_sample_of_nothing_adds_nothing() -> None:
    model, of = pair(*KINDS[1])
    row = tiny_unet.picture(of, (2, 3))
    torch.manual_seed(9)
    maps = [torch.randn(*one).double() for one in shapes(model, row.grid, of.side)]
    maps[2].zero_()
    some = added(maps, row.grid)
    some = Added([None if nth == 2 else each for nth, each in enumerate(some.samples)], True, [])
    batch = of.assemble([tiny_unet.inputs(of, row)])
    out = of.predict(batch, row.latent, [row.conditioning], [row.step], uses=[BlockInputs(residuals=some)])
    torch.testing.assert_close(out, tiny_unet.alone(model, of, row, maps), atol=EXACT, rtol=0)
