"""Flux.2, Klein and Klein-KV: `Flux2Transformer2DModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional

from giornata.packed.forward import AttentionSite, TokenStream
from giornata.packed.packing import Rotary
from giornata.wire.models import BlockSpec
from giornata_denoiser.families.driven.forward import JointAttention, ParallelAttention, by_head
from giornata_denoiser.families.driven.network import DrivenNetwork, Prefix, multiplications, numbered, spec
from giornata_denoiser.families.network import (
    TRAIN_TIMESTEPS,
    Grid,
    ReferencePolicy,
    cell_positions,
    reference_tokens,
)
from giornata_denoiser.families.sampling import shifted_by_steps
from giornata_denoiser.rows.row import Prompt

APART: Final = 10
"""How far pictures lie from each other on the first axis of positions: the one that is denoised at 0, then the clean
ones."""


class Flux2(DrivenNetwork):
    """Blocks of two streams, then of the joint one; all blocks of a kind share their modulation: `Flux2Pipeline`.

    Clean pictures are its companions: the picture itself in every edit, and the request's references.
    """

    kind = Flux2Transformer2DModel
    spacing = staticmethod(shifted_by_steps)
    references = ReferencePolicy()

    def hook(self) -> None:
        """See :class:`DrivenNetwork`."""
        model = self.transformer
        self.pairs, self.singles = model.transformer_blocks, model.single_transformer_blocks
        self.hooks.spread(model, "double_stream_modulation_img", TokenStream.IMAGE)
        self.hooks.spread(model, "double_stream_modulation_txt", TokenStream.TEXT)
        self.hooks.spread(model, "single_stream_modulation", TokenStream.JOINT)
        self.hooks.spread(model.norm_out, "linear", TokenStream.OUTPUT, nn.SiLU())
        for index, block in enumerate(self.pairs):
            block.attn.processor = JointAttention(self.hooks, AttentionSite(index))
        for index, block in enumerate(self.singles, len(self.pairs)):
            block.attn.processor = ParallelAttention(self.hooks, AttentionSite(index), TokenStream.JOINT)

    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """See :class:`DrivenNetwork`."""
        model, joint = self.transformer, isinstance(block.attn.processor, ParallelAttention)
        modulation = model.single_stream_modulation if joint else model.double_stream_modulation_img
        shift, scale, *_ = modulation(hidden[:1, 0]).unsqueeze(1).chunk(3 if joint else 6, dim=-1)
        return ((1 + scale) * (block.norm if joint else block.norm1)(hidden) + shift,)

    def keys_values(self, attn: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of the joint stream project everything by one layer: its rows for keys and values alone are used."""
        if not isinstance(attn.processor, ParallelAttention):
            return super().keys_values(attn, normed)
        layer, rows = attn.to_qkv_mlp_proj, slice(attn.inner_dim, 3 * attn.inner_dim)
        bias = None if layer.bias is None else layer.bias[rows]
        both = functional.linear(normed, layer.weight[rows], bias)
        self.low_ranks.add(layer, normed, both, rows)
        key, value = both.chunk(2, dim=-1)
        return by_head(attn, key, attn.norm_k), by_head(attn, value)

    def vectors(self, prompt: Prompt, times: Tensor) -> Tensor:
        """See :class:`DrivenNetwork`; a transformer that embeds a guidance scale adds it to each time."""
        model, guidance = self.transformer, None
        if model.config.guidance_embeds:
            guidance = torch.full_like(times, prompt.guidance_scale).to(self.dtype) * TRAIN_TIMESTEPS
        scaled = self.fractions(times) * TRAIN_TIMESTEPS
        return self.hooks.vectors(model.time_guidance_embed(scaled, guidance))

    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:
        """Axes: which picture, line, column, text token."""
        text = numbered(text_tokens, self.device, axis=3, axes=4)
        pictures = [self.places(each, nth) for nth, each in enumerate((grid, *beside))]
        turned: Rotary = self.transformer.pos_embed(torch.cat((text, *pictures)))
        return turned

    def places(self, grid: Grid, nth: int) -> Tensor:
        """(cells, 4) int64: positions of a picture's tokens, the `nth` of its sequence."""
        return cell_positions(grid, self.device, before=APART * nth, behind=1)

    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`DrivenNetwork`."""
        model, spread = self.transformer, image[:1, 0]
        of_image, of_text = (
            modulation(spread)
            for modulation in (model.double_stream_modulation_img, model.double_stream_modulation_txt)
        )
        after: tuple[Tensor, Tensor] = block(image, text, of_image, of_text)
        return after

    def single(self, block: Any, joint: Tensor) -> Tensor:
        """See :class:`DrivenNetwork`."""
        after: Tensor = block(joint, None, self.transformer.single_stream_modulation(joint[:1, 0]))
        return after

    def spec(self, block: Any) -> BlockSpec:
        """See :class:`DrivenNetwork`."""
        attn = block.attn
        if isinstance(attn.processor, ParallelAttention):
            return spec(attn, image=multiplications(attn), keys=2.0 * attn.query_dim * attn.inner_dim)
        return super().spec(block)


class Flux2Klein(Flux2):
    """Klein, whose guidance is classifier-free, as in `Flux2KleinInpaintPipeline`.

    Raises:
        ValueError: the transformer embeds a guidance scale.
    """

    def hook(self) -> None:
        """See :class:`DrivenNetwork`."""
        if self.transformer.config.guidance_embeds:
            raise ValueError("a Klein that embeds a guidance scale is not served; Flux2Pipeline's network is")
        super().hook()


class Flux2KleinKV(Flux2Klein):
    """Klein, whose references attend to each other alone: a prefix, and no companions; as in `Flux2KleinKVPipeline`.

    An edit's own picture is its first reference; a generation has those of its request alone.
    """

    def companions(self, grid: Grid, given: Sequence[Grid] = (), *, generated: bool = False) -> int:  # noqa: ARG002 - of others
        """None: references are the prefix."""
        return 0

    def prefix_tokens(self, prompt: Prompt, beside: Sequence[Grid]) -> int:  # noqa: ARG002 - of families whose text is one
        """Return those of all references."""
        return reference_tokens(beside)

    def prefix(
        self,
        prompt: Prompt,  # noqa: ARG002 - of families whose text is one
        conditioning: Mapping[str, Tensor],
        beside: Sequence[Grid],
    ) -> Prefix:
        """The references, each at its place on the first axis."""
        places = [self.places(grid, nth) for nth, grid in enumerate(beside, 1)]
        rotary: Rotary = self.transformer.pos_embed(torch.cat(places))
        clean = self.references.tokens(conditioning)
        if clean is None:
            raise ValueError(f"received no clean latents of references, expected those of {beside}")
        return Prefix(self.image_stream(clean), rotary, self.attend)

    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:  # noqa: ARG002 - a prefix
        """Text and picture: see :class:`Flux2Klein`."""
        return super().rotated(text_tokens, grid, ())
