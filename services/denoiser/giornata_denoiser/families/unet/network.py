"""UNet checkpoints: `UNet2DConditionModel` over rows that differ in everything, for plain and inpainting models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor
from torch.nn.functional import pixel_unshuffle

from giornata.control.networks import skip_channels
from giornata.packed.attention import choose_cross_attention
from giornata.packed.low_rank import BatchLoras, SequenceLoras, Where
from giornata.packed.packing import (
    UNTRACED,
    BlockInputs,
    CachedTokens,
    KVSource,
    LaneTracer,
    maps_to_tiles,
    tiles_to_maps,
)
from giornata.tensors import EMBEDS, POOLED, SIZES
from giornata.wire.adapters import ControlKind
from giornata.wire.controlnets import ControlBase
from giornata.wire.models import BlockSpec
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.families.network import Grid, ModelFamily, Network, PromptBuilder, SequenceInputs
from giornata_denoiser.families.sampling import DiscreteTime, discrete_scheduler_config
from giornata_denoiser.families.unet.passes import (
    MapPass,
    PassInputs,
    PreparedPrompt,
    UnetHooks,
    maps_joined,
    prepare_prompt,
    tiles_joined,
)
from giornata_denoiser.families.unet.structure import Tiling, structure
from giornata_denoiser.families.unet.tiles import CachedTiles, TilePass
from giornata_denoiser.families.weights import open_network
from giornata_denoiser.rows.row import Prompt

SIDE: Final = 8
"""Latent pixels a side of a tile; Stable Diffusion 1 and 2 have four levels."""
SIDE_XL: Final = 4
"""Those of SDXL, which has three."""
TIME_IDS: Final = 6
"""SDXL's micro-conditioning: original size, crop and target size, height before width."""


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


