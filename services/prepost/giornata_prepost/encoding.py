"""What the model makes of a job before it is denoised, as it travels. In the model's thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from giornata import tensors
from giornata.wire.adapters import control_name
from giornata.wire.errors import InputLost, InvalidField, NotSupported, TaskNotSupported
from giornata.wire.jobs import Job, PromptTokens
from giornata.wire.models import Task
from giornata.wire.references import REFERENCE, named_references
from giornata.wire.resolution import guided_by
from giornata_prepost.families.protocol import (
    Condition,
    ControlEncoding,
    ControlImage,
    ControlledModel,
    GeneratingModel,
    ImageModel,
    ReferringModel,
    SeenPictures,
    Tensors,
    nothing,
)
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels
from giornata_prepost.loras.text_parts import TextLora, acting

MOST_TOKENS: Final = 16_384
"""Most tokens of a prompt that no family cuts: memory and time grow with their square."""


class EncodingInputs(NamedTuple):
    """What encoding reads beside the job: safetensors of its inspection, and text parts of its LoRAs."""

    prepared: bytes | None
    """The picture; None of a generation."""
    references: bytes | None = None
    controls: bytes | None = None
    text_loras: tuple[TextLora, ...] = ()


class JobConditioning(NamedTuple):
    """The conditioning of a job."""

    text: Tensors
    rows: list[bytes]
    """safetensors of each."""
    controls: list[bytes]
    """safetensors, see :attr:`giornata.wire.jobs.Encoding.controls`."""
    prompt_tokens: PromptTokens
    negative_prompt_tokens: PromptTokens | None
    """See :attr:`giornata.wire.jobs.Encoding.negative_prompt_tokens`."""
    references: bytes | None
    """safetensors, see :attr:`giornata.wire.jobs.Encoding.references`; None without any."""


def encoded(model: ImageModel, job: Job, inputs: EncodingInputs, size: Size) -> JobConditioning:
    """The conditioning of a job whose picture has this `size`.

    Raises:
        InvalidField: the model would read more than :data:`MOST_TOKENS` of the prompt.
        TaskNotSupported, NotSupported: the model generates nothing, or takes no references or ControlNets.
        LoraMismatch: a LoRA has text modules that the model does not have.
    """
    parameters = job.parameters
    if parameters.seed is None or parameters.strength is None:
        raise ValueError("encoding needs resolved parameters")
    prompt_tokens = model.prompt_tokens(parameters.prompt)
    if prompt_tokens.read > MOST_TOKENS:
        raise InvalidField(
            f"The model {model.card.name} reads all of a prompt, and this one is too long for it.",
            field="prompt",
            received=f"{prompt_tokens.given} tokens",
            accepted=f"at most {MOST_TOKENS} tokens",
        )
    text = _text(model, job, inputs, size)
    references = None if inputs.references is None else _references(model, inputs.references)
    controls = _controls(model, job, inputs)
    seeds = job.seeds
    draws = parameters.sampler is not None and parameters.sampler.stochastic
    if job.regions:
        rows = _region_rows(model, job, inputs, seeds=seeds, draws=draws)
    elif inputs.prepared is None:
        rows = _noise_rows(model, size, seeds, draws=draws, first=controls.condition)
    else:
        rows = model.encode_rows(
            *_picture(inputs.prepared),
            seeds,
            draws=draws,
            strength=parameters.strength,
            first=controls.condition,
        )
    names = [control_name(index) for index in range(len(job.controls))]
    negative = parameters.negative_prompt if guided_by(job) is not None else None
    return JobConditioning(
        text,
        *_packed(rows, names, shared=controls.shared),
        prompt_tokens,
        None if negative is None else model.prompt_tokens(negative),
        references,
    )


def seen_by(model: ImageModel, prepared: bytes | None, references: bytes | None = None) -> SeenPictures:
    """The pictures in the safetensors of an inspection, where the model's text encoder looks at them."""
    if prepared is None or not model.text_varies_with_picture:
        return ()
    given = {} if references is None else tensors.unpack(references)
    named = (given[name] for name in named_references(range(len(given))))
    return tuple(picture.numpy() for picture in (tensors.unpack(prepared)["image"], *named))


