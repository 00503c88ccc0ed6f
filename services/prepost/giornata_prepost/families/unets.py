"""What the pipelines of Stable Diffusion and of Stable Diffusion XL add to a row, with UNets of 4 and of 9 channels.

A token is a tile: `token_latents` latent pixels a side.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch

from giornata_prepost.families.controls import ControlledImages
from giornata_prepost.families.pipeline import MODE, SAMPLE, GeneratingImages
from giornata_prepost.families.protocol import Condition, Tensors, tokens_of


class TiledImages(ControlledImages):
    """Pictures for a UNet: text is attended to, and passes no block. ControlNets see pixels."""

    control_pixels = True

    def chunks(self, prompt: str) -> list[torch.Tensor] | None:
        """A prompt that is longer than its encoders, as token ids for each of them: (chunks, encoder's length).

        Each chunk begins and ends as a whole prompt does, and is encoded by itself, as A1111 and Compel do. None where
        one chunk is enough: then the pipeline's own encoding is that.
        """
        tokenizers = [
            one
            for name in ("tokenizer", "tokenizer_2")
            if (one := getattr(self.pipeline, name, None)) is not None
        ]
        ids = [tokens_of(one, prompt)[: self.card.max_prompt_tokens] for one in tokenizers]
        room = tokenizers[0].model_max_length - 2
        count = ceil(max(map(len, ids)) / room)
        if count <= 1:
            return None
        return [
            torch.tensor(
                [_framed(one, each[n * room : (n + 1) * room]) for n in range(count)], device=self.text_device
            )
            for one, each in zip(tokenizers, ids, strict=True)
        ]

    def text_tokens(self, text: Tensors) -> int:  # noqa: ARG002 - protocol
        """None."""
        return 0


class BlendedUNet(TiledImages, GeneratingImages):
    """A UNet of 4 channels, whose inpainting pipeline blends; it generates, too.

    Adds `mask` (tokens, token_latents ** 2 * latent_channels).
    """

    draws_unread = True


class MaskedUNet(TiledImages):
    """A UNet of 9 channels: mask and masked picture are inputs.

    Adds `mask` (tokens, token_latents ** 2) and `masked_image_latents` (tokens, token_latents ** 2 * latent_channels).
    At full strength the pipeline does not encode the picture: `image_latents`, which are then read for
    templates alone, are the mode.
    """

    def _picture_mode(self, strength: float, *, whole: bool) -> str:  # noqa: ARG002 - protocol
        return MODE if strength == 1.0 else SAMPLE

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, *, modes: bool) -> Condition:
        posterior = self._posterior(picture * (holes < 0.5))
        mask = self._pack(self._mask(holes))

        def condition(generator: torch.Generator) -> Tensors:
            masked = self._pack(self._latents(posterior, generator, SAMPLE))
            return {"mask": mask, "masked_image_latents": self._with_modes(masked, posterior, modes=modes)}

        return condition


def _framed(tokenizer: Any, ids: list[int]) -> list[int]:
    """A chunk as CLIP's pipelines tokenize a prompt: between start and end, padded to the encoder's length."""
    ids = [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
    return ids + [tokenizer.pad_token_id] * (tokenizer.model_max_length - len(ids))
