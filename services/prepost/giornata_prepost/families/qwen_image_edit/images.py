"""VAE and prompt encoding and VAE decoding of Qwen-Image-Edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import QwenImageEditInpaintPipeline
from PIL import Image

from giornata_prepost.families.pipeline import MODE, SAMPLE, PipelineImages
from giornata_prepost.families.protocol import Tensors
from giornata_prepost.families.qwen_image_edit.processor import PictureProcessor
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels


class QwenEditImages(PipelineImages):
    """`QwenImageEditInpaintPipeline`; of a picture as a whole, at full strength, `QwenImageEditPipeline`."""

    kind = QwenImageEditInpaintPipeline
    text_varies_with_picture = True

    @classmethod
    def _loaded(cls, folder: Path) -> dict[str, Any]:
        return {"processor": PictureProcessor.of(folder / "processor")}

    def _prompt(self, prompt: str, size: Size, seen: Pixels | None) -> Tensors:
        """`prompt_embeds` (text_tokens, dim) of the picture's tokens and the prompt's: there is no padding."""
        if seen is None:
            raise ValueError(f"a prompt of Qwen-Image-Edit holds the picture of {size}, and there is none")
        embeds, _ = self.pipeline.encode_prompt(prompt, image=Image.fromarray(seen), device=self.device)
        return {"prompt_embeds": embeds[0]}

    def _picture_mode(self, strength: float, *, whole: bool) -> str:
        """Of a whole picture at full strength, the pipeline takes the mode of the posterior."""
        return MODE if whole and strength >= 1 else SAMPLE
