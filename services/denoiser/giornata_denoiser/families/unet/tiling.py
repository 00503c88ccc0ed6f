"""Tiles of pictures: which cells a tile has, and where the cells around it lie. Values and functions of indices alone.

A picture is cut into square tiles; a region computes some of them. The cells of the computed tiles, packed by sequence,
tile and row-major cell, are what a network computes. A 3x3 convolution also reads the cells around a tile: those of
computed tiles as they are, those of other tiles as a recording kept them, and zeros beyond the picture. Of a tile that
is not computed only cells at its own border are ever read. After SIGE (Li et al., NeurIPS 2022), which has one picture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from giornata.packed.compute_set import Region
from giornata.packed.packing import Segments, to_device


class ConvolutionGeometry(NamedTuple):
    """The way in which a 3x3 convolution reads tiles."""

    side: int
    """Cells a side of a tile."""
    stride: int = 1
    doubled: bool = False
    """Whether its input is of half the resolution, each cell of it repeated as 2x2."""

    def border(self) -> tuple[Tensor, Tensor]:
        """Return what the tiles around a tile read of it, as few cells as that takes.

        Returns:
            (kept,) int64: these cells, row-major. (side², ) int64: by cell, which of them it is equal to; -1 for a cell
            that is not read.
        """
        cell = torch.arange(self.side)
        # A stride of 2 reads nothing behind a tile: of each tile its last row and column.
        edge = (cell == self.side - 1) | ((cell == 0) & (self.stride == 1))
        read = edge[:, None] | edge[None, :]
        first = cell - cell % 2 if self.doubled else cell
        equal_to = (first[:, None] * self.side + first[None, :]).flatten()
        kept, place = torch.unique(equal_to[read.flatten()], return_inverse=True)
        places = torch.full((self.side**2,), -1)
        places[read.flatten()] = place
        return kept, places


@lru_cache(maxsize=32)
def border_cells(reading: ConvolutionGeometry, device: torch.device) -> Tensor:
    """(kept,) int64: the cells of a tile that are kept for those around it; see :meth:`ConvolutionGeometry.border`."""
    return to_device(reading.border()[0], device)


def cut(cells: Tensor, grid: tuple[int, int]) -> Tensor:
    """Maps as tiles: (pictures, height, width, channels) → (pictures, tiles, side, side, channels), tiles row-major.

    `grid` is height and width of each picture in tiles.
    """
    pictures, height, _, channels = cells.shape
    rows, columns = grid
    side = height // rows
    tiles = cells.reshape(pictures, rows, side, columns, side, channels).transpose(2, 3)
    return tiles.reshape(pictures, rows * columns, side, side, channels)


@dataclass(frozen=True, eq=False)
class ConvolutionWindows:
    """The cells that a convolution reads for all computed tiles of a batch. Indices are int64.

    They point into the computed cells, then the ring of each sequence, then one cell of zeros.
    """

    index: Tensor
    """(tiles, size, size): each tile with its border."""
    rings: tuple[Tensor | None, ...]
    """By sequence, (ring,): which of the kept cells of its outside tiles are read, (outside * kept) in order;
    None where it computes all tiles."""

    def neighbours(self, stride: int) -> Tensor:
        """(tiles * outputs, 9): of each output cell the cells that it reads, row-major."""
        size = self.index.shape[1]
        outputs = (size - 3) // stride + 1
        reach = (outputs - 1) * stride + 1
        shifted = [
            self.index[:, y : y + reach : stride, x : x + reach : stride] for y in range(3) for x in range(3)
        ]
        return torch.stack(shifted, -1).view(-1, 9)


@dataclass(frozen=True, eq=False)
class Tiling:
    """The tiles that the sequences of a batch compute."""

    grids: tuple[tuple[int, int], ...]
    """Height and width of each sequence's picture in tiles."""
    regions: tuple[Region | None, ...]
    """What of it is computed; None for all of it."""
    device: torch.device
    _windows: dict[ConvolutionGeometry, ConvolutionWindows] = field(default_factory=dict, init=False)
    _cells: dict[int, Segments] = field(default_factory=dict, init=False)
    _neighbours: dict[ConvolutionGeometry, Tensor] = field(default_factory=dict, init=False)

    @cached_property
    def tiles(self) -> Segments:
        """The computed tiles of each sequence."""
        return self.cells(1)

    def cells(self, of_tile: int) -> Segments:
        """The computed cells of each sequence, where a tile has so many."""
        if of_tile not in self._cells:
            counts = (
                rows * columns if region is None else len(region.computed)
                for (rows, columns), region in zip(self.grids, self.regions, strict=True)
            )
            self._cells[of_tile] = Segments(tuple(of_tile * count for count in counts), self.device)
        return self._cells[of_tile]

    @cached_property
    def pictures(self) -> Tensor:
        """(sequences, 1) float64: all tiles of each picture."""
        tiles = [[rows * columns] for rows, columns in self.grids]
        return to_device(torch.tensor(tiles, dtype=torch.float64), self.device)

    def windows(self, reading: ConvolutionGeometry) -> ConvolutionWindows:
        """Return what a 3x3 convolution reads; kept with the batch."""
        if reading not in self._windows:
            self._windows[reading] = self._made(reading)
        return self._windows[reading]

    def neighbours(self, reading: ConvolutionGeometry) -> Tensor:
        """The same by output cell: (tiles * outputs * 9,) int64, see :meth:`ConvolutionWindows.neighbours`."""
        if reading not in self._neighbours:
            made = self.windows(reading).neighbours(reading.stride)
            self._neighbours[reading] = made.flatten()
        return self._neighbours[reading]

    def _made(self, reading: ConvolutionGeometry) -> ConvolutionWindows:
        parts = [_window(*of, reading) for of in zip(self.grids, self.regions, strict=True)]
        side = reading.side
        bounds = self.cells(side * side).bounds
        ring_start = bounds[-1][1]
        zero = ring_start + sum(len(ring) for _, ring in parts)
        indices = []
        for (index, ring), (start, end) in zip(parts, bounds, strict=True):
            own = end - start
            placed = torch.where(index < own, index + start, index - own + ring_start)
            indices.append(torch.where(index < 0, zero, placed))
            ring_start += len(ring)
        rings = tuple(
            None if region is None else to_device(ring, self.device)
            for (_, ring), region in zip(parts, self.regions, strict=True)
        )
        return ConvolutionWindows(to_device(torch.cat(indices), self.device), rings)


