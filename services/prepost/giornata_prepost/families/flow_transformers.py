"""Families of flow matching: Flux, Flux.2, Chroma, Stable Diffusion 3, Z-Image, and all of Qwen-Image."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import diffusers
import torch
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch.nn.functional import interpolate, pixel_shuffle, pixel_unshuffle

from giornata.families import when_called
from giornata.tensors import PROMPT_MASK
from giornata.wire.adapters import ControlInput
from giornata_prepost.families.pipeline import MODE, SAMPLE, Condition, ImageModel, SeenPictures, Tensors
from giornata_prepost.images.pictures import Size

# They import much of transformers.
pixtral_processor: Final = when_called(
    "giornata_prepost.families.processors:PixtralTextProcessor.from_pretrained"
)
qwen_text_processor: Final = when_called("giornata_prepost.families.processors:QwenTextProcessor.of")
qwen_picture_processor: Final = when_called("giornata_prepost.families.processors:QwenPictureProcessor.of")


class FluxImages(ImageModel):
    """The image side that all kinds of Flux share. Control images are as in `FluxControlNetInpaintPipeline`."""

    control_inputs = frozenset({ControlInput.USUAL, ControlInput.PIXELS})
    prompt_options: ClassVar = {"prompt_2": None}

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - one signature
        """`prompt_embeds` (text_tokens, joint_dim), `pooled_prompt_embeds` (pooled_dim,) and the prompt's mask.

        The mask, :data:`giornata.tensors.PROMPT_MASK`, is (text_tokens,) uint8: the attention mask of what the
        pipeline's `encode_prompt` tokenizes.
        """
        embeds, pooled, _ = self._encoded_prompt(prompt)
        tokenized = self.pipeline.tokenizer_2(
            prompt,
            padding="max_length",
            max_length=self.card.max_text_tokens,
            truncation=True,
            return_tensors="pt",
        )
        mask = tokenized.attention_mask[0].to(torch.uint8)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0], PROMPT_MASK: mask}


class FluxInpaintImages(FluxImages):
    """`FluxInpaintPipeline`: adds `mask` (tokens, 4 * latent_channels), one value a latent pixel, repeated.

    The pipeline encodes the masked picture too, which no step reads. It generates as `FluxPipeline`.
    """

    kind = "FluxInpaintPipeline"
    draws_unread = True


class FluxKontextImages(FluxInpaintImages):
    """`FluxKontextInpaintPipeline`. Of a picture as a whole, at full strength, that is `FluxKontextPipeline`."""

    kind = "FluxKontextInpaintPipeline"
    picture_mode = MODE


class FluxFillImages(FluxImages):
    """`FluxFillPipeline`: adds `masked_image_latents` (tokens, 4 * latent_channels) and the mask in pixels.

    `mask` is (tokens, 4 * vae_scale_factor ** 2).
    """

    kind = "FluxFillPipeline"

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, *, modes: bool) -> Condition:
        """A posterior sample of the masked picture."""
        posterior = self._posterior(picture * (1 - holes))
        pixels = pixel_unshuffle(holes, self.card.vae_scale_factor)
        mask = self._pack(pixels.to(self.device, self.dtype))

        def condition(generator: torch.Generator) -> Tensors:
            masked = self._pack(self._latents(posterior, generator, SAMPLE))
            return {"masked_image_latents": self._with_modes(masked, posterior, modes=modes), "mask": mask}

        return condition


class ChromaImages(ImageModel):
    """`ChromaInpaintPipeline`, with padding masked.

    The pipeline gives its mask as numbers, which attention adds to its scores: padding is dimmed there, not masked.
    """

    kind = "ChromaInpaintPipeline"
    left_out = ("transformer", "feature_extractor", "image_encoder")
    prompt_options: ClassVar = {"do_classifier_free_guidance": False}

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - one signature
        """`prompt_embeds` (text_tokens, dim): the prompt's own tokens, and one of padding that attends."""
        embeds, _, mask, *_ = self._encoded_prompt(prompt)
        return {"prompt_embeds": embeds[0][mask[0] > 0]}


