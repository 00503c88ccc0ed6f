"""A forward over tiles: those that rows compute, of all rows, whatever their size, mask, prompt and timestep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from giornata.packed.attention import Attention, DenseKV, Gather, KVPages, PageDestination, ProjectedKV
from giornata.packed.low_rank import convolve
from giornata.packed.packing import KVSource
from giornata.wire.models import BORDER, MOMENTS
from giornata_denoiser.families.unet.passes import (
    PassInputs,
    UnetPass,
    keep_attended,
    keep_border,
    keep_moments,
    moments,
)
from giornata_denoiser.families.unet.structure import WHOLE, LeafModule, Tiling, border_cells

PART_BYTES: Final = 8 << 20
"""What a processor gathers at a time for a matrix product."""


class CachedTiles:
    """The outside tiles that a batch takes, of `sources` by sequence; kept while all of them answer the same."""

    def __init__(self, sources: Mapping[int, KVSource]) -> None:
        self.sources = sources
        self.stays = all(source.keeps for source in sources.values())
        self.borders: dict[LeafModule, Tensor] = {}
        """(cells, channels): what lies around the computed tiles, and behind it one cell of zeros."""
        self.moments: dict[LeafModule, Tensor] = {}
        """(tiles, 2, groups): statistics of all outside tiles, by sequence."""
        self.attended: dict[LeafModule, dict[int, DenseKV]] = {}
        """By sequence: keys and values of outside tiles, by cell."""
        self.owners: Tensor | None = None
        """(tiles,) int64: the sequence of each computed tile, then of each outside tile."""


class TilePass(UnetPass):
    """A pass over the computed tiles of `tiling`; an item is a tile.

    `around` are the inputs of each sequence's outside tiles, (outside, in_channels, side, side). LoRAs act where it is
    `adapted`.
    """

    def __init__(
        self,
        given: PassInputs,
        tiling: Tiling,
        *,
        kept: CachedTiles,
        around: Sequence[Tensor],
        attend: Attention,
        gather: Gather,
        adapted: bool,
    ) -> None:
        super().__init__(given, tiling.cells)
        self._tiling, self._kept, self._around = tiling, kept, around
        self._recorded = [(self._recorders[s], tiling.tiles.bounds[s]) for s in self._recorders]
        """The recorders, and where their sequences' tiles are."""
        self._attend, self._gather, self._adapted = attend, gather, adapted
        self._vectors = self._vectors.index_select(0, tiling.tiles.sequence)

    def convolution(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """Gathers what each tile reads, then runs without padding."""
        module, reading = leaf.module, leaf.reading
        tiles = hidden.permute(0, 2, 3, 1)
        for recorder, (start, end) in self._recorded:
            keep_border(recorder, leaf, tiles[start:end])
        border, flat = self._kept.borders.get(leaf), tiles.reshape(-1, tiles.shape[3])
        cells = torch.cat((flat, *self._around_tiles(leaf, flat)) if border is None else (flat, border))
        acting = self._low_ranks.parts(module, len(tiles)) if self._adapted else []
        if leaf.side >= WHOLE:
            index = self._tiling.windows(reading).index
            read = cells.index_select(0, index.view(-1)).view(*index.shape, -1).permute(0, 3, 1, 2)
            out = F.conv2d(read, module.weight, module.bias, reading.stride)
            convolve(read, out, acting, module, padding=0)
            return out
        neighbours, side = self._tiling.neighbours(reading), leaf.side // reading.stride
        out = _products(cells, neighbours, module.weight, module.bias)
        for factors, *tiles_of in acting:
            start, end = (side * side * bound for bound in tiles_of)
            low = _products(cells, neighbours[9 * start : 9 * end], factors.down)
            out[start:end].addmm_(low, factors.up.flatten(1).t())
        return out.view(-1, side, side, module.out_channels).permute(0, 3, 1, 2)

    def _around_tiles(self, leaf: LeafModule, cells: Tensor) -> Sequence[Tensor]:
        """See :attr:`CachedTiles.borders`, in parts; they are kept if they stay. `cells` are the computed ones."""
        rings = enumerate(self._tiling.windows(leaf.reading).rings)
        channels = cells.shape[1]
        around = [
            self._border(leaf, sequence, channels).index_select(0, ring)
            for sequence, ring in rings
            if ring is not None
        ]
        around.append(cells.new_zeros(1, channels))
        if not self._kept.stays or leaf.block is None:
            return around
        border = self._kept.borders[leaf] = torch.cat(around)
        return [border]

    def norm(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """Statistics of the whole picture: of computed tiles as they are, of the others as they are taken."""
        module = leaf.module
        found = moments(hidden.permute(0, 2, 3, 1), module.num_groups)
        for recorder, (start, end) in self._recorded:
            keep_moments(recorder, leaf, found[start:end])
        of_group = hidden.shape[1] // module.num_groups
        mean, variance = self._statistics(leaf, found, leaf.cells * of_group)
        scale = torch.rsqrt(variance.repeat_interleave(of_group, 1) + module.eps) * module.weight
        shift = module.bias - mean.repeat_interleave(of_group, 1) * scale
        owner = self._tiling.tiles.sequence
        shift = shift.to(hidden.dtype).index_select(0, owner)[:, :, None, None]
        scale = scale.to(hidden.dtype).index_select(0, owner)[:, :, None, None]
        return torch.addcmul(shift, hidden, scale)

    def _statistics(self, leaf: LeafModule, found: Tensor, values: int) -> tuple[Tensor, Tensor]:
        """Mean and variance, (sequences, groups) float64 each, from tiles of so many `values` a group.

        The parallel algorithm of Chan et al. (1979): squared differences within tiles, and between their means.
        """
        kept, count = self._kept, self._tiling.pictures
        taken, owner = kept.moments.get(leaf), kept.owners
        if taken is None or owner is None:
            parts = {
                sequence: source.part(leaf.number, MOMENTS).view(-1, 2, found.shape[2])
                for sequence, source in kept.sources.items()
            }
            if owner is None:
                owner = self._tiling.tiles.sequence
                others = [owner.new_full((len(part),), sequence) for sequence, part in parts.items()]
                owner = kept.owners = torch.cat((owner, *others))
            if kept.stays:
                kept.moments[leaf] = torch.cat(list(parts.values()))
            found = torch.cat((found, *parts.values()))
        else:
            found = torch.cat((found, taken))
        means, squares = found.double().unbind(1)
        mean = means.new_zeros(len(count), means.shape[1]).index_add_(0, owner, means) / count
        # A correction adds differences to what is taken; no sum of squares becomes negative by that.
        within = squares.clamp_min(0) + values * (means - mean.index_select(0, owner)).square()
        variance = torch.zeros_like(mean).index_add_(0, owner, within) / (count * values)
        return mean, variance

    def attention(self, leaf: LeafModule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each sequence's tiles over their own keys and those that are taken."""
        for recorder, (start, end) in self._recorded:
            keep_attended(recorder, leaf, key[start:end], value[start:end])
        outside = self._kept.attended.get(leaf)
        if outside is None:
            outside = {
                sequence: self._outside(source.keys_values(leaf.number), key)
                for sequence, source in self._kept.sources.items()
            }
            if self._kept.stays:
                self._kept.attended[leaf] = outside
        cells = self.cells(leaf.cells)
        attended = self._attend(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), cells, outside)
        return attended.view(query.shape)

    def _border(self, leaf: LeafModule, sequence: int, channels: int) -> Tensor:
        """(outside * kept, channels): what is kept of the borders of a sequence's outside tiles."""
        if leaf.block is None:
            cells = self._around[sequence].permute(0, 2, 3, 1).flatten(1, 2)
            return cells.index_select(1, border_cells(leaf.reading, cells.device)).flatten(0, 1)
        return self._kept.sources[sequence].part(leaf.block, BORDER).view(-1, channels)

    def _outside(self, taken: DenseKV | KVPages, like: Tensor) -> DenseKV:
        """Keys and values of outside tiles by cell; `like` is (tiles, cells, heads, head_dim)."""
        shape, room = like.shape, 0
        if isinstance(taken, DenseKV):
            key, value, room = taken.key, taken.value, taken.room * shape[1]
        else:
            of_tile = (len(taken), shape[1] * shape[2], shape[3])
            key, value = like.new_empty(of_tile), like.new_empty(of_tile)
            none = like.new_empty(0, *of_tile[1:])
            places = torch.empty(0, dtype=torch.int64, device=like.device)
            self._gather((PageDestination(taken, 0),), ProjectedKV(none, none, places), key, value)
        return DenseKV(key.view(-1, *shape[2:]), value.view(-1, *shape[2:]), room)


def _products(cells: Tensor, neighbours: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(outputs, out_channels): a 3x3 convolution at outputs that read nine of `cells` (cells, channels) each.

    `weight` is (out_channels, channels, 3, 3), `neighbours` (outputs * 9,). A processor works through them in parts
    that its allocator and caches keep.
    """
    width = 9 * cells.shape[1]
    matrix = weight.permute(0, 2, 3, 1).reshape(-1, width).t()
    outputs = len(neighbours) // 9
    part = outputs if cells.is_cuda else max(1, PART_BYTES // (width * cells.itemsize))
    out = cells.new_empty(outputs, matrix.shape[1])
    for start in range(0, outputs, part):
        end = min(start + part, outputs)
        read = cells.index_select(0, neighbours[9 * start : 9 * end]).view(-1, width)
        if bias is None:
            torch.mm(read, matrix, out=out[start:end])
        else:
            torch.addmm(bias, read, matrix, out=out[start:end])
    return out
