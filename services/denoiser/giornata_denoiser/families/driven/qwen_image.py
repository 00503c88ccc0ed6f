"""Qwen-Image, its editing checkpoints, and Qwen-Image 2.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel
from torch import Tensor, nn
from torch.nn import functional

from giornata.packed.attention import Beside
from giornata.packed.forward import AttentionSite, TokenStream
from giornata.packed.packing import Rotary, Segments
from giornata.tensors import EMBEDS
from giornata.wire.models import FLOW_MATCHING, WITH_LIGHTNING, Sampler
from giornata_denoiser.families.driven.forward import JointAttention, SelfAttention
from giornata_denoiser.families.driven.network import DrivenNetwork, Prefix, of_complex
from giornata_denoiser.families.network import Grid, Network, PromptBuilder, ReferencePolicy
from giornata_denoiser.rows.row import Prompt


class QwenImage(DrivenNetwork):
    """Blocks of two streams. Padding of the prompt, which diffusers masks, is not computed."""

    kind = QwenImageTransformer2DModel
    samplers: ClassVar[Sequence[Sampler]] = WITH_LIGHTNING

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

    def vectors(self, prompt: Prompt, times: Tensor) -> Tensor:  # noqa: ARG002 - of families whose text modulates
        """See :class:`DrivenNetwork`."""
        fractions = self.fractions(times)
        return self.hooks.vectors(self.transformer.time_text_embed(fractions, fractions))

    def text_stream(self, prompt: Prompt) -> Tensor:
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

    def outputs(self, block: Any) -> Sequence[nn.Module]:
        """See :class:`DrivenNetwork`."""
        return (block.attn.to_out, block.img_mlp)


class QwenImageEdit(QwenImage):
    """A family as `QwenImageEditInpaintPipeline` and `QwenImageEditPlusPipeline`: clean pictures stand behind it."""

    references = ReferencePolicy()


# Qwen-Image 2.1: `QwenImage21Transformer2DModel`, as in `QwenImage21Pipeline`.


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Segments,  # noqa: ARG001 - see `Attention`; a prefix is one sequence
    outside: Mapping[int, Beside],  # noqa: ARG001 - likewise: nothing lies outside of it
) -> Tensor:
    """Attention of one sequence's tokens to themselves and those before them; see `giornata.packed.attention`."""
    query, key, value = (each.unsqueeze(0).transpose(1, 2) for each in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2)[0]


class QwenImage21Attention(SelfAttention):
    """Attention of a block whose positions, masks and cache are arguments; here they are the forward's."""

    def __call__(self, attn: Any, hidden_states: Tensor, **_: object) -> Tensor:  # type: ignore[override]  # as diffusers'
        """See :class:`SelfAttention`."""
        return super().__call__(attn, hidden_states)


class QwenImage21(QwenImage):
    """Blocks of the picture alone, which share their modulation. Text is a prefix; a token is one latent pixel."""

    kind = QwenImage21Transformer2DModel
    samplers = FLOW_MATCHING

    def hook(self) -> None:
        """See :class:`DrivenNetwork`.

        Raises:
            ValueError: text is modulated by the noise level, so that it is no prefix, or latents are cut into patches.
        """
        model, config = self.transformer, self.transformer.config
        if not config.causal_condition:
            raise ValueError("a Qwen-Image 2.1 transformer without causal_condition is not served")
        if config.patch_size != 1:
            raise ValueError(f"a Qwen-Image 2.1 transformer has patch_size 1, received {config.patch_size}")
        self.pairs = model.transformer_blocks
        self.hooks.spread(model, "modulation", TokenStream.IMAGE)
        self.hooks.spread(model.norm_out, "linear", TokenStream.OUTPUT, nn.SiLU())
        for index, block in enumerate(self.pairs):
            block.attn.processor = QwenImage21Attention(self.hooks, AttentionSite(index), TokenStream.IMAGE)

    @property
    def text(self) -> PromptBuilder:
        """Qwen3-VL's embeddings of the prompt's own tokens."""
        return PromptBuilder({EMBEDS: (None, int(self.transformer.config.context_in_dim))}, causal=True)

    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """See :class:`DrivenNetwork`."""
        scale, *_ = self.transformer.modulation(hidden[:1, 0]).unsqueeze(1).chunk(4, dim=-1)
        return (block.img_norm1(hidden) * (1 + scale),)

    def text_stream(self, prompt: Prompt) -> Tensor:
        """None: all text is the prefix."""
        return prompt.embeds.new_empty(0, self.transformer.inner_dim)

    def prefix(
        self,
        prompt: Prompt,
        conditioning: Mapping[str, Tensor],  # noqa: ARG002 - protocol
        beside: Sequence[Grid],  # noqa: ARG002 - likewise
    ) -> Prefix:
        """The text, each token of which attends to those before it."""
        tokens = prompt.prefix_tokens
        cosine, sine = self.rotary(tokens, prompt.grid, ())
        return Prefix(
            self.transformer.txt_in(prompt.embeds), (cosine[:tokens], sine[:tokens]), causal_attention
        )

    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:  # noqa: ARG002 - it has none
        """Text goes on along all three axes; the picture lies at the place behind it, counted from its middle."""
        cells = grid[0] * grid[1]
        of_picture = torch.arange(text_tokens + cells) >= text_tokens
        return of_complex(self.transformer.pos_embed([(1, *grid)], of_picture, self.device))

    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """There is no text beside the picture."""
        return text, block(image, self.transformer.modulation(image[:1, 0]))

    def guided(self, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
        """See :class:`Network`: its pipeline keeps no lengths."""
        return Network.guided(self, positive, negative, scale)

    def unpacked(self, latent: Tensor, grid: Grid) -> Tensor:
        """A token is a latent pixel."""
        return latent.T.reshape(-1, *grid)

    def packed(self, pixels: Tensor) -> Tensor:
        """The inverse of :meth:`unpacked`."""
        return pixels.flatten(1).T.contiguous()