class ZImageImages(ImageModel):
    """`ZImageInpaintPipeline`: `prompt_embeds` are the prompt's own tokens, which the network pads with learnt ones."""

    kind = "ZImageInpaintPipeline"
    prompt_options: ClassVar = {"do_classifier_free_guidance": False}


class SD3Images(ImageModel):
    """`StableDiffusion3InpaintPipeline`, decoded as `StableDiffusion3Pipeline` does, with and without T5.

    The one that inpaints subtracts the autoencoder's shift when it encodes, and forgets it when it decodes.

    Pipelines with ControlNets draw control images from torch's own generator, and with guidance each half another
    sample. Here a generator with the row's seed draws one for both.
    """

    kind = "StableDiffusion3InpaintPipeline"
    left_out = ("transformer", "feature_extractor", "image_encoder")
    control_inputs = frozenset({ControlInput.USUAL, ControlInput.UNSHIFTED, ControlInput.MASKED})

    def __init__(self, folder: Path, *more: Any) -> None:
        super().__init__(folder, *more)
        # the pipeline puts zeros in the place of a missing T5, as wide as the network says
        if self.pipeline.text_encoder_3 is None:
            network = diffusers.SD3Transformer2DModel
            config = network.load_config(folder, subfolder="transformer", local_files_only=True)
            self.pipeline.transformer = SimpleNamespace(config=SimpleNamespace(**config))

    @classmethod
    def _left_out(cls, folder: Path) -> tuple[str, ...]:
        """The T5 encoder too, where there is none."""
        absent = [name for name in ("text_encoder_3", "tokenizer_3") if not (folder / name).is_dir()]
        return (*cls.left_out, *absent)

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:  # noqa: ARG002 - one signature
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


