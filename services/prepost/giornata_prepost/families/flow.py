"""VAE and prompt encoding and VAE decoding of Chroma and of Z-Image."""

from __future__ import annotations

from diffusers import ChromaInpaintPipeline, ZImageInpaintPipeline

from giornata_prepost.families.pipeline import GeneratingImages
from giornata_prepost.families.protocol import SeenPictures, Tensors
from giornata_prepost.images.geometry import Size


class ChromaImages(GeneratingImages):
    """`ChromaInpaintPipeline`, with padding masked.

    The pipeline gives its mask as numbers, which attention adds to its scores: padding is dimmed there, not masked.
    """

    kind = ChromaInpaintPipeline
    left_out = ("transformer", "feature_extractor", "image_encoder")

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - protocol
        """`prompt_embeds` (text_tokens, dim): the prompt's own tokens, and one of padding that attends."""
        embeds, _, mask, *_ = self.pipeline.encode_prompt(
            prompt,
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.card.max_text_tokens,
        )
        return {"prompt_embeds": embeds[0][mask[0] > 0]}


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
