"""What the model makes of a job before it is denoised, as it travels. In the model's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from giornata import tensors
from giornata.wire.errors import NotSupported, TaskNotSupported
from giornata.wire.jobs import Job
from giornata.wire.models import Task
from giornata.wire.references import REFERENCE
from giornata.wire.requests import Reuse
from giornata.wire.resolution import guided_by
from giornata_prepost.families.protocol import GeneratingModel, ImageModel, ReferringModel, Tensors
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels


class Encoded(NamedTuple):
    """The conditioning of a job."""

    text: Tensors
    rows: list[bytes]
    """safetensors of each."""
    references: bytes | None
    """safetensors, see :attr:`giornata.wire.jobs.Encoding.references`; None without any."""


def encoded(model: ImageModel, job: Job, prepared: bytes | None, given: bytes | None, size: Size) -> Encoded:
    """The conditioning of a job whose picture has this `size`.

    `prepared` and `given` are the safetensors of its inspection: the picture, which generations lack, and references.

    Raises:
        TaskNotSupported, NotSupported: the model generates nothing, or takes no references.
    """
    parameters = job.parameters
    if parameters.seed is None or parameters.strength is None:
        raise ValueError("encoding needs resolved parameters")
    seen = seen_by(model, prepared)
    text = model.encode_text(parameters.prompt, size, seen)
    if guided_by(job) is not None:
        text |= model.encode_unguided(parameters.negative_prompt, size, seen)
    references = None if given is None else _references(model, given)
    seeds = range(parameters.seed, parameters.seed + parameters.n)
    draws = parameters.sampler is not None and parameters.sampler.stochastic
    if prepared is None:
        return Encoded(text, _noise_rows(model, size, seeds, draws=draws), references)
    sampled = parameters.reuse is Reuse.OFF
    rows = encoded_rows(model, prepared, seeds, sampled=sampled, draws=draws, strength=parameters.strength)
    return Encoded(text, rows, references)


def seen_by(model: ImageModel, prepared: bytes | None) -> Pixels | None:
    """The picture in the safetensors of an inspection, where the model's text encoder looks at it; otherwise None."""
    if prepared is None or not model.text_varies_with_picture:
        return None
    pixels: Pixels = tensors.unpack(prepared)["image"].numpy()
    return pixels


def encoded_rows(
    model: ImageModel,
    prepared: bytes,
    seeds: Sequence[int],
    *,
    sampled: bool,
    draws: bool,
    strength: float = 1.0,
) -> list[bytes]:
    """safetensors of each row, as :meth:`giornata_prepost.families.protocol.ImageModel.encode_rows` tells."""
    pixels = tensors.unpack(prepared)
    image, mask = pixels["image"].numpy(), pixels["mask"].numpy()
    rows = model.encode_rows(image, mask, seeds, sampled=sampled, draws=draws, strength=strength)
    return [tensors.pack(row) for row in rows]


def _noise_rows(model: ImageModel, size: Size, seeds: Sequence[int], *, draws: bool) -> list[bytes]:
    if not isinstance(model, GeneratingModel):
        raise TaskNotSupported(received=Task.GENERATE, accepted=", ".join(model.card.tasks))
    return [tensors.pack(row) for row in model.noise_rows(size, seeds, draws=draws)]


def _references(model: ImageModel, given: bytes) -> bytes:
    if not isinstance(model, ReferringModel):
        raise NotSupported("The model takes no references.", field=REFERENCE)
    pictures = tensors.unpack(given)
    return tensors.pack({name: model.encode_reference(pixels.numpy()) for name, pixels in pictures.items()})
