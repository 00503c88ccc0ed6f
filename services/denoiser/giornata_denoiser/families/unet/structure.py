"""The modules of a UNet that mix the cells of a picture, and the tiles in which a picture is computed.

Modules are listed in the order in which a forward runs them, as blocks.

A picture is cut into square tiles; a region computes some of them. The cells of the computed tiles, packed by sequence,
tile and row-major cell, are what a network computes. A 3x3 convolution also reads the cells around a tile: those of
computed tiles as they are, those of other tiles as a recording kept them, and zeros beyond the picture. Of a tile that
is not computed only cells at its own border are ever read. After SIGE (Li et al., NeurIPS 2022), which has one picture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from giornata.packed.packing import Region, Segments, to_device
from giornata.wire.models import BORDER, MOMENTS, BlockSpec


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


TEXT_TOKENS: Final = 77
"""CLIP's; the operations of a block count so many."""
WHOLE: Final = 8
"""From so many cells a side on a tile's window enters a convolution; below, nine neighbours enter a matrix product."""
SERVED: Final[Mapping[str, set[object]]] = {
    "down_block_types": {"DownBlock2D", "CrossAttnDownBlock2D"},
    "up_block_types": {"UpBlock2D", "CrossAttnUpBlock2D"},
    "mid_block_type": {"UNetMidBlock2DCrossAttn", None},
    "addition_embed_type": {None, "text_time"},
    "attention_type": {"default"},
    "center_input_sample": {False},
    "class_embed_type": {None},
    "num_class_embeds": {None},
    "conv_in_kernel": {3},
    "conv_out_kernel": {3},
    "cross_attention_norm": {None},
    "downsample_padding": {1},
    "dual_cross_attention": {False},
    "encoder_hid_dim_type": {None},
    "mid_block_only_cross_attention": {False, None},
    "only_cross_attention": {False},
    "resnet_skip_time_act": {False},
    "resnet_time_scale_shift": {"default"},
    "time_cond_proj_dim": {None},
    "time_embedding_act_fn": {None},
}
"""What a UNet's configuration may say; diffusers' defaults for what is missing are among it."""


@dataclass(frozen=True, eq=False)
class LeafModule:
    """A convolution, group norm or self-attention: a block of the network."""

    block: int | None
    """Its number; None for the first convolution, which reads what every step is given of all tiles."""
    module: Any
    side: int
    """Cells a side of a tile where it reads."""
    doubled: bool = False
    """Whether it is a convolution behind an upsampling, which repeats each cell as 2x2."""

    @cached_property
    def reading(self) -> ConvolutionGeometry:
        """How a convolution reads tiles."""
        return ConvolutionGeometry(self.side, self.module.stride[0], self.doubled)

    @cached_property
    def cells(self) -> int:
        """Cells of a tile."""
        return self.side * self.side

    @property
    def number(self) -> int:
        """Its number as a block.

        Raises:
            ValueError: it is the first convolution.
        """
        if self.block is None:
            raise ValueError("nothing is kept of the first convolution")
        return self.block

    @cached_property
    def name(self) -> str:
        """For traces."""
        return "input" if self.block is None else f"block {self.block}"


@dataclass(frozen=True, eq=False)
class UnetStructure:
    """A UNet's modules whose work depends on what the tiles of a batch belong to."""

    convolutions: tuple[LeafModule, ...]
    norms: tuple[LeafModule, ...]
    attentions: tuple[LeafModule, ...]
    """Each `BasicTransformerBlock`: it attends to the picture with `attn1` and to the text with `attn2`."""
    resnets: tuple[Any, ...]
    """What the timestep modulates."""
    specs: tuple[BlockSpec, ...]

    @cached_property
    def text_channels(self) -> int:
        """Channels of the keys and values that all blocks make of one text token."""
        return sum(2 * leaf.module.attn2.to_k.out_features for leaf in self.attentions)

    @cached_property
    def modulation_channels(self) -> int:
        """Channels of what the timestep adds in all resnets."""
        return sum(resnet.time_emb_proj.out_features for resnet in self.resnets)


def refuse_unserved(config: Any) -> None:
    """Raise unless tiles are known to equal the network of this configuration.

    Raises:
        ValueError: names the option, what it is and what is served.
    """
    for option, served in SERVED.items():
        if option not in config:
            continue
        value = config[option]
        values = set(value) if isinstance(value, (list, tuple)) else {value}
        if values - served:
            accepted = ", ".join(sorted(str(one) for one in served))
            raise ValueError(f"the UNet has {option} {value}; served is {accepted}")


