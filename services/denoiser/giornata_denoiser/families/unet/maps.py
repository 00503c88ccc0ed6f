"""A forward over whole pictures of one size, as diffusers has it; rows differ in text, timestep and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from giornata.packed.attention import Crossing
from giornata.packed.low_rank_hooks import LowRankHooks
from giornata.packed.low_rank_products import convolve
from giornata.packed.packing import Segments
from giornata.packed.tracing import LaneTracer, TraceLane
from giornata.packed.uses import ActivationRecorder
from giornata_denoiser.families.unet.recorded import keep_attended, keep_border, keep_moments, moments
from giornata_denoiser.families.unet.structure import LeafModule
from giornata_denoiser.families.unet.text import PreparedPrompt
from giornata_denoiser.families.unet.tiling import cut


class MapPass:
    """Satisfies :class:`giornata_denoiser.families.unet.passes.UnetPass`; an item is a picture.

    `grid` is height and width in tiles. `prepared`, `steps` and `recorders` are by item.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        prepared: Sequence[PreparedPrompt],
        steps: Sequence[int],
        recorders: Mapping[int, ActivationRecorder],
        *,
        cross: Crossing,
        low_ranks: LowRankHooks,
        trace: LaneTracer,
    ) -> None:
        self._grid, self._prepared, self._recorders = grid, prepared, recorders
        self._cross, self._low_ranks, self._trace = cross, low_ranks, trace
        self._vectors = torch.stack([of.modulation[step] for of, step in zip(prepared, steps, strict=True)])

    def convolution(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """diffusers' own, and what LoRAs add to it."""
        with self._trace.span(TraceLane.COMPUTE, leaf.name):
            for item, recorder in self._recorders.items():
                keep_border(recorder, leaf, self._tiles(item, hidden))
            out = _own(leaf.module, hidden)
            convolve(hidden, out, self._low_ranks.parts(leaf.module, len(hidden)), leaf.module)
            return out

    def norm(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """diffusers' own."""
        with self._trace.span(TraceLane.COMPUTE, leaf.name):
            for item, recorder in self._recorders.items():
                keep_moments(recorder, leaf, moments(self._tiles(item, hidden), leaf.module.num_groups))
            return _own(leaf.module, hidden)

    def attention(self, leaf: LeafModule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One scaled-dot-product attention of all pictures."""
        with self._trace.span(TraceLane.COMPUTE, leaf.name):
            for item, recorder in self._recorders.items():
                keep_attended(recorder, leaf, self._cells(leaf, key[item]), self._cells(leaf, value[item]))
            by_head = [part.transpose(1, 2) for part in (query, key, value)]
            return F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2]).transpose(1, 2)

    def text_attention(self, index: int, query: Tensor) -> Tensor:
        """Each picture over its own text."""
        keys, values = zip(*(of.text[index] for of in self._prepared), strict=True)
        cells = Segments((query.shape[1],) * len(query), query.device)
        return self._cross(query.flatten(0, 1), keys, values, cells).view(query.shape)

    def modulation(self, start: int, end: int) -> Tensor:
        """(pictures, end - start)."""
        return self._vectors[:, start:end]

    def _tiles(self, item: int, hidden: Tensor) -> Tensor:
        """(tiles, side, side, channels) of one of (items, channels, height, width)."""
        return cut(hidden[item : item + 1].permute(0, 2, 3, 1), self._grid)[0]

    def _cells(self, leaf: LeafModule, keys: Tensor) -> Tensor:
        """(tiles, cells, heads, head_dim) of one picture's (cells, heads, head_dim)."""
        rows, columns = self._grid
        of_map = keys.reshape(1, rows * leaf.side, columns * leaf.side, -1)
        return cut(of_map, self._grid)[0].view(rows * columns, leaf.cells, *keys.shape[1:])


def _own(module: Any, hidden: Tensor) -> Tensor:
    out: Tensor = type(module).forward(module, hidden)
    return out
