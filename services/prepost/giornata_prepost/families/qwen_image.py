"""VAE and prompt encoding and VAE decoding of Qwen-Image, its editing checkpoints, and Qwen-Image 2.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import (
    QwenImage21Pipeline,
    QwenImageEditInpaintPipeline,
    QwenImageEditPlusPipeline,
    QwenImageInpaintPipeline,
)
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
    CONDITION_IMAGE_SIZE,
    calculate_dimensions,
)
from PIL import Image

from giornata_prepost.families.pipeline import MODE, SAMPLE, GeneratingImages, PipelineImages, ReferringImages
from giornata_prepost.families.processors import QwenPictureProcessor, QwenTextProcessor
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


class Qwen21Images(GeneratingImages):
    """`QwenImage21Pipeline`, which makes pictures of text. Edits are prepared as `QwenImageInpaintPipeline` does."""

    kind = QwenImage21Pipeline

    @classmethod
    def _loaded(cls, folder: Path) -> dict[str, Any]:
        return {"processor": QwenTextProcessor.of(folder / "processor")}

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


class QwenEditImages(PipelineImages):
    """`QwenImageEditInpaintPipeline`; of a picture as a whole, at full strength, `QwenImageEditPipeline`."""

    kind = QwenImageEditInpaintPipeline
    text_varies_with_picture = True

    @classmethod
    def _loaded(cls, folder: Path) -> dict[str, Any]:
        return {"processor": QwenPictureProcessor.of(folder / "processor")}

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:
        """`prompt_embeds` (text_tokens, dim) of the picture's tokens and the prompt's: there is no padding."""
        if not seen:
            raise ValueError(f"a prompt of Qwen-Image-Edit holds the picture of {size}, and there is none")
        embeds, _ = self.pipeline.encode_prompt(
            prompt, image=Image.fromarray(seen[0]), device=self.text_device
        )
        return {"prompt_embeds": embeds[0]}

    def _picture_mode(self, strength: float, *, whole: bool) -> str:
        """Of a whole picture at full strength, the pipeline takes the mode of the posterior."""
        return MODE if whole and strength >= 1 else SAMPLE


class QwenEditPlusImages(QwenEditImages, ReferringImages):
    """`QwenImageEditPlusPipeline`, which has the same components; it paints no mask: steps are blended."""

    def __init__(self, folder: Path, *more: Any) -> None:
        super().__init__(folder, *more)
        self._plus = QwenImageEditPlusPipeline(**self.pipeline.components)

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:
        """`prompt_embeds` (text_tokens, dim) of each picture's number and tokens, then the prompt's."""
        if not seen:
            raise ValueError(f"a prompt of Qwen-Image-Edit holds the picture of {size}, and there is none")
        pictures = [self._resized(Image.fromarray(picture)) for picture in seen]
        embeds, _ = self._plus.encode_prompt(prompt, image=pictures, device=self.text_device)
        return {"prompt_embeds": embeds[0]}

    def _resized(self, picture: Image.Image) -> Image.Image:
        """A picture at the size at which the text encoder sees it; a strip has one patch of 32 pixels at least."""
        sides = calculate_dimensions(CONDITION_IMAGE_SIZE, picture.width / picture.height)
        width, height = (max(32, side) for side in sides)
        resized: Image.Image = self._plus.image_processor.resize(picture, height, width)
        return resized

    def _picture_mode(self, strength: float, *, whole: bool) -> str:  # noqa: ARG002 - protocol
        """The pipeline takes the modes of its pictures' posteriors."""
        return MODE
