"""The values that a model's images exchange with prepost, and the rehearsal of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from giornata.wire.adapters import ControlInput
from giornata.wire.errors import Failed, RowPoisoned
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels

if TYPE_CHECKING:
    from giornata_prepost.families.pipeline import ImageModel

Tensors: TypeAlias = dict[str, torch.Tensor]
"""Tensors on the CPU, of the loaded dtype, by the names under which the denoiser reads them."""

SeenPictures: TypeAlias = Sequence[Pixels]
"""What a text encoder sees, (height, width, 3) uint8 each: the picture that is edited, then the request's references.

Empty for a generation, and of a family whose text encoder sees no picture."""

Condition: TypeAlias = Callable[[torch.Generator], Tensors]
"""Makes tensors of a row; draws from the row's generator."""

REHEARSED_PIXELS: Final = 256
"""Pixels a side of the picture that a model rehearses with, about."""


def no_condition(_generator: torch.Generator) -> Tensors:
    """The condition that makes and draws nothing."""
    return {}


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
