"""The network of UNet checkpoints, `UNet2DConditionModel`, over rows that differ in everything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_unshuffle

from giornata.control.networks import ControlText, skip_channels
from giornata.packed import attention, elementwise
from giornata.packed.block_inputs import ActivationRecorder, BlockInputs, CachedTokens, KVSource, Residuals
from giornata.packed.low_rank import BatchLoras, LowRankHooks, SequenceLoras
from giornata.packed.packing import UNTRACED, LaneTracer, maps_to_tiles, tiles_to_maps
from giornata.wire.adapters import ControlKind
from giornata.wire.controlnets import ControlBase
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata_denoiser.families import protocol
from giornata_denoiser.families.protocol import NONE, Grid, ReferencePolicy, SequenceInputs
from giornata_denoiser.families.unet.passes import MapPass, UnetHooks, maps_joined, tiles_joined
from giornata_denoiser.families.unet.prompts import (
    TIME_IDS,
    PreparedPrompt,
    UnetPrompt,
    UnetPromptBuilder,
    prepare_prompt,
)
from giornata_denoiser.families.unet.structure import structure
from giornata_denoiser.families.unet.tiles import CachedTiles, TilePass
from giornata_denoiser.families.unet.tiling import Tiling
from giornata_denoiser.rows.row import Prompt


@dataclass(frozen=True, eq=False)
class UnetBatch:
    """The sequences of a batch, and the tilings of those among them that have been computed as tiles."""

    sequences: tuple[SequenceInputs, ...]
    device: torch.device
    _tilings: dict[tuple[int, ...], Tiling] = field(default_factory=dict, init=False)
    _taken: list[tuple[tuple[BlockInputs, ...], CachedTiles]] = field(default_factory=list, init=False)
    """What the last step took, and under which uses, if it stays."""

    @cached_property
    def tokens(self) -> list[int]:
        """Tiles of each sequence's picture."""
        return [sequence.grid[0] * sequence.grid[1] for sequence in self.sequences]

    def tiling(self, of: tuple[int, ...]) -> Tiling:
        """The tiling of these sequences; kept with the batch."""
        if of not in self._tilings:
            chosen = [self.sequences[index] for index in of]
            grids, regions = (tuple(part) for part in zip(*((s.grid, s.region) for s in chosen), strict=True))
            self._tilings[of] = Tiling(grids, regions, self.device)
        return self._tilings[of]

    def taken(self, uses: tuple[BlockInputs, ...], sources: Mapping[int, KVSource]) -> CachedTiles:
        """What tiles take from these sources under `uses`: the last step's where these are the same objects."""
        if self._taken and self._taken[0][0] == uses:
            return self._taken[0][1]
        self._taken.clear()
        taken = CachedTiles(dict(enumerate(sources.values())))
        if taken.stays and all(use.recorder is None and use.residuals is None for use in uses):
            self._taken.append((uses, taken))
        return taken

    def prepared(self, sequence: int) -> PreparedPrompt:
        """Return what the network has made of a sequence's prompt."""
        return cast("PreparedPrompt", self.sequences[sequence].prepared)


