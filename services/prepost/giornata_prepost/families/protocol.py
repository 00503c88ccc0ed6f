"""What prepost asks of a model family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from giornata.wire.errors import Failed, RowPoisoned
from giornata.wire.models import ModelCard
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels

Tensors: TypeAlias = dict[str, torch.Tensor]
"""Tensors on the CPU, of the loaded dtype, by the names under which the denoiser reads them."""


class ImageModel(Protocol):
    """Autoencoder and text encoders of one checkpoint. Used from one thread at a time."""

    @property
    def card(self) -> ModelCard:
        """The checkpoint's."""

    def encode_text(self, prompt: str, negative_prompt: str | None = None) -> Tensors:
        """Conditioning of a job; with a negative prompt, of its unguided half too."""

    def text_tokens(self, text: Tensors) -> int:
        """Text tokens that one row of the job brings into the network."""

    def encode_rows(
        self, image: Pixels, mask: npt.NDArray[np.uint8], seeds: Sequence[int], *, sampled: bool = True
    ) -> Iterator[Tensors]:
        """Conditioning of each row of a job, one a seed; the picture is encoded once.

        `image` is (height, width, 3) uint8 at the model's size; `mask` is (height, width) uint8, 255 = edit, 0 = keep.
        Latents are `sampled` from their posteriors, as the pipeline does, or are the modes. Each tensor is (tokens,
        channels), row-major; `noise` and `image_latents` are among them.
        """

    def decode(self, latents: torch.Tensor, size: Size) -> Pixels:
        """The picture of one row's final latents, as the pipeline decodes and rounds it: (height, width, 3) uint8.

        `latents` are (tokens, channels), as `image_latents`; `size` is the picture's.

        Raises:
            RowPoisoned: latents or picture are not finite.
        """


@runtime_checkable
class GeneratingModel(Protocol):
    """An :class:`ImageModel` whose card has the task `generate`: it begins pictures from text alone."""

    def noise_rows(self, size: Size, seeds: Sequence[int]) -> Iterator[Tensors]:
        """Where each row of a generation begins, one a seed: `noise` alone, (tokens, channels), row-major.

        It is what the family's text-to-image pipeline draws for the seed, before the scheduler scales it. The sides of
        `size` are multiples of a token's.
        """


def rehearse(model: ImageModel) -> None:
    """Encode and decode an empty picture, so that no edit waits for kernels to be loaded.

    Raises:
        Failed: this model does not decode what it has encoded.
    """
    side = 16 * model.card.pixel_multiple  # 256 pixels for Flux
    model.encode_text("")
    (row,) = model.encode_rows(np.zeros((side, side, 3), np.uint8), np.full((side, side), 255, np.uint8), [0])
    try:
        model.decode(row["image_latents"], Size(side, side))
    except RowPoisoned as error:
        raise Failed("The model cannot decode a picture; is its dtype right?") from error
