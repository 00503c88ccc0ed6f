"""A forward of a UNet: what its modules do, told by the pass that is under way, and residuals that join it.

`UNet2DConditionModel.forward` runs unmodified. The modules that mix the cells of a picture, or tell items of the batch
apart, ask the pass: one over whole pictures of one size, as diffusers has it, or one over tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from giornata.packed.attention import Crossing
from giornata.packed.low_rank import LowRankHooks, convolve
from giornata.packed.packing import (
    UNTRACED,
    ActivationRecorder,
    BlockInputs,
    LaneTracer,
    Region,
    Residuals,
    Segments,
    TraceLane,
    tiles_to_maps,
)
from giornata.tensors import POOLED, SIZES
from giornata.wire.models import BORDER, MOMENTS
from giornata_denoiser.families.network import Grid
from giornata_denoiser.families.unet.structure import LeafModule, Tiling, UnetStructure, border_cells, cut
from giornata_denoiser.rows.row import Prompt

# What the network computes of a prompt once for all steps of a row.


class PreparedPrompt(NamedTuple):
    """The tensors that a network makes of a prompt, for all steps of a track."""

    modulation: Tensor
    """(steps, channels): what the timestep adds in each resnet, one after the other."""
    text: tuple[tuple[Tensor, Tensor], ...]
    """By attention: keys and values of the text, (text_tokens, heads, head_dim) each."""


def prepare_prompt(
    unet: Any, structure: UnetStructure, prompt: Prompt, times: Tensor, low_ranks: LowRankHooks
) -> PreparedPrompt:
    """See :class:`PreparedPrompt`; `times` are (steps,). Rounds to the dtype where diffusers does.

    The hooks add what the prompt's LoRAs make.
    """
    dtype = prompt.embeds.dtype
    embedding = own_forward(unet.time_embedding, own_forward(unet.time_proj, times).to(dtype))
    if prompt.pooled is not None:
        sizes = own_forward(unet.add_time_proj, prompt.tensors[SIZES].float()).flatten()
        added = torch.cat((prompt.tensors[POOLED], sizes.to(dtype)))
        embedding = embedding + own_forward(unet.add_embedding, added[None])
    parts = []
    for resnet in structure.resnets:
        activated = resnet.nonlinearity(embedding)
        parts.append(own_forward(resnet.time_emb_proj, activated))
        low_ranks.add(resnet.time_emb_proj, activated, parts[-1])
    text = []
    for leaf in structure.attentions:
        attn = leaf.module.attn2
        key, value = (layer(prompt.embeds).unflatten(1, (attn.heads, -1)) for layer in (attn.to_k, attn.to_v))
        text.append((key, value))
    return PreparedPrompt(torch.cat(parts, dim=1), tuple(text))


def own_forward(module: Any, *inputs: Tensor) -> Tensor:
    """Return what the module's class computes: a network answers calls of the module itself otherwise."""
    out: Tensor = type(module).forward(module, *inputs)
    return out


# What ControlNets add to a UNet: they join where its decoder begins to read, and may be waited for until then.
#
# `UNet2DConditionModel.forward` adds `down_block_additional_residuals` to all skip connections before the decoder runs.
# Here each up block adds what it reads: the encoder and the middle of the network run before anything is awaited.


@dataclass(frozen=True, eq=False)
class SequenceResiduals:
    """The residuals of one sequence of a forward.

    Sample `n` of `residuals` is of skip connection `n`, in the encoder's order; one more is of the middle's output. A
    token is a tile of that map.
    """

    residuals: Residuals
    items: tuple[int, int]
    """First item in the forward's batch, and the first behind: the sequence's picture, or its tiles."""
    grid: Grid | None
    """The picture's, where it is one item; None where its tiles are the items."""
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


def maps_joined(uses: Sequence[BlockInputs], of: Sequence[int], grid: Grid) -> tuple[SequenceResiduals, ...]:
    """Return what is added to the sequences `of`, whose pictures are items; `uses` are of all sequences, or none."""
    found = ((place, uses[index].residuals) for place, index in enumerate(of) if uses)
    return tuple(
        SequenceResiduals(residuals, (place, place + 1), grid)
        for place, residuals in found
        if residuals is not None
    )


