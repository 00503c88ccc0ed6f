"""Qwen-Image and Qwen-Image-Edit: `QwenImageTransformer2DModel`, as in their pipelines for inpainting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from giornata.packed.region import Rotary
from giornata.wire.blocks import BlockSpec
from giornata_denoiser.families.driven.attention import JointAttention
from giornata_denoiser.families.driven.forward import AttentionSite, TokenStream
from giornata_denoiser.families.driven.network import TRAIN_TIMESTEPS, DrivenNetwork
from giornata_denoiser.families.driven.prompts import DrivenPrompt
from giornata_denoiser.families.driven.specs import multiplications, spec
from giornata_denoiser.families.positions import of_complex
from giornata_denoiser.families.references import Grid, ReferencePolicy


class QwenImage(DrivenNetwork):
    """Blocks of two streams. Padding of the prompt, which diffusers masks, is not computed."""

    def hook(self) -> None:
        """See :class:`DrivenNetwork`.

        Raises:
            ValueError: the transformer takes layers beside the picture.
        """
        config = self.transformer.config
        for option in ("use_additional_t_cond", "use_layer3d_rope"):
            if config.get(option):
                raise ValueError(
                    f"a Qwen-Image transformer with {option} is not served: it makes other pictures"
                )
        self.clean_at_zero = bool(config.get("zero_cond_t"))
        self.pairs = self.transformer.transformer_blocks
        for index, block in enumerate(self.pairs):
            self.hooks.spread(block, "img_mod", TokenStream.IMAGE)
            self.hooks.spread(block, "txt_mod", TokenStream.TEXT)
            block.attn.processor = JointAttention(self.hooks, AttentionSite(index))
        self.hooks.spread(self.transformer.norm_out, "linear", TokenStream.OUTPUT, nn.SiLU())

    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """See :class:`DrivenNetwork`."""
        shift, scale, *_ = block.img_mod(hidden[:1, 0]).unsqueeze(1).chunk(6, dim=-1)
        return (block.img_norm1(hidden) * (1 + scale) + shift,)

    def vectors(self, prompt: DrivenPrompt, times: Tensor) -> Tensor:  # noqa: ARG002 - protocol
        """See :class:`DrivenNetwork`."""
        fractions = times.to(self.dtype) / TRAIN_TIMESTEPS
        return self.hooks.vectors(self.transformer.time_text_embed(fractions, fractions))

    def text_stream(self, prompt: DrivenPrompt) -> Tensor:
        """See :class:`DrivenNetwork`."""
        text: Tensor = self.transformer.txt_in(self.transformer.txt_norm(prompt.embeds))
        return text

    def image_stream(self, latents: Tensor) -> Tensor:
        """See :class:`DrivenNetwork`."""
        image: Tensor = self.transformer.img_in(latents)
        return image

    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:
        """Text goes on where the longest side of all pictures, counted from their middles, ends."""
        pictures, text = self.transformer.pos_embed(
            [[(1, *each) for each in (grid, *beside)]], max_txt_seq_len=text_tokens, device=self.device
        )
        return of_complex(torch.cat((text, pictures)))

    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`DrivenNetwork`."""
        after: tuple[Tensor, Tensor] = block(image, text, None, image[:1, 0])
        return after

    def guided(self, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
        """Classifier-free guidance at the length that each token's output has with the prompt."""
        combined = super().guided(positive, negative, scale)
        wanted, found = (output.norm(dim=-1, keepdim=True) for output in (positive, combined))
        rescaled: Tensor = combined * (wanted / found)
        return rescaled

    def spec(self, block: Any) -> BlockSpec:
        """See :class:`DrivenNetwork`."""
        attn = block.attn
        keys = multiplications(attn.to_k, attn.to_v)
        return spec(attn, image=keys + multiplications(attn.to_q, attn.to_out, block.img_mlp), keys=keys)


class QwenImageEdit(QwenImage):
    """As in `QwenImageEditInpaintPipeline` and `QwenImageEditPlusPipeline`: clean pictures stand behind it."""

    references = ReferencePolicy()
