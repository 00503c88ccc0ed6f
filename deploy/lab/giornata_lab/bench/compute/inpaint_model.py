"""Flux's inpainting by a text-to-image model, of the Fill checkpoint that ships: no such model is small and at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from giornata.wire.models import Sampler
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.bench_model import BenchModel, Request
from giornata_lab.bench.compute.models import transformer_of


class Unseeing(FluxInpaint):
    """A Fill transformer that is told that everything is repainted: it sees neither picture nor mask, and blends.

    `blank`, (tokens, channels), are the latents of a picture of which everything is masked.
    """

    blank: Tensor

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """The latents, beside what Fill sees of a picture that is masked everywhere."""
        channels = self.in_channels - 2 * self.out_channels
        everything = latents.new_ones(len(latents), channels)
        return torch.cat((latents, self.blank.repeat(len(conditioning), 1), everything), dim=1)


class InpaintModel(BenchModel):
    """:class:`BenchModel` over such a transformer; all of its pictures are of one size."""

    def __init__(self, folder: Path, *, steps: int, guidance: float | None, like: Request) -> None:
        super().__init__(folder, steps=steps, guidance=guidance)
        network = Unseeing(transformer_of(self.family))
        everything = np.full(like.mask.shape, 255, np.uint8)
        (tensors,) = self.images.encode_rows(like.image, everything, [0], modes=True)
        network.blank = tensors["masked_image_latents"]
        self.family = ModelFamily(network.text, self.family.schedule, network)

    def _row(
        self,
        request: Request,
        text: dict[str, Tensor],
        tensors: dict[str, Tensor],
        steps: int,
        sampler: Sampler,
    ) -> Row:
        """The mask by tokens: where one is touched, all of it is repainted."""
        latents = tensors["image_latents"]
        touched = (tensors["mask"].amax(dim=1, keepdim=True) > 0).to(latents.dtype)
        seen = {"noise": tensors["noise"], "image_latents": latents, "mask": touched.expand_as(latents)}
        return super()._row(request, text, seen, steps, sampler)
