"""VAE and prompt encoding and VAE decoding of Qwen-Image."""

from __future__ import annotations

from diffusers import QwenImageInpaintPipeline

from giornata_prepost.families.pipeline import GeneratingImages
from giornata_prepost.families.protocol import SeenPictures, Tensors
from giornata_prepost.images.geometry import Size


class QwenImages(GeneratingImages):
    """`QwenImageInpaintPipeline`."""

    kind = QwenImageInpaintPipeline

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - protocol
        """`prompt_embeds` (text_tokens, dim) of the prompt's own tokens: there is no padding."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt, device=self.text_device, max_sequence_length=self.card.max_text_tokens
        )
        return {"prompt_embeds": embeds[0]}
