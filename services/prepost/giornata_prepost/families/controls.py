"""Control images as ControlNets see them, prepared like the pipelines of diffusers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion_img2img import retrieve_latents
from PIL import Image

from giornata.wire.adapters import ControlInput, control_name
from giornata.wire.errors import InvalidField
from giornata_prepost.families.pipeline import SAMPLE, PipelineImages
from giornata_prepost.families.protocol import ControlEncoding, ControlImage, Tensors

Draw: TypeAlias = Callable[[torch.Generator], torch.Tensor]
"""Makes what one ControlNet sees, for one row."""


class ControlledImages(PipelineImages):
    """Pictures for a family for which diffusers has ControlNets.

    See :class:`giornata_prepost.families.protocol.ControlledModel`.
    Usual ControlNets see latents, (tokens, channels), packed as the picture's.
    """

    control_inputs: ClassVar[frozenset[ControlInput]] = frozenset({ControlInput.USUAL})
    """What ControlNets of the family see."""
    control_pixels: ClassVar[bool] = False
    """Whether its usual ControlNets see pixels in 0 to 1, (3, height, width), which are not encoded."""

    @torch.no_grad()
    def encode_controls(
        self, images: Sequence[ControlImage], mask: npt.NDArray[np.uint8] | None
    ) -> ControlEncoding:
        """As the protocol: the images' posteriors are sampled in their order."""
        draws = {control_name(index): self._control(image, mask) for index, image in enumerate(images)}

        def condition(generator: torch.Generator) -> Tensors:
            own = self._control_generator(generator)
            return {name: draw(own) for name, draw in draws.items()}

        pixels = all(self._sees_pixels(image.sees) for image in images)
        return ControlEncoding(condition, shared=pixels)

    def _control(self, image: ControlImage, mask: npt.NDArray[np.uint8] | None) -> Draw:
        if image.sees not in self.control_inputs:
            raise InvalidField(
                f"No ControlNet of {self.card.family} sees its control image so.",
                field="controlnets",
                received=image.sees,
                accepted=", ".join(sorted(self.control_inputs)),
            )
        height, width, _ = image.pixels.shape
        processor = VaeImageProcessor(
            vae_scale_factor=self.card.vae_scale_factor,
            do_normalize=not (self.control_pixels and image.sees is ControlInput.USUAL),
        )
        picture = processor.preprocess(Image.fromarray(image.pixels), height=height, width=width)
        if self._sees_pixels(image.sees):
            pixels = picture[0].to(self.device, self.dtype)
            return lambda _generator: pixels
        if image.sees is ControlInput.MASKED:
            return self._masked(picture, mask)
        posterior = self._posterior(picture)
        if image.sees is ControlInput.UNSHIFTED:
            return lambda generator: self._pack(self._unshifted(posterior, generator))
        return lambda generator: self._pack(self._latents(posterior, generator, SAMPLE))

    def _sees_pixels(self, sees: ControlInput) -> bool:
        return sees is ControlInput.PIXELS or (self.control_pixels and sees is ControlInput.USUAL)

    def _control_generator(self, generator: torch.Generator) -> torch.Generator:
        """Draws the posterior samples of a row's control images; `generator` is the row's, before its first draw."""
        return generator

    def _unshifted(self, posterior: object, generator: torch.Generator) -> torch.Tensor:
        """Latents from which the autoencoder's shift is not subtracted, (1, channels, h, w)."""
        sample: torch.Tensor = retrieve_latents(posterior, generator=generator, sample_mode=SAMPLE)
        scale: float = self.pipeline.vae.config.scaling_factor
        return (sample * scale).to(self.dtype)

    def _masked(self, picture: torch.Tensor, mask: npt.NDArray[np.uint8] | None) -> Draw:
        """Latents of the picture, black where it is edited, and a channel that is 1 where it is kept."""
        if mask is None:
            raise InvalidField(
                "The ControlNet completes a picture that is edited, and a generation has none.",
                field="controlnets",
                received="a generation",
                accepted="an edit",
            )
        holes = self.pipeline.mask_processor.preprocess(Image.fromarray(mask))
        posterior = self._posterior(picture.masked_fill(holes > 0.5, -1))
        kept = 1 - self._mask(holes)
        return lambda generator: self._pack(
            torch.cat([self._latents(posterior, generator, SAMPLE), kept], dim=1)
        )