class KleinImages(ImageModel):
    """`Flux2KleinInpaintPipeline`: adds `mask` (tokens, 4 * latent_channels), one value a token, repeated.

    `prompt_embeds` are (text_tokens, 3 * dim): three layers side by side, and padding, which attends too.
    """

    kind = "Flux2KleinInpaintPipeline"
    picture_mode = MODE

    def _noise(self, image_latents: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Drawn by patches, (1, 4 * latent_channels, h / 2, w / 2)."""
        _, channels, height, width = image_latents.shape
        side = self.card.token_latents
        shape = (1, channels * side**2, height // side, width // side)
        drawn = randn_tensor(shape, generator=generator, device=self.device, dtype=self.dtype)
        return pixel_shuffle(drawn, side)

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, *, modes: bool) -> Condition:  # noqa: ARG002 - one signature
        """The mask is resized to tokens bilinearly, so a token may be edited in part."""
        multiple = self.card.pixel_multiple
        grid = [side // multiple for side in holes.shape[-2:]]
        mask = interpolate(holes, size=grid, mode="bilinear").to(self.device, self.dtype)
        channels = self.card.latent_channels * self.card.token_latents**2
        repeated = mask.view(-1, 1).expand(-1, channels)
        return lambda _generator: {"mask": repeated}


class KleinKVImages(KleinImages):
    """`Flux2KleinKVPipeline`: the same components, which encode and draw alike."""

    def prefix_tokens(self, text: Tensors, clean: int) -> int:  # noqa: ARG002 - one signature
        """The references: an edit's picture is one, too."""
        return clean


class Flux2Images(KleinImages):
    """`Flux2Pipeline`, which paints no mask: edits are prepared as `Flux2KleinInpaintPipeline` does."""

    kind = "Flux2Pipeline"
    left_out = ("transformer", "tokenizer")

    def __init__(self, folder: Path, *more: Any) -> None:
        super().__init__(folder, *more)
        # diffusers compares a tokenizer that it is given with Pixtral's own, which needs torchvision
        self.pipeline.tokenizer = pixtral_processor(str(folder / "tokenizer"), local_files_only=True)


class QwenImages(ImageModel):
    """`QwenImageInpaintPipeline`. Prompts of Qwen-Image have no padding."""

    kind = "QwenImageInpaintPipeline"


class Qwen21Images(ImageModel):
    """`QwenImage21Pipeline`, which makes pictures of text. Edits are prepared as `QwenImageInpaintPipeline` does."""

    kind = "QwenImage21Pipeline"
    picture_mode = MODE

    @classmethod
    def _loaded(cls, folder: Path) -> dict[str, Any]:
        return {"processor": qwen_text_processor(folder / "processor")}

    def _encoded_prompt(self, prompt: str) -> tuple[Any, ...]:
        encoded: tuple[Any, ...] = self.pipeline.encode_prompt(prompt, device=self.text_device)
        return encoded

    def text_tokens(self, text: Tensors) -> int:  # noqa: ARG002 - one signature
        """None: all text is the prefix."""
        return 0

    def prefix_tokens(self, text: Tensors, clean: int) -> int:  # noqa: ARG002 - one signature
        """All text."""
        return text["prompt_embeds"].shape[0]


class QwenEditImages(ImageModel):
    """`QwenImageEditInpaintPipeline`; of a picture as a whole, at full strength, `QwenImageEditPipeline`."""

    kind = "QwenImageEditInpaintPipeline"
    text_varies_with_picture = True

    @classmethod
    def _loaded(cls, folder: Path) -> dict[str, Any]:
        return {"processor": qwen_picture_processor(folder / "processor")}

    def _prompt(self, prompt: str, size: Size, seen: SeenPictures) -> Tensors:
        """`prompt_embeds` (text_tokens, dim) of the pictures' tokens and the prompt's."""
        if not seen:
            raise ValueError(f"a prompt of Qwen-Image-Edit holds the picture of {size}, and there is none")
        embeds, _ = self._encoded_beside(prompt, [Image.fromarray(picture) for picture in seen])
        return {"prompt_embeds": embeds[0]}

    def _encoded_beside(self, prompt: str, pictures: list[Image.Image]) -> Any:
        """What the pipeline makes of a prompt and of the picture that is edited."""
        return self.pipeline.encode_prompt(prompt, image=pictures[0], device=self.text_device)

    def _mode(self, strength: float, *, whole: bool) -> str:
        """Of a whole picture at full strength, the pipeline takes the mode of the posterior."""
        return MODE if whole and strength >= 1 else SAMPLE


class QwenEditPlusImages(QwenEditImages):
    """`QwenImageEditPlusPipeline`, which has the same components; it paints no mask: steps are blended."""

    def __init__(self, folder: Path, *more: Any) -> None:
        super().__init__(folder, *more)
        self._plus = diffusers.QwenImageEditPlusPipeline(**self.pipeline.components)

    def _encoded_beside(self, prompt: str, pictures: list[Image.Image]) -> Any:
        """What the pipeline makes of each picture's number and tokens, then of the prompt's."""
        shown = [self._resized(picture) for picture in pictures]
        return self._plus.encode_prompt(prompt, image=shown, device=self.text_device)

    def _resized(self, picture: Image.Image) -> Image.Image:
        """A picture at the size at which the text encoder sees it; a strip has one patch of 32 pixels at least."""
        module = diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus
        sides = module.calculate_dimensions(module.CONDITION_IMAGE_SIZE, picture.width / picture.height)
        width, height = (max(32, side) for side in sides)
        resized: Image.Image = self._plus.image_processor.resize(picture, height, width)
        return resized

    def _mode(self, strength: float, *, whole: bool) -> str:  # noqa: ARG002 - one signature
        """The pipeline takes the modes of its pictures' posteriors."""
        return MODE
