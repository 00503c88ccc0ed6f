"""Windows of tiles against slices of a padded map."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from hypothesis import given
from hypothesis import strategies as st

from giornata.packed.compute_set import make_region
from giornata.packed.packing import maps_to_tiles, tiles_to_maps
from giornata_denoiser.families.unet.structure import ConvolutionGeometry, Tiling, border_cells, cut

GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 4))
CPU = torch.device("cpu")
READINGS = (
    *(ConvolutionGeometry(side) for side in (8, 4, 2, 1)),
    *(ConvolutionGeometry(side, 2) for side in (8, 4, 2)),
    *(ConvolutionGeometry(side, doubled=True) for side in (8, 4, 2)),
)


@given(st.lists(GRIDS, min_size=1, max_size=3), st.sampled_from([1, 2, 4, 8]), st.data())
def test_windows_are_those_of_padded_maps(
    grids: list[tuple[int, int]], side: int, data: st.DataObject
) -> None:
    stride = data.draw(st.sampled_from([1, 2] if side > 1 else [1]))
    reading = ConvolutionGeometry(side, stride, side > 1 and stride == 1 and data.draw(st.booleans()))
    regions = [
        make_region(
            torch.tensor(data.draw(st.lists(st.booleans(), min_size=h * w, max_size=h * w))).view(h, w)
        )
        for h, w in grids
    ]
    tiling = Tiling(tuple(grids), tuple(regions), CPU)
    windows = tiling.windows(reading)
    # Every cell has a value of its own; 0 is what lies beyond a picture.
    maps, first = [], 1
    for height, width in grids:
        count = height * width * side * side
        cells = torch.arange(first, first + count).view(height * side, width * side)
        if reading.doubled:  # 2x2 cells have one value
            cells = cells[::2, ::2].repeat_interleave(2, 0).repeat_interleave(2, 1)
        maps.append(cells)
        first += count
    own, around, wanted = [], [], []
    size = windows.index.shape[1]
    for each, grid, where, ring in zip(maps, grids, regions, windows.rings, strict=True):
        tiles = cut(each[None, :, :, None], grid)[0].flatten(1)
        padded = F.pad(each, (1, 1, 1, 1))
        computed = range(len(tiles)) if where is None else where.computed.tolist()
        own.append(tiles[list(computed)].flatten())
        if where is not None:
            assert ring is not None
            around.append(tiles[where.outside][:, border_cells(reading, CPU)].flatten()[ring])
        for tile in computed:
            y, x = (side * at for at in divmod(tile, grid[1]))
            wanted.append(padded[y : y + size, x : x + size])
    cells = torch.cat((*own, *around, torch.zeros(1, dtype=torch.int64)))
    assert torch.equal(cells[windows.index], torch.stack(wanted))
    outputs = F.unfold(torch.stack(wanted)[:, None].double(), 3, stride=stride).transpose(1, 2)
    assert torch.equal(cells[tiling.neighbours(reading)].view(-1, 9), outputs.reshape(-1, 9).long())


def test_a_ring_holds_no_cell_twice_and_none_that_is_not_read() -> None:
    """One tile in the middle of nine reads one cell of each corner's tile, and a line of the other four."""
    cells = torch.zeros(3, 3, dtype=torch.bool)
    cells[1, 1] = True
    where = make_region(cells)
    (ring,) = Tiling(((3, 3),), (where,), CPU).windows(ConvolutionGeometry(4)).rings
    assert ring is not None
    assert len(ring) == len(torch.unique(ring)) == 4 * 4 + 4


@given(GRIDS, st.integers(1, 4), st.integers(1, 3))
def test_maps_are_parted_into_the_tiles_that_they_were_joined_of(
    grid: tuple[int, int], side: int, channels: int
) -> None:
    tiles = torch.arange(2 * grid[0] * grid[1] * channels * side * side).view(2, -1, channels, side, side)
    maps = tiles_to_maps(tiles, grid)
    assert maps.shape == (2, channels, grid[0] * side, grid[1] * side)
    assert torch.equal(maps[1, 0, :side, :side], tiles[1, 0, 0])
    assert torch.equal(maps_to_tiles(maps, grid), tiles)
    by_cell = cut(maps.permute(0, 2, 3, 1), grid)
    assert torch.equal(by_cell, tiles.permute(0, 1, 3, 4, 2))


def test_as_few_cells_are_kept_as_are_read() -> None:
    """All at a tile's border; behind a stride of 2 the last row and column; of doubled cells one of each four."""
    kept = {reading: len(border_cells(reading, CPU)) for reading in READINGS}
    assert list(kept.values()) == [28, 12, 4, 1, 15, 7, 3, 12, 4, 1]