def _window(
    grid: tuple[int, int], region: Region | None, reading: ConvolutionGeometry
) -> tuple[Tensor, Tensor]:
    """One sequence's windows, (tiles, size, size), and its ring, (ring,).

    An index below the number of its own cells is one of them; from there on it is one of the ring, and -1 is beyond the
    picture.
    """
    (rows, columns), side = grid, reading.side
    size = side + (2 if reading.stride == 1 else 1)
    cells = side * side
    here = None if region is None else region.on(torch.device("cpu"))
    computed = torch.arange(rows * columns) if here is None else here.computed
    own = torch.arange(len(computed) * cells).view(-1, cells)
    values = torch.empty(rows * columns, cells, dtype=torch.int64)
    values[computed] = own
    if here is not None:
        kept, places = reading.border()
        outside = torch.arange(len(here.outside)).unsqueeze(1) * len(kept) + places
        values[here.outside] = -2 - outside
    maps = torch.full((rows * side + 2, columns * side + 2), -1)
    maps[1:-1, 1:-1] = values.view(rows, columns, side, side).transpose(1, 2).reshape(rows * side, -1)
    found = maps.unfold(0, size, side)[:rows].unfold(1, size, side)[:, :columns]
    index = found.reshape(rows * columns, size, size)[computed]
    ring = torch.unique(-2 - index[index < -1])
    placed = len(computed) * cells + torch.searchsorted(ring, -2 - index)
    return torch.where(index < -1, placed, index), ring
