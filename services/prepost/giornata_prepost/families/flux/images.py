"""VAE and prompt encoding and VAE decoding, by the checkpoint's diffusers pipeline without transformer.

All random numbers of an edit are drawn here, for each row from a CPU generator with the row's seed, in the order in
which the pipeline draws. So a full computation equals diffusers' own for the same seed. The order is:

1. the posterior sample of the picture, 2. the noise, 3. (Fill) the posterior sample of the masked picture.

A generation has no picture: its noise is drawn first, as `FluxPipeline` does.

An edit that may reuse takes the posteriors' modes instead, which are the same for all edits of a picture. The noise is
then drawn first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from diffusers import FluxFillPipeline, FluxInpaintPipeline
from diffusers.pipelines.flux.pipeline_flux_inpaint import retrieve_latents
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

from giornata.wire.errors import RowPoisoned
from giornata.wire.models import ModelCard
from giornata_prepost.families.protocol import Tensors
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels

Condition = Callable[[torch.Generator], Tensors]
"""Makes what a pipeline adds to a row, batched by one; draws from the row's generator, after the noise."""


class FluxImages:
    """See :class:`giornata_prepost.families.protocol.ImageModel`; tensors are packed as the pipeline packs them."""

    kind: ClassVar[Any]
    """The diffusers pipeline."""

    def __init__(self, folder: Path, card: ModelCard, device: torch.device, dtype: torch.dtype) -> None:
        pipeline = self.kind.from_pretrained(
            folder, transformer=None, dtype=dtype, use_safetensors=True, local_files_only=True
        )
        self.card, self.device, self.dtype = card, device, dtype
        self.pipeline = pipeline.to(device)

    @torch.no_grad()
    def encode_text(self, prompt: str, negative_prompt: str | None = None) -> Tensors:
        """`prompt_embeds` (text_tokens, joint_dim) and `pooled_prompt_embeds` (pooled_dim,).

        With a negative prompt (true classifier-free guidance) also `negative_prompt_embeds` and
        `negative_pooled_prompt_embeds`.
        """
        tensors = self._encode_prompt(prompt, "")
        if negative_prompt is not None:
            tensors |= self._encode_prompt(negative_prompt, "negative_")
        return tensors

    def text_tokens(self, text: Tensors) -> int:
        """The padded length of the prompt."""
        return text["prompt_embeds"].shape[0]

    @torch.no_grad()
    def encode_rows(
        self, image: Pixels, mask: npt.NDArray[np.uint8], seeds: Sequence[int], *, sampled: bool = True
    ) -> Iterator[Tensors]:
        """`noise` and `image_latents` (tokens, 4 * latent_channels), and what the pipeline's condition adds."""
        height, width = mask.shape
        picture = self.pipeline.image_processor.preprocess(Image.fromarray(image), height=height, width=width)
        holes = self.pipeline.mask_processor.preprocess(Image.fromarray(mask), height=height, width=width)
        picture = picture.to(torch.float32)
        config = self.pipeline.vae.config
        how = "sample" if sampled else "argmax"
        posterior = self._posterior(picture)
        condition = self._condition(picture, holes, how)
        for seed in seeds:
            generator = torch.Generator("cpu").manual_seed(seed)
            sample = retrieve_latents(posterior, generator=generator, sample_mode=how)
            image_latents = (sample - config.shift_factor) * config.scaling_factor
            noise = randn_tensor(
                image_latents.shape, generator=generator, device=self.device, dtype=self.dtype
            )
            packed = {"noise": self._pack(noise), "image_latents": self._pack(image_latents)}
            yield {
                name: tensor[0].cpu().contiguous() for name, tensor in (packed | condition(generator)).items()
            }

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, size: Size) -> Pixels:
        """`latents` is (tokens, 4 * latent_channels)."""
        config = self.pipeline.vae.config
        packed = latents[None].to(self.device, self.dtype)
        unpacked = self.pipeline._unpack_latents(  # noqa: SLF001 - the pipeline's own packing
            packed, size.height, size.width, self.pipeline.vae_scale_factor
        )
        scaled = unpacked / config.scaling_factor + config.shift_factor
        picture = self.pipeline.vae.decode(scaled, return_dict=False)[0]
        if not bool(torch.isfinite(picture).all()):
            raise RowPoisoned("The denoised latents do not decode to a picture: values are not finite.")
        return np.asarray(self.pipeline.image_processor.postprocess(picture, output_type="pil")[0])

    @abstractmethod
    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, how: str) -> Condition:
        """What the pipeline adds to every row of a job.

        `picture` is (1, 3, height, width) float32 in -1..1; `holes` is (1, 1, height, width) float32, 1 = edit; `how`
        is the `sample_mode` by which `retrieve_latents` takes latents from a posterior.
        """

    def _encode_prompt(self, prompt: str, prefix: str) -> Tensors:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompt, prompt_2=None, device=self.device, max_sequence_length=self.card.max_text_tokens
        )
        return {f"{prefix}prompt_embeds": embeds[0].cpu(), f"{prefix}pooled_prompt_embeds": pooled[0].cpu()}

    def _posterior(self, picture: torch.Tensor) -> Any:
        """Distribution of the latents of (1, 3, height, width) pixels in -1..1."""
        return self.pipeline.vae.encode(picture.to(self.device, self.dtype))

    def _pack(self, latents: torch.Tensor) -> torch.Tensor:
        """(1, channels, h, w) → (1, tokens, 4 * channels), as the pipeline packs 2x2 patches."""
        batch, channels, height, width = latents.shape
        packed: torch.Tensor = self.pipeline._pack_latents(  # noqa: SLF001 - the pipeline's own packing
            latents, batch, channels, height, width
        )
        return packed

    def _mask_latents(
        self, holes: torch.Tensor, masked: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pipeline's `prepare_mask_latents`, batched by one: packed mask and packed masked picture.

        `masked` is (1, 3, height, width) pixels, or latents of the masked picture that are not yet normalised.
        """
        height, width = holes.shape[-2:]
        mask, masked_latents = self.pipeline.prepare_mask_latents(
            holes, masked, 1, self.card.latent_channels, 1, height, width, self.dtype, self.device, generator
        )
        return mask, masked_latents


class InpaintImages(FluxImages):
    """`FluxInpaintPipeline`: adds `mask` (tokens, 4 * latent_channels), one value a latent pixel, repeated.

    It generates as `FluxPipeline`.
    """

    kind = FluxInpaintPipeline

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, how: str) -> Condition:  # noqa: ARG002 - as Fill
        """The pipeline encodes the masked picture too, which no step reads. Latents of 16 channels spare it that."""
        shape = (1, 16, *(side // self.card.vae_scale_factor for side in holes.shape[-2:]))
        taken_as_encoded = self.card.latent_channels == 16
        unread = torch.zeros(shape) if taken_as_encoded else picture
        mask, _ = self._mask_latents(holes, unread, torch.Generator("cpu"))
        return lambda _generator: {"mask": mask}

    def noise_rows(self, size: Size, seeds: Sequence[int]) -> Iterator[Tensors]:
        """`noise` (tokens, 4 * latent_channels), as `FluxPipeline.prepare_latents` draws it."""
        factor = self.card.vae_scale_factor
        shape = (1, self.card.latent_channels, size.height // factor, size.width // factor)
        for seed in seeds:
            generator = torch.Generator("cpu").manual_seed(seed)
            noise = randn_tensor(shape, generator=generator, device=self.device, dtype=self.dtype)
            yield {"noise": self._pack(noise)[0].cpu().contiguous()}


class FillImages(FluxImages):
    """`FluxFillPipeline`: adds `masked_image_latents` (tokens, 4 * latent_channels) and the mask in pixels.

    `mask` is (tokens, 4 * vae_scale_factor ** 2).
    """

    kind = FluxFillPipeline

    def _condition(self, picture: torch.Tensor, holes: torch.Tensor, how: str) -> Condition:
        """A posterior sample, or the mode, of the masked picture."""
        posterior = self._posterior(picture * (1 - holes))

        def condition(generator: torch.Generator) -> Tensors:
            sample = retrieve_latents(posterior, generator=generator, sample_mode=how)
            mask, masked_image_latents = self._mask_latents(holes, sample, generator)
            return {"masked_image_latents": masked_image_latents, "mask": mask}

        return condition