def tiles_joined(
    uses: Sequence[BlockInputs], of: Sequence[int], tiling: Tiling
) -> tuple[SequenceResiduals, ...]:
    """The same for sequences whose computed tiles are items."""
    places = zip(of, tiling.tiles.bounds, tiling.regions, strict=True)
    return tuple(
        SequenceResiduals(residuals, bounds, None, region)
        for index, bounds, region in places
        if uses and (residuals := uses[index].residuals) is not None
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


# The pass that is under way.


@dataclass(frozen=True, eq=False)
class PassInputs:
    """The inputs of a forward over some sequences besides their latents; all but the last three are by sequence."""

    prepared: Sequence[PreparedPrompt]
    steps: Sequence[int]
    uses: Sequence[BlockInputs]
    """Empty where no sequence uses anything."""
    cross: Crossing
    low_ranks: LowRankHooks
    trace: LaneTracer

    def of(self, sequences: Sequence[int]) -> PassInputs:
        """Those of some of the sequences."""
        return replace(
            self,
            prepared=[self.prepared[index] for index in sequences],
            steps=[self.steps[index] for index in sequences],
            uses=[self.uses[index] for index in sequences] if self.uses else (),
        )


class UnetPass(ABC):
    """One forward. Items are those of its batch, maps or tiles; `cells` counts those of each sequence, by an item's."""

    def __init__(self, given: PassInputs, cells: Callable[[int], Segments]) -> None:
        self.cells = cells
        self.trace, self._low_ranks, self._cross = given.trace, given.low_ranks, given.cross
        self._texts = [of.text for of in given.prepared]
        self._recorders: dict[int, ActivationRecorder] = {
            place: use.recorder for place, use in enumerate(given.uses) if use.recorder is not None
        }
        steps = zip(given.prepared, given.steps, strict=True)
        self._vectors = torch.stack([of.modulation[step] for of, step in steps])

    @abstractmethod
    def convolution(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """A 3x3 convolution of (items, channels, height, width)."""

    @abstractmethod
    def norm(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """A group norm over the whole picture of (items, channels, height, width)."""

    @abstractmethod
    def attention(self, leaf: LeafModule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each item's cells over all cells of its picture; all are (items, cells, heads, head_dim)."""

    def text_attention(self, index: int, query: Tensor) -> Tensor:
        """The same over the item's text, in the attention of this index."""
        keys, values = zip(*[text[index] for text in self._texts], strict=True)
        return self._cross(query.flatten(0, 1), keys, values, self.cells(query.shape[1])).view(query.shape)

    def modulation(self, start: int, end: int) -> Tensor:
        """(items, end - start): these channels of what the timestep adds to each item."""
        return self._vectors[:, start:end]


class NoPass:
    """No forward is under way; stands where a :class:`UnetPass` stands."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the UNet runs within a network's forward alone")


class UnetHooks:
    """The modules of one UNet, wired to the pass that is under way; one at a time."""

    def __init__(self, unet: Any, structure: UnetStructure) -> None:
        self._unet = unet
        self.under_way: Any = NoPass()
        """The pass that the modules serve now."""
        for leaf in structure.convolutions:
            leaf.module.forward = partial(self._leaf, "convolution", leaf)
        for leaf in structure.norms:
            leaf.module.forward = partial(self._leaf, "norm", leaf)
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

    def _leaf(self, kind: str, leaf: LeafModule, hidden: Tensor) -> Tensor:
        now = self.under_way
        compute: Callable[[LeafModule, Tensor], Tensor] = getattr(now, kind)
        if now.trace is UNTRACED:
            return compute(leaf, hidden)
        with now.trace.span(TraceLane.COMPUTE, leaf.name):
            return compute(leaf, hidden)

    def _modulation(self, start: int, end: int, _embedding: Tensor) -> Tensor:
        found: Tensor = self.under_way.modulation(start, end)
        return found


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
        now, query = self._interior.under_way, attn.to_q(hidden_states)
        heads = *query.shape[:2], attn.heads, -1
        query, key, value = query.reshape(heads), attn.to_k(hidden_states), attn.to_v(hidden_states)
        key, value = key.reshape(heads), value.reshape(heads)
        with now.trace.span(TraceLane.COMPUTE, self._leaf.name):
            mixed = now.attention(self._leaf, query, key, value)
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
    recorder.part(leaf.number, MOMENTS, found.flatten(1))


def keep_attended(recorder: ActivationRecorder, leaf: LeafModule, key: Tensor, value: Tensor) -> None:
    """Keep keys and values, (tiles, cells, heads, head_dim): to a recording the cells of a tile are more heads."""
    recorder.keys_values(leaf.number, key.flatten(1, 2), value.flatten(1, 2))


class MapPass(UnetPass):
    """A pass over whole pictures of one size, `grid` in tiles; an item is a picture."""

    def __init__(self, given: PassInputs, grid: Grid) -> None:
        count, device = len(given.prepared), given.prepared[0].modulation.device
        super().__init__(given, lambda of_item: Segments((of_item,) * count, device))
        self._grid = grid

    def convolution(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """diffusers' own, and what LoRAs add to it."""
        for item, recorder in self._recorders.items():
            keep_border(recorder, leaf, self._tiles(item, hidden))
        out = own_forward(leaf.module, hidden)
        convolve(hidden, out, self._low_ranks.parts(leaf.module, len(hidden)), leaf.module)
        return out

    def norm(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """diffusers' own."""
        for item, recorder in self._recorders.items():
            keep_moments(recorder, leaf, moments(self._tiles(item, hidden), leaf.module.num_groups))
        return own_forward(leaf.module, hidden)

    def attention(self, leaf: LeafModule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One scaled-dot-product attention of all pictures."""
        for item, recorder in self._recorders.items():
            keep_attended(recorder, leaf, self._cells(leaf, key[item]), self._cells(leaf, value[item]))
        by_head = [part.transpose(1, 2) for part in (query, key, value)]
        return F.scaled_dot_product_attention(by_head[0], by_head[1], by_head[2]).transpose(1, 2)

    def _tiles(self, item: int, hidden: Tensor) -> Tensor:
        """(tiles, side, side, channels) of one of (items, channels, height, width)."""
        return cut(hidden[item : item + 1].permute(0, 2, 3, 1), self._grid)[0]

    def _cells(self, leaf: LeafModule, keys: Tensor) -> Tensor:
        """(tiles, cells, heads, head_dim) of one picture's (cells, heads, head_dim)."""
        rows, columns = self._grid
        of_map = keys.reshape(1, rows * leaf.side, columns * leaf.side, -1)
        return cut(of_map, self._grid)[0].reshape(rows * columns, leaf.cells, *keys.shape[1:])
