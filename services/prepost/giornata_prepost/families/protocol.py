"""The protocol of a model family towards prepost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from giornata.wire.adapters import ControlInput
from giornata.wire.errors import Failed, RowPoisoned
from giornata.wire.jobs import PromptTokens
from giornata.wire.models import ModelCard
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels

Tensors: TypeAlias = dict[str, torch.Tensor]
"""Tensors on the CPU, of the loaded dtype, by the names under which the denoiser reads them."""

SeenPictures: TypeAlias = Sequence[Pixels]
"""What a text encoder sees, (height, width, 3) uint8 each: the picture that is edited, then the request's references.

Empty for a generation, and of a family whose text encoder sees no picture."""

Condition: TypeAlias = Callable[[torch.Generator], Tensors]
"""Makes tensors of a row; draws from the row's generator."""

REHEARSED_PIXELS: Final = 256
"""Pixels a side of the picture that a model rehearses with, about."""


def tokens_of(tokenizer: Any, prompt: str) -> list[int]:
    """The ids of a prompt's own tokens, however many there are."""
    found: list[int] = tokenizer(prompt, add_special_tokens=False, truncation=False).input_ids
    return found


def no_condition(_generator: torch.Generator) -> Tensors:
    """The condition that makes and draws nothing."""
    return {}


class ImageModel(Protocol):
    """Autoencoder and text encoders of one checkpoint. Used from one thread at a time."""

    @property
    def card(self) -> ModelCard:
        """The checkpoint's."""

    @property
    def text_varies_with_size(self) -> bool:
        """Return whether what a prompt becomes depends on the picture's size."""

    @property
    def text_varies_with_picture(self) -> bool:
        """Return whether the text encoder sees the edit's pictures: :meth:`encode_text` then needs them."""

    def encode_text(self, prompt: str, size: Size, seen: SeenPictures = ()) -> Tensors:
        """Conditioning of a job by its prompt; `size` is that of the model's picture."""

    def encode_unguided(self, negative_prompt: str | None, size: Size, seen: SeenPictures = ()) -> Tensors:
        """Conditioning of the half that classifier-free guidance leads away from: names begin with `negative_`.

        None is what the family's pipeline takes where no negative prompt is given.
        """

    def prompt_tokens(self, prompt: str) -> PromptTokens:
        """Return how many tokens a prompt has, and how many of them are read."""

    def text_tokens(self, text: Tensors) -> int:
        """Text tokens of one row that pass the network's blocks in each step; 0 where they only are attended to."""

    def prefix_tokens(self, text: Tensors, clean: int) -> int:
        """Tokens of one sequence that pass the blocks once, before its first step: block-causal text and references.

        `clean` are the tokens of the pictures that there are: references, and the one that is edited.
        """

    def encode_rows(
        self,
        image: Pixels,
        mask: npt.NDArray[np.uint8],
        seeds: Sequence[int],
        *,
        modes: bool = False,
        draws: bool = False,
        strength: float = 1.0,
        first: Condition = no_condition,
    ) -> Iterator[Tensors]:
        """Conditioning of each row of a job, one a seed; the picture is encoded once.

        What `first` makes, which draws before all else, is the row's, too.

        `image` is (height, width, 3) uint8 at the model's size; `mask` is (height, width) uint8, 255 = edit, 0 = keep.
        Everything is drawn as the pipeline does at this `strength`; with `modes` posteriors' modes, the same for all
        seeds, are taken instead. Each tensor is (tokens, channels), row-major, channels ordered by latent channel, row
        and column in the token; `noise` and `image_latents` are among them. Where the row's sampler `draws` noise, so
        is `generator`: the state of the row's CPU generator after all of the pipeline's draws, (bytes,) uint8.
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

    def noise_rows(
        self, size: Size, seeds: Sequence[int], *, draws: bool = False, first: Condition = no_condition
    ) -> Iterator[Tensors]:
        """Return where each row of a generation begins, one a seed: `noise`, (tokens, channels), row-major.

        `draws` and `first` are as of :meth:`ImageModel.encode_rows`.

        It is what the family's text-to-image pipeline draws for the seed, before the scheduler scales it. The sides of
        `size` are multiples of a token's.
        """


@runtime_checkable
class ReferringModel(Protocol):
    """An :class:`ImageModel` whose card takes references."""

    def encode_reference(self, image: Pixels) -> torch.Tensor:
        """The clean latents of a reference, (rows, columns, channels), rows and columns being tokens.

        `image` is (height, width, 3) uint8, its sides multiples of a token's.
        """


class ControlImage(NamedTuple):
    """A control image of a job, and how its ControlNet sees it."""

    pixels: Pixels
    """(height, width, 3) uint8, of the size of the model's picture."""
    sees: ControlInput


class ControlEncoding(NamedTuple):
    """The control inputs of a job's rows, encoded for its ControlNets."""

    condition: Condition
    """Makes `control_0` and so on, see :attr:`giornata.wire.jobs.Encoding.controls`."""
    shared: bool
    """Whether that is the same for all rows, and nothing is drawn."""


@runtime_checkable
class ControlledModel(Protocol):
    """An :class:`ImageModel` of a family for which diffusers has ControlNets."""

    def encode_controls(
        self, images: Sequence[ControlImage], mask: npt.NDArray[np.uint8] | None
    ) -> ControlEncoding:
        """Return what ControlNets see. Its condition comes `first` in :meth:`ImageModel.encode_rows`.

        `mask` is as there, None of a generation. Latents are sampled from their posteriors.

        Raises:
            InvalidField: a ControlNet sees something that the family, or a generation, does not have.
        """


@runtime_checkable
class AdaptedModel(Protocol):
    """An :class:`ImageModel` whose text encoders LoRAs may change."""

    def text_encoder(self, name: str) -> nn.Module | None:
        """A text encoder by its name in the checkpoint; None where there is none."""


def rehearse(model: ImageModel) -> None:
    """Encode and decode an empty picture, so that no edit waits for kernels to be loaded.

    Raises:
        Failed: this model does not decode what it has encoded.
    """
    multiple = model.card.pixel_multiple
    side = max(1, REHEARSED_PIXELS // multiple) * multiple
    empty = np.zeros((side, side, 3), np.uint8)
    model.encode_text("", Size(side, side), [empty])
    (row,) = model.encode_rows(empty, np.full((side, side), 255, np.uint8), [0])
    try:
        model.decode(row["image_latents"], Size(side, side))
    except RowPoisoned as error:
        raise Failed("The model cannot decode a picture; is its dtype right?") from error
