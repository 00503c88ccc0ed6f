"""VAE and prompt encoding and VAE decoding of Z-Image."""

from __future__ import annotations

from diffusers import ZImageInpaintPipeline

from giornata_prepost.families.pipeline import GeneratingImages
from giornata_prepost.families.protocol import SeenPictures, Tensors
from giornata_prepost.images.geometry import Size


class ZImageImages(GeneratingImages):
    """`ZImageInpaintPipeline`."""

    kind = ZImageInpaintPipeline

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - protocol
        """`prompt_embeds` (text_tokens, dim) of the prompt's own tokens; the network pads with learnt ones."""
        embeds, _ = self.pipeline.encode_prompt(
            prompt,
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.card.max_text_tokens,
        )
        return {"prompt_embeds": embeds[0]}