class TiledUnet(ABC):
    """A UNet over tiles of `side` latent pixels a side.

    A token is a tile: its channels are those of its latent pixels, (channel, y, x) in this order. A sequence that takes
    from a template is computed as the tiles of its region; all others as maps, those of one size together, which is
    faster than all of their tiles. With :meth:`model_input`, `conditioning`, `unmasked` and `blends` of a subclass it
    satisfies :class:`giornata_denoiser.families.protocol.Network`.
    """

    references: ReferencePolicy = NONE

    def __init__(self, unet: Any, side: int) -> None:
        self.unet, self.side = unet, side
        self.device: torch.device = unet.device
        self.dtype: torch.dtype = unet.dtype
        self.in_channels, self.out_channels = int(unet.config.in_channels), int(unet.config.out_channels)
        self._structure = structure(unet, side)
        # Channels last: cells are rows of their channels, which gathers and matrix products read as they are.
        unet.to(memory_format=torch.channels_last)
        apart = [leaf.module for leaf in self._structure.convolutions]
        apart += [resnet.time_emb_proj for resnet in self._structure.resnets]
        self._low_ranks = LowRankHooks(unet, apart)
        self._interior = UnetHooks(unet, self._structure)
        self._gather = elementwise.choose_elementwise(self.device, self.dtype).gather
        self._attend = attention.choose_attention(self.device, self.dtype, self._gather)
        self._cross = attention.choose_cross_attention(self.device, self.dtype)

    def control_base(self, token_pixels: int) -> ControlBase:
        """See :class:`giornata_denoiser.controls.local.ControlledNetwork`."""
        pooled = self.text.tensors.get("pooled_prompt_embeds")
        return ControlBase(
            kind=ControlKind.UNET,
            channels=skip_channels(self.unet, self.side),
            latent_channels=self.out_channels * self.side**2,
            token_pixels=token_pixels,
            text_channels=int(self.unet.config.cross_attention_dim),
            pooled_channels=None if pooled is None else pooled[0],
        )

    @staticmethod
    def control_text(prompt: Prompt) -> ControlText:
        """See :class:`giornata_denoiser.controls.local.ControlledNetwork`."""
        of = cast("UnetPrompt", prompt)
        return ControlText(of.embeds, of.pooled, of.time_ids)

    @cached_property
    def text(self) -> UnetPromptBuilder:
        """CLIP's embeddings; for SDXL the pooled embedding and the sizes of its micro-conditioning, too."""
        config, kept = self.unet.config, self._structure.text_channels
        tensors: dict[str, tuple[int | None, ...]] = {
            "prompt_embeds": (None, int(config.cross_attention_dim))
        }
        if config.addition_embed_type == "text_time":
            sizes = TIME_IDS * int(config.addition_time_embed_dim)
            pooled = int(config.projection_class_embeddings_input_dim) - sizes
            tensors |= {"pooled_prompt_embeds": (pooled,), "add_time_ids": (TIME_IDS,)}
        return UnetPromptBuilder(tensors, kept)

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Convolutions, group norms and transformer blocks; what they keep and compute of a token is that of a tile."""
        return self._structure.specs

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """See :attr:`giornata_denoiser.families.protocol.Network.layers`."""
        return self._low_ranks.layers

    @property
    def prepared_bytes(self) -> int:
        """See :attr:`giornata_denoiser.families.protocol.Network.prepared_bytes`; the text's is the prompt's."""
        return self._structure.modulation_channels * self.dtype.itemsize

    def prepare(
        self,
        prompt: Prompt,
        times: Tensor,
        conditioning: Mapping[str, Tensor],  # noqa: ARG002 - protocol
        beside: Sequence[Grid],  # noqa: ARG002 - likewise
        *,
        low_rank: SequenceLoras | None = None,
    ) -> PreparedPrompt:
        """Return what timesteps and text come to in all blocks."""
        of = cast("UnetPrompt", prompt)
        with self._low_ranks.alone(low_rank):
            return prepare_prompt(self.unet, self._structure, of, times, self._low_ranks)

    def prefix_tokens(self, prompt: Prompt, beside: Sequence[Grid]) -> int:  # noqa: ARG002 - protocol
        """None."""
        return 0

    @property
    @abstractmethod
    def conditioning(self) -> Mapping[str, int]:
        """See :attr:`giornata_denoiser.families.protocol.Network.conditioning`."""

    @abstractmethod
    def model_input(self, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """(tiles, in_channels * side²): what enters the UNet for one sequence's latents, (tiles, channels * side²)."""

    def assemble(self, sequences: Sequence[SequenceInputs]) -> UnetBatch:
        """See :meth:`giornata_denoiser.families.protocol.Network.assemble`."""
        return UnetBatch(tuple(sequences), self.device)

    def predict(
        self,
        batch: object,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        *,
        uses: Sequence[BlockInputs] = (),
        trace: LaneTracer = UNTRACED,
    ) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.predict`.

        Raises:
            ValueError: a sequence takes some blocks from a template and computes others in full.
        """
        if not isinstance(batch, UnetBatch):
            raise TypeError(f"expected a batch of UNets, received {type(batch).__name__}")
        parts = zip(torch.split(latents, batch.tokens), conditioning, strict=True)
        inputs = [
            self.model_input(latent, own).view(len(latent), self.in_channels, self.side, self.side)
            for latent, own in parts
        ]
        sources = {
            index: source
            for index, use in enumerate(uses)
            if use.taken is not None and (source := _source(use.taken))
        }
        recorders = {index: use.recorder for index, use in enumerate(uses) if use.recorder is not None}
        residuals = {index: use.residuals for index, use in enumerate(uses) if use.residuals is not None}
        owners = BatchLoras([use.low_rank for use in uses])
        forward = _UnetForward(batch, inputs, steps, recorders, owners, residuals, trace)
        outputs = self._tiles(forward, sources, batch.taken(tuple(uses), sources)) if sources else {}
        whole: dict[tuple[int, int], list[int]] = {}
        for index, sequence in enumerate(batch.sequences):
            if index not in sources:
                whole.setdefault(sequence.grid, []).append(index)
        for grid, indices in whole.items():
            outputs |= self._maps(forward, grid, indices)
        return torch.cat([outputs[index] for index in range(len(inputs))])

    def guided(self, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
        """Classifier-free guidance: negative + scale * (positive - negative)."""
        return protocol.guide(positive, negative, scale)

    def companions(self, grid: Grid, given: Sequence[Grid] = (), *, generated: bool = False) -> int:  # noqa: ARG002 - protocol
        """None."""
        return 0

    def unpacked(self, latent: Tensor, grid: tuple[int, int]) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.unpacked`."""
        return tiles_to_maps(latent.view(1, len(latent), -1, self.side, self.side), grid)[0]

    def packed(self, pixels: Tensor) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Network.packed`."""
        return pixel_unshuffle(pixels[None], self.side)[0].flatten(1).T

    def _tiles(
        self, forward: _UnetForward, sources: Mapping[int, KVSource], kept: CachedTiles
    ) -> dict[int, Tensor]:
        """(computed, channels) of the sequences that take from these sources."""
        batch, of = forward.batch, tuple(sources)
        tiling = batch.tiling(of)
        regions = [region for region in tiling.regions if region is not None]
        if len(regions) < len(of):
            raise ValueError("a sequence takes from a template and has no region")
        inputs = [forward.inputs[index] for index in of]
        taken = [part.index_select(0, region.computed) for part, region in zip(inputs, regions, strict=True)]
        around = [part.index_select(0, region.outside) for part, region in zip(inputs, regions, strict=True)]
        through = TilePass(
            tiling,
            [batch.prepared(index) for index in of],
            [forward.steps[index] for index in of],
            kept=kept,
            around=dict(enumerate(around)),
            recorders=forward.recording(of),
            attend=self._attend,
            cross=self._cross,
            gather=self._gather,
            low_ranks=self._low_ranks if forward.owners else None,
            trace=forward.trace,
        )
        sample = torch.cat(taken).contiguous(memory_format=torch.channels_last)
        with forward.adapted(self._low_ranks, tiling.tiles.lengths, of):
            out = self._interior.run(through, sample, tiles_joined(forward.residuals, of, tiling))
        out = out.reshape(len(sample), -1)
        return dict(zip(of, torch.split(out, list(tiling.tiles.lengths)), strict=True))

    def _maps(self, forward: _UnetForward, grid: tuple[int, int], of: list[int]) -> dict[int, Tensor]:
        """(computed, channels) of these sequences, whose pictures have one size and are computed whole."""
        batch = forward.batch
        through = MapPass(
            grid,
            [batch.prepared(index) for index in of],
            [forward.steps[index] for index in of],
            forward.recording(of),
            cross=self._cross,
            low_ranks=self._low_ranks,
            trace=forward.trace,
        )
        sample = tiles_to_maps(torch.stack([forward.inputs[index] for index in of]), grid)
        with forward.adapted(self._low_ranks, (1,) * len(of), tuple(of)):
            sample = sample.contiguous(memory_format=torch.channels_last)
            out = self._interior.run(through, sample, maps_joined(forward.residuals, of, grid))
        tiles = maps_to_tiles(out, grid).flatten(2)
        regions = [batch.sequences[index].region for index in of]
        return {
            index: part if region is None else part.index_select(0, region.computed)
            for index, part, region in zip(of, tiles, regions, strict=True)
        }