def template_row(model: ImageModel, prepared: bytes) -> bytes:
    """safetensors of a template run's row: modes of posteriors. Its noise is not read: all edits share another."""
    image, mask = _picture(prepared)
    (row,) = model.encode_rows(image, mask, (0,), modes=True)
    return tensors.pack(row)


def _text(model: ImageModel, job: Job, inputs: EncodingInputs, size: Size) -> Tensors:
    """Both halves of the job's text, under the text parts of its LoRAs."""
    if job.regions and model.text_varies_with_picture:
        raise NotSupported(
            "The model reads the picture in the prompt, and the regions of auto_edit have several.",
            field="auto_edit",
            received=model.card.family,
            accepted="leave auto_edit out",
        )
    seen = seen_by(model, inputs.prepared, inputs.references)
    with acting(model, inputs.text_loras):
        text = model.encode_text(job.parameters.prompt, size, seen)
        if guided_by(job) is not None:
            text |= model.encode_unguided(job.parameters.negative_prompt, size, seen)
    return text


def _packed(
    rows: Iterable[Tensors], names: Sequence[str], *, shared: bool
) -> tuple[list[bytes], list[bytes]]:
    """safetensors of each row, and of its tensors of these `names`; of the latter one where they are `shared`."""
    packed: list[bytes] = []
    apart: list[bytes] = []
    for row in rows:
        named = {name: row.pop(name) for name in names}
        if named and not (shared and apart):
            apart.append(tensors.pack(named))
        packed.append(tensors.pack(row))
    return packed, apart


def _picture(prepared: bytes, region: str = "") -> tuple[Pixels, npt.NDArray[np.uint8]]:
    """The picture and the mask of an inspection, or of one of its regions: ``_0`` for the first."""
    pixels = tensors.unpack(prepared)
    return pixels[f"image{region}"].numpy(), pixels[f"mask{region}"].numpy()


def _region_rows(
    model: ImageModel, job: Job, inputs: EncodingInputs, *, seeds: Sequence[int], draws: bool
) -> Iterator[Tensors]:
    """A row for each region, as an edit of its crop alone would have it."""
    if inputs.prepared is None or job.parameters.strength is None:
        raise InputLost("The inspection of this job has no pictures.", received=job.job_id)
    for index, seed in enumerate(seeds):
        image, mask = _picture(inputs.prepared, f"_{index}")
        yield from model.encode_rows(image, mask, [seed], draws=draws, strength=job.parameters.strength)


def _controls(model: ImageModel, job: Job, inputs: EncodingInputs) -> ControlEncoding:
    if not job.controls:
        return ControlEncoding(nothing, shared=True)
    if not isinstance(model, ControlledModel):
        raise NotSupported("The model takes no ControlNets.", field="controlnets", received=model.card.family)
    if inputs.controls is None:
        raise InputLost("The inspection of this job has no control images.", received=job.job_id)
    pictures = tensors.unpack(inputs.controls)
    images = [
        ControlImage(pictures[control_name(index)].numpy(), use.sees)
        for index, use in enumerate(job.controls)
    ]
    mask = None if inputs.prepared is None else _picture(inputs.prepared)[1]
    return model.encode_controls(images, mask)


def _noise_rows(
    model: ImageModel, size: Size, seeds: Sequence[int], *, draws: bool, first: Condition
) -> Iterator[Tensors]:
    if not isinstance(model, GeneratingModel):
        raise TaskNotSupported(received=Task.GENERATE, accepted=", ".join(model.card.tasks))
    return model.noise_rows(size, seeds, draws=draws, first=first)


def _references(model: ImageModel, given: bytes) -> bytes:
    if not isinstance(model, ReferringModel):
        raise NotSupported("The model takes no references.", field=REFERENCE)
    pictures = tensors.unpack(given)
    return tensors.pack({name: model.encode_reference(pixels.numpy()) for name, pixels in pictures.items()})