class UnetInpaint(Network):
    """A plain text-to-image UNet, as in `StableDiffusionInpaintPipeline`, over tiles of `side` latent pixels a side.

    A token is a tile: its channels are those of its latent pixels, (channel, y, x) in this order. A sequence that takes
    from a template is computed as the tiles of its region; all others as maps, those of one size together, which is
    faster than all of their tiles.
    """

    kind = UNet2DConditionModel
    shardable = False

    def __init__(self, unet: Any, side: int) -> None:
        self._structure = structure(unet, side)
        # Channels last: cells are rows of their channels, which gathers and matrix products read as they are.
        unet.to(memory_format=torch.channels_last)
        apart = [leaf.module for leaf in self._structure.convolutions]
        super().__init__(unet, [*apart, *(resnet.time_emb_proj for resnet in self._structure.resnets)])
        self.unet, self.side = unet, side
        self.in_channels = int(unet.config.in_channels)
        self.out_channels = int(unet.config.out_channels) * side**2
        self._interior = UnetHooks(unet, self._structure)
        self._cross = choose_cross_attention(self.device, self.dtype)

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantized: WeightQuantization = WeightQuantization.OFF,
    ) -> ModelFamily:
        """The family of a checkpoint, whose input channels tell the kind; raises as :func:`load_flow` of `weights`."""
        if quantized is not WeightQuantization.OFF:
            raise ValueError(
                f"a UNet is not quantised; received {quantized}, accepted {WeightQuantization.OFF}"
            )
        network = network_of(open_network(cls.kind, folder, "unet", dtype=dtype, device=device))
        return ModelFamily(network.text, DiscreteTime(discrete_scheduler_config(folder)), network)

    def control_base(self, token_pixels: int) -> ControlBase:
        """See :class:`giornata_denoiser.controls.local.ControlledNetwork`."""
        pooled = self.text.tensors.get(POOLED)
        return ControlBase(
            kind=ControlKind.UNET,
            channels=skip_channels(self.unet, self.side),
            latent_channels=self.out_channels,
            token_pixels=token_pixels,
            text_channels=int(self.unet.config.cross_attention_dim),
            pooled_channels=None if pooled is None else pooled[0],
        )

    @cached_property
    def text(self) -> PromptBuilder:
        """CLIP's embeddings; for SDXL the pooled embedding and the sizes of its micro-conditioning, too."""
        config = self.unet.config
        tensors: dict[str, tuple[int | None, ...]] = {EMBEDS: (None, int(config.cross_attention_dim))}
        if config.addition_embed_type == "text_time":
            sizes = TIME_IDS * int(config.addition_time_embed_dim)
            pooled = int(config.projection_class_embeddings_input_dim) - sizes
            tensors |= {POOLED: (pooled,), SIZES: (TIME_IDS,)}
        return PromptBuilder(tensors, kept_channels=self._structure.text_channels)

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Convolutions, group norms and transformer blocks; what they keep and compute of a token is that of a tile."""
        return self._structure.specs

    @property
    def prepared_bytes(self) -> int:
        """See :attr:`Network.prepared_bytes`; the text's is the prompt's."""
        return self._structure.modulation_channels * self.dtype.itemsize

    def prepare(
        self,
        prompt: Prompt,
        times: Tensor,
        conditioning: Mapping[str, Tensor],  # noqa: ARG002 - of families that look at pictures
        beside: Sequence[Grid],  # noqa: ARG002 - likewise
        *,
        low_rank: SequenceLoras | None = None,
    ) -> PreparedPrompt:
        """Return what timesteps and text come to in all blocks."""
        with self.low_ranks.alone(low_rank):
            return prepare_prompt(self.unet, self._structure, prompt, times, self.low_ranks)

    def model_input(self, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 - of UnetFill
        """(tiles, in_channels * side²): what enters the UNet for one sequence's latents, (tiles, channels * side²)."""
        return latents

    def assemble(self, sequences: Sequence[SequenceInputs]) -> UnetBatch:
        """See :meth:`Network.assemble`."""
        return UnetBatch(tuple(sequences), self.device)

    def predict(
        self,
        batch: UnetBatch,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        *,
        uses: Sequence[BlockInputs] = (),
        trace: LaneTracer = UNTRACED,
    ) -> Tensor:
        """See :meth:`Network.predict`.

        Raises:
            ValueError: a sequence takes some blocks from a template and computes others in full.
        """
        inputs = [
            self.model_input(latent, own).view(len(latent), self.in_channels, self.side, self.side)
            for latent, own in zip(torch.split(latents, batch.tokens), conditioning, strict=True)
        ]
        prepared = [sequence.prepared for sequence in batch.sequences]
        given = PassInputs(prepared, steps, uses, self._cross, self.low_ranks, trace)
        sources = {
            index: source
            for index, use in enumerate(uses)
            if use.taken is not None and (source := _source(use.taken))
        }
        owners = BatchLoras([use.low_rank for use in uses])
        outputs: dict[int, Tensor] = {}
        if sources:
            kept = batch.taken(tuple(uses), sources)
            outputs = self._tiles(batch, inputs, given, owners, kept, tuple(sources))
        whole: dict[Grid, list[int]] = {}
        for index, sequence in enumerate(batch.sequences):
            if index not in sources:
                whole.setdefault(sequence.grid, []).append(index)
        for grid, indices in whole.items():
            outputs |= self._maps(batch, inputs, given, owners, grid, tuple(indices))
        return torch.cat([outputs[index] for index in range(len(inputs))])

    def unpacked(self, latent: Tensor, grid: Grid) -> Tensor:
        """See :meth:`Network.unpacked`."""
        return tiles_to_maps(latent.view(1, len(latent), -1, self.side, self.side), grid)[0]

    def packed(self, pixels: Tensor) -> Tensor:
        """See :meth:`Network.packed`."""
        return pixel_unshuffle(pixels[None], self.side)[0].flatten(1).T

    def _tiles(  # noqa: PLR0917 - of one forward
        self,
        batch: UnetBatch,
        inputs: Sequence[Tensor],
        given: PassInputs,
        owners: BatchLoras,
        kept: CachedTiles,
        of: tuple[int, ...],
    ) -> dict[int, Tensor]:
        """(computed, channels) of the sequences `of`, which take what is kept; `inputs` are of all tiles."""
        tiling = batch.tiling(of)
        regions = [region for region in tiling.regions if region is not None]
        if len(regions) < len(of):
            raise ValueError("a sequence takes from a template and has no region")
        own = [(inputs[index], region) for index, region in zip(of, regions, strict=True)]
        around = [part.index_select(0, region.outside) for part, region in own]
        through = TilePass(
            given.of(of),
            tiling,
            kept=kept,
            around=around,
            attend=self.attend,
            gather=self.elementwise.gather,
            adapted=bool(owners),
        )
        sample = torch.cat([part.index_select(0, region.computed) for part, region in own])
        sample = sample.contiguous(memory_format=torch.channels_last)
        with self.low_ranks.acting(_where(owners, tiling.tiles.lengths, of)):
            out = self._interior.run(through, sample, tiles_joined(given.uses, of, tiling))
        out = out.reshape(len(sample), -1)
        return dict(zip(of, torch.split(out, list(tiling.tiles.lengths)), strict=True))

    def _maps(  # noqa: PLR0917 - of one forward
        self,
        batch: UnetBatch,
        inputs: Sequence[Tensor],
        given: PassInputs,
        owners: BatchLoras,
        grid: Grid,
        of: tuple[int, ...],
    ) -> dict[int, Tensor]:
        """(computed, channels) of these sequences, whose pictures have one size and are computed whole."""
        sample = tiles_to_maps(torch.stack([inputs[index] for index in of]), grid)
        with self.low_ranks.acting(_where(owners, (1,) * len(of), of)):
            sample = sample.contiguous(memory_format=torch.channels_last)
            out = self._interior.run(MapPass(given.of(of), grid), sample, maps_joined(given.uses, of, grid))
        tiles = maps_to_tiles(out, grid).flatten(2)
        regions = [batch.sequences[index].region for index in of]
        return {
            index: part if region is None else part.index_select(0, region.computed)
            for index, part, region in zip(of, tiles, regions, strict=True)
        }