@dataclass(frozen=True, eq=False)
class _UnetForward:
    """One forward over the sequences of a batch."""

    batch: UnetBatch
    inputs: list[Tensor]
    """(tiles, in_channels, side, side) each: all tiles of a picture."""
    steps: Sequence[int]
    recorders: Mapping[int, ActivationRecorder]
    owners: BatchLoras
    residuals: Mapping[int, Residuals]
    trace: LaneTracer

    def recording(self, of: Sequence[int]) -> dict[int, ActivationRecorder]:
        """The recorders of these sequences, by place among them."""
        return {place: self.recorders[index] for place, index in enumerate(of) if index in self.recorders}

    def adapted(
        self, hooks: LowRankHooks, items: tuple[int, ...], of: tuple[int, ...]
    ) -> AbstractContextManager[None]:
        """Let the LoRAs of the sequences `of` act on their items, so many of each."""
        return hooks.acting((lambda _: self.owners.over(items, of)) if self.owners else None)


def _source(taken: CachedTokens) -> KVSource | None:
    """Return what a sequence takes from; None where every block is computed in full."""
    if taken.modes.count(BlockMode.FULL) == len(taken.modes):
        return None
    if taken.modes.count(BlockMode.KV) < len(taken.modes):
        raise ValueError(f"a UNet takes all of its blocks from a template or none, received {taken.modes}")
    return taken.source