class _UnetStructureBuilder:
    """Collects leaves and specs in the order of `UNet2DConditionModel.forward`."""

    def __init__(self) -> None:
        self.convolutions: list[LeafModule] = []
        self.norms: list[LeafModule] = []
        self.attentions: list[LeafModule] = []
        self.resnets: list[Any] = []
        self.specs: list[BlockSpec] = []
        self._beside: dict[str, Any] = defaultdict(float)
        """Operations of a tile that belong to no leaf, and are counted with the next one."""

    def first(self, module: nn.Conv2d, side: int) -> None:
        """The convolution whose input is the latent."""
        self.convolutions.append(LeafModule(None, module, side))
        self._beside["convolution"] += layer_weights(module) * side**2
        self._beside["gathered"] += windows(module, side)

    def resnet(self, resnet: Any, side: int) -> None:
        """`ResnetBlock2D`."""
        self.resnets.append(resnet)
        self.norm(resnet.norm1, side)
        self.convolution(resnet.conv1, side)
        self.norm(resnet.norm2, side)
        if resnet.conv_shortcut is not None:
            self._beside["convolution"] += layer_weights(resnet.conv_shortcut) * side**2
        self.convolution(resnet.conv2, side)

    def transformer(self, transformer: Any, side: int) -> None:
        """`Transformer2DModel`; its projections count as linear layers where they are convolutions of single cells."""
        for projection in (transformer.proj_in, transformer.proj_out):
            self._beside["linear"] += layer_weights(projection) * side**2
        self.norm(transformer.norm, side)
        for block in transformer.transformer_blocks:
            self.attention(block, side)

    def level(self, block: Any, side: int) -> None:
        """The resnets of a block on the way down or up, and the transformers behind them."""
        crossing = getattr(block, "has_cross_attention", False)
        for index, resnet in enumerate(block.resnets):
            self.resnet(resnet, side)
            if crossing:
                self.transformer(block.attentions[index], side)

    def convolution(self, module: nn.Conv2d, side: int, *, doubled: bool = False) -> None:
        """One that reads `side` cells a side of a tile."""
        stride: int = module.stride[0]
        kept, _ = ConvolutionGeometry(side, stride, doubled).border()
        weights = layer_weights(module) * (side // stride) ** 2
        leaf = self._leaf(
            module,
            side,
            {BORDER: len(kept) * module.in_channels},
            convolution=weights,
            gathered=windows(module, side),
        )
        self.convolutions.append(replace(leaf, doubled=doubled))

    def norm(self, module: nn.GroupNorm, side: int) -> None:
        """A mean and a sum of squares for each group."""
        self.norms.append(self._leaf(module, side, {MOMENTS: 2 * module.num_groups}))

    def attention(self, block: Any, side: int) -> None:
        """`BasicTransformerBlock`: all of its linear layers but those that project the text."""
        texts = {block.attn2.to_k, block.attn2.to_v}
        linear = [each for each in block.modules() if isinstance(each, nn.Linear) and each not in texts]
        width, across = block.attn1.to_k.out_features, block.attn2.to_k.out_features
        cells = side**2
        leaf = self._leaf(
            block,
            side,
            dict.fromkeys(("key", "value"), cells * width),
            heads=cells * block.attn1.heads,
            linear=cells * sum(map(layer_weights, linear)),
            pair=2.0 * width * cells**2,
            across=2.0 * across * TEXT_TOKENS * cells,
        )
        self.attentions.append(leaf)

    def _leaf(
        self, module: Any, side: int, parts: dict[str, int], *, heads: int = 0, **operations: float
    ) -> LeafModule:
        for name, number in operations.items():
            self._beside[name] += number
        self.specs.append(BlockSpec(heads=heads, parts=parts, together=True, **self._beside))
        self._beside.clear()
        return LeafModule(len(self.specs) - 1, module, side)


def structure(unet: Any, side: int) -> UnetStructure:
    """The structure of a `UNet2DConditionModel` whose tiles have `side` latent pixels a side.

    Raises:
        ValueError: the UNet is of another kind, or its coarsest cells are larger than a tile.
    """
    refuse_unserved(unet.config)
    coarsest = side >> (len(unet.down_blocks) - 1)
    if coarsest < 1:
        raise ValueError(f"tiles of {side} latent pixels are too small for {len(unet.down_blocks)} levels")
    walk = _UnetStructureBuilder()
    walk.first(unet.conv_in, side)
    for block in unet.down_blocks:
        walk.level(block, side)
        for sampler in block.downsamplers or ():
            walk.convolution(sampler.conv, side)
            side //= 2
    if (middle := unet.mid_block) is not None:
        walk.resnet(middle.resnets[0], side)
        for transformer, resnet in zip(middle.attentions, middle.resnets[1:], strict=True):
            walk.transformer(transformer, side)
            walk.resnet(resnet, side)
    for block in unet.up_blocks:
        walk.level(block, side)
        for sampler in block.upsamplers or ():
            side *= 2
            walk.convolution(sampler.conv, side, doubled=True)
    walk.norm(unet.conv_norm_out, side)
    walk.convolution(unet.conv_out, side)
    return UnetStructure(
        tuple(walk.convolutions),
        tuple(walk.norms),
        tuple(walk.attentions),
        tuple(walk.resnets),
        tuple(walk.specs),
    )


def layer_weights(module: Any) -> float:
    """Multiplications of one output cell: as many as the layer has weights."""
    return float(module.weight.numel())


def windows(module: Any, side: int) -> float:
    """Values that a 3x3 convolution gathers for a tile of `side` cells a side: its window, or each output's nine cells.

    See `_convolved` of :mod:`giornata_denoiser.families.unet.tiles`.
    """
    stride, channels = module.stride[0], module.in_channels
    if side >= WHOLE:
        return float((side + (2 if stride == 1 else 1)) ** 2 * channels)
    return float(9 * (side // stride) ** 2 * channels)
