"""Z-Image: `ZImageTransformer2DModel`, as in `ZImageInpaintPipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from torch import Tensor

from giornata.packed.forward import AttentionSite, TokenStream
from giornata.packed.packing import Rotary
from giornata.tensors import EMBEDS
from giornata.wire.models import BlockSpec
from giornata_denoiser.families.driven.forward import SelfAttention
from giornata_denoiser.families.driven.network import (
    DrivenNetwork,
    by_channel,
    by_pixel,
    multiplications,
    numbered,
    of_complex,
    spec,
)
from giornata_denoiser.families.network import (
    PATCH,
    TRAIN_TIMESTEPS,
    Grid,
    PromptBuilder,
    cell_positions,
    guide_beyond,
)
from giornata_denoiser.families.sampling import shifted_evenly
from giornata_denoiser.rows.row import Prompt

MULTIPLE: Final = 32
"""Text and pictures are padded to a multiple of so many tokens, with learnt ones that attend."""
PATCHES: Final = "2-1"
"""The name of the layers for patches of 2x2 pixels of one frame."""


class ZImage(DrivenNetwork):
    """Blocks of the picture alone, then of the joint stream; text is refined before, once for all steps."""

    kind = ZImageTransformer2DModel
    spacing = staticmethod(shifted_evenly)

    def hook(self) -> None:
        """See :class:`DrivenNetwork`."""
        model = self.transformer
        self.pairs, self.singles = model.noise_refiner, model.layers
        self._last = model.all_final_layer[PATCHES]
        for index, block in enumerate((*self.pairs, *self.singles)):
            stream = TokenStream.IMAGE if index < len(self.pairs) else TokenStream.JOINT
            self.hooks.spread(block, "adaLN_modulation", stream)
            block.attention.processor = SelfAttention(self.hooks, AttentionSite(index), stream)
        self.hooks.spread(self._last, "adaLN_modulation", TokenStream.OUTPUT)

    @property
    def text(self) -> PromptBuilder:
        """Qwen3's embeddings of the prompt's own tokens."""
        config = self.transformer.config
        return PromptBuilder({EMBEDS: (None, int(config.cap_feat_dim))}, MULTIPLE, min(config.axes_lens[1:]))

    @property
    def out_channels(self) -> int:  # type: ignore[override]  # of the transformer
        """See :class:`DrivenNetwork`."""
        return int(self.transformer.out_channels) * PATCH**2

    def attentions(self, block: Any) -> Sequence[Any]:
        """See :class:`DrivenNetwork`."""
        return (block.attention,)

    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """See :class:`DrivenNetwork`."""
        scale, *_ = block.adaLN_modulation(hidden[:1, 0]).unsqueeze(1).chunk(4, dim=-1)
        return (block.attention_norm1(hidden) * (1 + scale),)

    def vectors(self, prompt: Prompt, times: Tensor) -> Tensor:  # noqa: ARG002 - protocol
        """The transformer is told 1 - sigma."""
        clean = (TRAIN_TIMESTEPS - times) / TRAIN_TIMESTEPS * self.transformer.t_scale
        return self.hooks.vectors(self.transformer.t_embedder(clean).to(self.dtype))

    def text_stream(self, prompt: Prompt) -> Tensor:
        """The blocks that refine text see no timestep."""
        model, spare = self.transformer, prompt.joint_tokens - len(prompt.embeds)
        text = torch.cat((model.cap_embedder(prompt.embeds), model.cap_pad_token.expand(spare, -1)))[None]
        places = numbered(prompt.joint_tokens, self.device, axis=0, axes=3, first=1)
        turns = model.rope_embedder(places)[None]
        for block in model.context_refiner:
            text = block(text, None, turns)
        return text[0]

    def image_stream(self, latents: Tensor) -> Tensor:
        """The channels of a patch come last; a packed latent has them first."""
        image: Tensor = self.transformer.all_x_embedder[PATCHES](by_pixel(latents))
        return image

    def companions(self, grid: Grid, given: Sequence[Grid] = (), *, generated: bool = False) -> int:  # noqa: ARG002 - protocol
        """The picture's padding."""
        return -(grid[0] * grid[1]) % MULTIPLE

    def companion_stream(self, count: int, conditioning: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 - protocol
        """See :class:`DrivenNetwork`."""
        padding: Tensor = self.transformer.x_pad_token.expand(count, -1)
        return padding

    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:  # noqa: ARG002 - it has none
        """The picture lies behind its text; its padding is at the origin."""
        picture = cell_positions(grid, self.device, before=text_tokens + 1)
        padding = picture.new_zeros(self.companions(grid), 3)
        text = numbered(text_tokens, self.device, axis=0, axes=3, first=1)
        return of_complex(self.transformer.rope_embedder(torch.cat((text, picture, padding))))

    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """Text waits."""
        return text, block(image, None, None, image[:1, 0])

    def single(self, block: Any, joint: Tensor) -> Tensor:
        """See :class:`DrivenNetwork`."""
        after: Tensor = block(joint, None, None, joint[:1, 0])
        return after

    def answer(self, image: Tensor) -> Tensor:
        """The velocity points from the picture to noise; the transformer's points to the picture."""
        return -by_channel(self._last(image, image[:1, 0]).flatten(0, 1))

    def guided(self, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
        """Classifier-free guidance as the pipeline counts it: positive + scale * (positive - negative)."""
        return guide_beyond(positive, positive, negative, scale)

    def spec(self, block: Any) -> BlockSpec:
        """See :class:`DrivenNetwork`."""
        attn = block.attention
        return spec(
            attn,
            image=multiplications(attn, block.feed_forward),
            text=0.0 if block in self.pairs else None,
            keys=multiplications(attn.to_k, attn.to_v),
        )
