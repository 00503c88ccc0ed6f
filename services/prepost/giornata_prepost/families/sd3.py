"""VAE and prompt encoding and VAE decoding of Stable Diffusion 3 and 3.5, with and without their T5 encoder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3InpaintPipeline

from giornata.wire.adapters import ControlInput
from giornata_prepost.families.controls import ControlledImages
from giornata_prepost.families.pipeline import GeneratingImages
from giornata_prepost.families.protocol import SeenPictures, Tensors
from giornata_prepost.images.geometry import Size


class SD3Images(GeneratingImages, ControlledImages):
    """`StableDiffusion3InpaintPipeline`, decoded as `StableDiffusion3Pipeline` does.

    The one that inpaints subtracts the autoencoder's shift when it encodes, and forgets it when it decodes.

    Pipelines with ControlNets draw control images from torch's own generator, and with guidance each half another
    sample. Here a generator with the row's seed draws one for both.
    """

    kind = StableDiffusion3InpaintPipeline
    left_out = ("transformer", "feature_extractor", "image_encoder")
    control_inputs = frozenset({ControlInput.USUAL, ControlInput.UNSHIFTED, ControlInput.MASKED})

    def __init__(self, folder: Path, *more: Any) -> None:
        super().__init__(folder, *more)
        if (
            self.pipeline.text_encoder_3 is None
        ):  # the pipeline puts zeros in its place, as wide as the network says
            config = SD3Transformer2DModel.load_config(folder, subfolder="transformer", local_files_only=True)
            self.pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**config))

    @classmethod
    def _left_out(cls, folder: Path) -> tuple[str, ...]:
        """The T5 encoder too, where there is none."""
        absent = [name for name in ("text_encoder_3", "tokenizer_3") if not (folder / name).is_dir()]
        return (*cls.left_out, *absent)

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - protocol
        """`prompt_embeds` (text_tokens, joint_dim), CLIP's before T5's, and `pooled_prompt_embeds` (pooled_dim,)."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompt,
            prompt_2=None,
            prompt_3=None,
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.card.max_text_tokens - self.pipeline.tokenizer_max_length,
        )
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def _control_generator(self, generator: torch.Generator) -> torch.Generator:
        """Another one with the row's seed: what the row draws is the same with and without control images."""
        return torch.Generator("cpu").manual_seed(generator.initial_seed())
