"""VAE and prompt encoding and VAE decoding of Qwen-Image 2.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import QwenImage21Pipeline

from giornata_prepost.families.pipeline import MODE, GeneratingImages
from giornata_prepost.families.protocol import SeenPictures, Tensors
from giornata_prepost.families.qwen_image_21.processor import TextProcessor
from giornata_prepost.images.geometry import Size


class Qwen21Images(GeneratingImages):
    """`QwenImage21Pipeline`, which makes pictures of text. Edits are prepared as `QwenImageInpaintPipeline` does."""

    kind = QwenImage21Pipeline

    @classmethod
    def _loaded(cls, folder: Path) -> dict[str, Any]:
        return {"processor": TextProcessor.of(folder / "processor")}

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - protocol
        """`prompt_embeds` (text_tokens, dim) of the prompt's own tokens: there is no padding."""
        embeds, _, _ = self.pipeline.encode_prompt(prompt, device=self.text_device)
        return {"prompt_embeds": embeds[0]}

    def _picture_mode(self, strength: float, *, whole: bool) -> str:  # noqa: ARG002 - protocol
        """The pipeline takes the modes of its pictures' posteriors."""
        return MODE

    def text_tokens(self, text: Tensors) -> int:  # noqa: ARG002 - protocol
        """None: all text is the prefix."""
        return 0

    def prefix_tokens(self, text: Tensors, clean: int) -> int:  # noqa: ARG002 - protocol
        """All text."""
        return text["prompt_embeds"].shape[0]
