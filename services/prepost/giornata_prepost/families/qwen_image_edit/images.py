"""VAE and prompt encoding and VAE decoding of Qwen-Image-Edit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import QwenImageEditInpaintPipeline
from PIL import Image

from giornata_prepost.families.pipeline import PipelineImages
from giornata_prepost.families.protocol import Condition, Tensors, nothing
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

    @torch.no_grad()
    def encode_rows(
        self,
        image: Pixels,
        mask: npt.NDArray[np.uint8],
        seeds: Sequence[int],
        *,
        sampled: bool = True,
        draws: bool = False,
        strength: float = 1.0,
        first: Condition = nothing,
    ) -> Iterator[Tensors]:
        """As the protocol: of a whole picture at full strength, the pipeline takes the mode of the posterior."""
        instruction = strength >= 1 and bool((mask == np.uint8(255)).all())
        return super().encode_rows(
            image,
            mask,
            seeds,
            sampled=sampled and not instruction,
            draws=draws,
            strength=strength,
            first=first,
        )
