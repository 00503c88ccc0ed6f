"""Flux.2 Klein: `Flux2Transformer2DModel`, as in `Flux2KleinInpaintPipeline`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from giornata.packed.region import Rotary
from giornata.planning.specs import BlockSpec
from giornata_denoiser.families.driven.batch import Grid
from giornata_denoiser.families.driven.forward import Site, Stream
from giornata_denoiser.families.driven.hooks import JointAttention, SelfAttention, by_head
from giornata_denoiser.families.driven.network import TRAIN_TIMESTEPS, DrivenNetwork
from giornata_denoiser.families.driven.positions import cells
from giornata_denoiser.families.driven.prompts import DrivenPrompt
from giornata_denoiser.families.driven.specs import multiplications, spec

REFERENCE: Final = 10
"""Where references lie on the first axis of positions, the picture at 0."""


class Flux2Klein(DrivenNetwork):
    """Blocks of two streams, then of the joint one; all blocks of a kind share their modulation.

    The picture's own clean tokens are its companions: a reference that every edit carries.
    """

    def hook(self) -> None:
        """See :class:`DrivenNetwork`.

        Raises:
            ValueError: the transformer embeds a guidance scale, as Flux.2 dev does.
        """
        model = self.transformer
        if model.config.guidance_embeds:
            raise ValueError("a Flux.2 transformer that embeds a guidance scale is not served; Klein is")
        self.pairs, self.singles = model.transformer_blocks, model.single_transformer_blocks
        self.hooks.spread(model, "double_stream_modulation_img", Stream.IMAGE)
        self.hooks.spread(model, "double_stream_modulation_txt", Stream.TEXT)
        self.hooks.spread(model, "single_stream_modulation", Stream.JOINT)
        self.hooks.spread(model.norm_out, "linear", Stream.OUTPUT, nn.SiLU())
        for index, block in enumerate(self.pairs):
            block.attn.processor = JointAttention(self.hooks, Site(index))
        for index, block in enumerate(self.singles, len(self.pairs)):
            block.attn.processor = ParallelAttention(self.hooks, Site(index), Stream.JOINT)

    def vectors(self, prompt: DrivenPrompt, times: Tensor) -> Tensor:  # noqa: ARG002 - protocol
        """See :class:`DrivenNetwork`."""
        scaled = times.to(self.dtype) / TRAIN_TIMESTEPS * TRAIN_TIMESTEPS
        return self.hooks.vectors(self.transformer.time_guidance_embed(scaled, None))

    def companions(self, grid: Grid) -> int:
        """The picture's own clean tokens."""
        return grid[0] * grid[1]

    def companion_stream(self, count: int, conditioning: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 - protocol
        """See :class:`DrivenNetwork`."""
        return self.image_stream(conditioning["image_latents"])

    def rotated(self, text_tokens: int, grid: Grid) -> Rotary:
        """Axes: which picture, line, column, text token."""
        text = functional.pad(torch.arange(text_tokens, device=self.device)[:, None], (3, 0))
        picture = functional.pad(cells(grid, self.device), (1, 1))
        reference = picture + torch.tensor([REFERENCE, 0, 0, 0], device=self.device)
        turned: Rotary = self.transformer.pos_embed(torch.cat((text, picture, reference)))
        return turned

    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`DrivenNetwork`."""
        model, any_time = self.transformer, image[:1, 0]
        of_image = model.double_stream_modulation_img(any_time)
        after: tuple[Tensor, Tensor] = block(
            image, text, of_image, model.double_stream_modulation_txt(any_time)
        )
        return after

    def single(self, block: Any, joint: Tensor) -> Tensor:
        """See :class:`DrivenNetwork`."""
        after: Tensor = block(joint, None, self.transformer.single_stream_modulation(joint[:1, 0]))
        return after

    def spec(self, block: Any) -> BlockSpec:
        """See :class:`DrivenNetwork`."""
        attn = block.attn
        if isinstance(attn.processor, ParallelAttention):
            return spec(attn, token=multiplications(attn), keys=2.0 * attn.query_dim * attn.inner_dim)
        keys = multiplications(attn.to_k, attn.to_v)
        return spec(attn, token=keys + multiplications(attn.to_q, attn.to_out, block.ff), keys=keys)


class ParallelAttention(SelfAttention):
    """Attention beside a feed-forward, whose projections are one layer."""

    def __call__(  # type: ignore[override]  # noqa: D102 - as diffusers', without a second stream
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: None = None,  # noqa: ARG002 - of diffusers' modules; nothing is padded
        image_rotary_emb: None = None,  # noqa: ARG002 - of diffusers' blocks; positions are the forward's
    ) -> Tensor:
        sizes = [*[attn.inner_dim] * 3, attn.mlp_hidden_dim * attn.mlp_mult_factor]
        *heads, mlp = attn.to_qkv_mlp_proj(hidden_states).split(sizes, dim=-1)
        query, key, value = (by_head(attn, part) for part in heads)
        attended = self.attended(attn.norm_q(query), attn.norm_k(key), value)
        out: Tensor = attn.to_out(torch.cat((attended, attn.mlp_act_fn(mlp)), dim=-1))
        return out