class UnetFill(UnetInpaint):
    """An inpainting UNet: mask and masked picture are input channels behind the latent's."""

    blends = False

    @property
    def conditioning(self) -> Mapping[str, int]:
        """The mask is one value per latent pixel."""
        pictures = dict.fromkeys(("noise", "image_latents", "masked_image_latents"), self.out_channels)
        return {**pictures, "mask": self.side**2}

    def model_input(self, latents: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Latents, mask, masked picture's latents: the channels' order in diffusers."""
        return torch.cat((latents, conditioning["mask"], conditioning["masked_image_latents"]), dim=1)


def network_of(unet: Any) -> UnetInpaint:
    """The network over a `UNet2DConditionModel`.

    Raises:
        ValueError: the UNet is of a kind that is not served; says what is.
    """
    latent, received = int(unet.config.out_channels), int(unet.config.in_channels)
    kinds = {latent: UnetInpaint, 2 * latent + 1: UnetFill}
    if received not in kinds:
        raise ValueError(f"the UNet has {received} input channels; served are {sorted(kinds)}")
    return kinds[received](unet, SIDE_XL if unet.config.addition_embed_type == "text_time" else SIDE)


def _where(owners: BatchLoras, items: tuple[int, ...], of: tuple[int, ...]) -> Where | None:
    """Return where the LoRAs of the sequences `of` act: on their items, so many of each."""
    return (lambda _: owners.over(items, of)) if owners else None


def _source(taken: CachedTokens) -> KVSource | None:
    """Return what a sequence takes from; None where every block is computed in full."""
    if taken.modes.count(BlockMode.FULL) == len(taken.modes):
        return None
    if taken.modes.count(BlockMode.KV) < len(taken.modes):
        raise ValueError(f"a UNet takes all of its blocks from a template or none, received {taken.modes}")
    return taken.source
