"""A forward of a UNet: its hooks, residuals that join it, and whole pictures of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from giornata.packed.attention import Crossing
from giornata.packed.block_inputs import ActivationRecorder, Residuals
from giornata.packed.compute_set import Region
from giornata.packed.low_rank import LowRankHooks, convolve
from giornata.packed.packing import LaneTracer, Segments, TraceLane, tiles_to_maps
from giornata.wire.models import BORDER, MOMENTS
from giornata_denoiser.families.unet.prompts import PreparedPrompt
from giornata_denoiser.families.unet.structure import LeafModule, UnetStructure
from giornata_denoiser.families.unet.tiling import Tiling, border_cells, cut

# What ControlNets add to a UNet: they join where its decoder begins to read, and may be waited for until
# then.
#
# `UNet2DConditionModel.forward` adds `down_block_additional_residuals` to all skip connections before the
# decoder runs. Here each up block adds what it reads: the encoder and the middle of the network run before
# anything is awaited.


@dataclass(frozen=True, eq=False)
class SequenceResiduals:
    """The residuals of one sequence of a forward.

    Sample `n` of `residuals` is of skip connection `n`, in the encoder's order; one more is of the middle's output. A
    token is a tile of that map.
    """

    residuals: Residuals
    items: tuple[int, int]
    """First item in the forward's batch, and the first behind: the sequence's picture, or its tiles."""
    grid: tuple[int, int] | None
    """Height and width of the picture in tiles, where it is one item; None where its tiles are the items."""
    region: Region | None = None
    """The tiles that are items, where these are not all."""

    def add(self, index: int, hidden: Tensor) -> None:
        """Add sample `index` to `hidden` in place; it is (items, channels, height, width) of all sequences."""
        sample = self.residuals.sample(index)
        if sample is None:
            return
        own = hidden[slice(*self.items)]
        if self.grid is not None:
            side = hidden.shape[2] // self.grid[0]
            tiles = sample.view(1, len(sample), hidden.shape[1], side, side)
            own += tiles_to_maps(tiles, self.grid).to(hidden.dtype)
            return
        if self.region is not None and self.residuals.whole:
            sample = sample.index_select(0, self.region.computed.to(sample.device))
        own += sample.view(own.shape).to(hidden.dtype)


def maps_joined(
    residuals: Mapping[int, Residuals], of: Sequence[int], grid: tuple[int, int]
) -> tuple[SequenceResiduals, ...]:
    """Return what is added to the sequences `of`, whose pictures are items; `residuals` are by sequence."""
    places = enumerate(of)
    return tuple(
        SequenceResiduals(residuals[i], (place, place + 1), grid) for place, i in places if i in residuals
    )


def tiles_joined(
    residuals: Mapping[int, Residuals], of: Sequence[int], tiling: Tiling
) -> tuple[SequenceResiduals, ...]:
    """The same for sequences whose computed tiles are items."""
    places = zip(of, tiling.tiles.bounds, tiling.regions, strict=True)
    return tuple(
        SequenceResiduals(residuals[i], bounds, None, region)
        for i, bounds, region in places
        if i in residuals
    )


class UnetResidualHooks:
    """Hooks on the up blocks of a `unet`, which add what joins the forward that is under way."""

    def __init__(self, unet: Any) -> None:
        self.now: Sequence[SequenceResiduals] = ()
        """What joins the forward that is under way."""
        self.middle = 1 + sum(
            len(block.resnets) + len(block.downsamplers or ()) for block in unet.down_blocks
        )
        """The sample of the middle's output, behind those of all skip connections."""
        end = self.middle
        for block in unet.up_blocks:
            start = end - len(block.resnets)
            block.register_forward_pre_hook(partial(self._join, (start, end)), with_kwargs=True)
            end = start

    def _join(
        self, skips: tuple[int, int], _block: Any, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.now:
            return None
        start, end = skips
        read = given["res_hidden_states_tuple"]
        found = tuple(self._added(start + nth, skip) for nth, skip in enumerate(read))
        given = {**given, "res_hidden_states_tuple": found}
        if end == self.middle:
            given["hidden_states"] = self._added(self.middle, given["hidden_states"])
        return args, given

    def _added(self, index: int, hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        for each in self.now:
            each.add(index, hidden)
        return hidden


# What a recording keeps of a block, by tile; and what a block takes of it.


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


# The interior of a UNet: what its modules do within a forward, told by what that forward's batch is.
#
# `UNet2DConditionModel.forward` runs unmodified. The modules that mix the cells of a picture, or tell items
# of the batch apart, ask the pass that is under way. There are two kinds: over maps, as diffusers has it,
# and over tiles.


class UnetPass(Protocol):
    """One forward. Items are those of its batch: maps or tiles."""

    def convolution(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """A 3x3 convolution of (items, channels, height, width)."""

    def norm(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """A group norm over the whole picture of (items, channels, height, width)."""

    def attention(self, leaf: LeafModule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each item's cells over all cells of its picture; all are (items, cells, heads, head_dim)."""

    def text_attention(self, index: int, query: Tensor) -> Tensor:
        """The same over the item's text, in the attention of this index."""

    def modulation(self, start: int, end: int) -> Tensor:
        """(items, end - start): these channels of what the timestep adds to each item."""


class NoPass:
    """No forward is under way; stands where a :class:`UnetPass` stands."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the UNet runs within a network's forward alone")


class UnetHooks:
    """The modules of one UNet, wired to the pass that is under way; one at a time."""

    def __init__(self, unet: Any, structure: UnetStructure) -> None:
        self._unet = unet
        self.under_way: UnetPass = NoPass()
        """The pass that the modules serve now."""
        for leaf in structure.convolutions:
            leaf.module.forward = partial(self._convolution, leaf)
        for leaf in structure.norms:
            leaf.module.forward = partial(self._norm, leaf)
        for index, leaf in enumerate(structure.attentions):
            leaf.module.attn1.processor = PictureAttention(self, leaf)
            leaf.module.attn2.processor = TextAttention(self, index)
        start = 0
        for resnet in structure.resnets:
            end = start + resnet.time_emb_proj.out_features
            resnet.time_emb_proj.forward = partial(self._modulation, start, end)
            start = end
        # What becomes of the timestep is prepared for each row: within a forward it is nothing.
        for name in ("time_proj", "time_embedding", "add_time_proj", "add_embedding"):
            module = getattr(unet, name, None)
            if module is not None:
                module.forward = _nothing
        self._joining = UnetResidualHooks(unet)
        self._added = unet.config.addition_embed_type is not None

    def run(self, through: UnetPass, sample: Tensor, joined: Sequence[SequenceResiduals] = ()) -> Tensor:
        """The UNet's output, (items, out_channels, height, width), of (items, in_channels, height, width).

        What is `joined` is added before the decoder.
        """
        none = sample.new_zeros(1, 1)
        self.under_way, self._joining.now = through, joined
        try:
            out: Tensor = self._unet(
                sample,
                none[0],
                none[None],
                added_cond_kwargs={"text_embeds": none, "time_ids": none} if self._added else None,
                return_dict=False,
            )[0]
        finally:
            self.under_way, self._joining.now = NoPass(), ()
        return out

    def _convolution(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        return self.under_way.convolution(leaf, hidden)

    def _norm(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        return self.under_way.norm(leaf, hidden)

    def _modulation(self, start: int, end: int, _embedding: Tensor) -> Tensor:
        return self.under_way.modulation(start, end)


def _nothing(*inputs: Tensor | None) -> Tensor:
    first = inputs[0]
    if first is None:
        raise TypeError("a timestep's module was called without one")
    return first.new_zeros(1, 1)


class PictureAttention:
    """Each cell over its picture's cells: a processor of diffusers' attention modules that asks the pass under way."""

    def __init__(self, interior: UnetHooks, leaf: LeafModule) -> None:
        self._interior, self._leaf = interior, leaf

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,  # noqa: ARG002 - diffusers' signature
        attention_mask: Tensor | None = None,  # noqa: ARG002 - likewise
    ) -> Tensor:
        """(items, cells, channels)."""
        query = attn.to_q(hidden_states)
        heads = *query.shape[:2], attn.heads, -1
        key, value = attn.to_k(hidden_states).reshape(heads), attn.to_v(hidden_states).reshape(heads)
        mixed = self._interior.under_way.attention(self._leaf, query.reshape(heads), key, value)
        out: Tensor = attn.to_out[1](attn.to_out[0](mixed.flatten(2)))
        return out


class TextAttention:
    """Each cell over keys and values of the text, which a row has from when it joins; a processor likewise."""

    def __init__(self, interior: UnetHooks, index: int) -> None:
        self._interior, self._index = interior, index

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,  # noqa: ARG002 - diffusers' signature
        attention_mask: Tensor | None = None,  # noqa: ARG002 - likewise
    ) -> Tensor:
        """(items, cells, channels)."""
        query = attn.to_q(hidden_states)
        query = query.reshape(*query.shape[:2], attn.heads, -1)
        mixed = self._interior.under_way.text_attention(self._index, query)
        out: Tensor = attn.to_out[1](attn.to_out[0](mixed.flatten(2)))
        return out


# A forward over whole pictures of one size, as diffusers has it; rows differ in text, timestep and values.


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
