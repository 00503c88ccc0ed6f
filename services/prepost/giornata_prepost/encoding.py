"""The encoding of a job by the model before it is denoised, as it travels."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.wire.adapters import control_name
from giornata.wire.errors import InputLost, InvalidField, LoraMismatch, NotSupported, TaskNotSupported
from giornata.wire.jobs import BlobRef, Job, PromptTokens
from giornata.wire.models import Task
from giornata.wire.requests import REFERENCE, named_references
from giornata.wire.resolution import guided_by
from giornata_prepost.images.pictures import Pixels, Size
from giornata_prepost.worker_pools import CallPriority, ModelThread

if TYPE_CHECKING:
    from giornata_prepost.families.pipeline import ControlEncoding, ImageModel, SeenPictures, Tensors

# The empty prompt's conditioning, which every template run reads: encoded once and kept for all jobs.
#
# Where the text encoder sees the picture, it is encoded once for each picture.


TTL_S: Final = 24 * 3600
"""How long it is kept in the blob store; it is written again once it is gone."""
PICTURE_TTL_S: Final = 3600
"""As :data:`TTL_S`, of one picture's: each job writes it again, for its own time."""
SIZES: Final = 16
"""Picture sizes, or pictures, of which an instance remembers it, where the family's text varies with them."""


class EmptyPromptCache:
    """One instance's; its claim checks are those of `instance`."""

    def __init__(self, model: ImageModel, thread: ModelThread, blobs: BlobStore, instance: str) -> None:
        self._model, self._thread, self._blobs = model, thread, blobs
        self._key = f"shared-{instance}-empty-text"
        self._packed: OrderedDict[str, bytes] = OrderedDict()
        self._refs: dict[str, BlobRef] = {}

    async def keep(self, tenant: str, size: Size, seen: SeenPictures = ()) -> BlobRef:
        """A claim check of it, for pictures of `size`, or of `tenant`, for those that the text encoder has `seen`."""
        key = self._key + self._variant(size, seen)
        packed = await self._encoded(key, size, seen)
        if seen:
            return await self._blobs.put(f"{tenant}/{key}", packed, PICTURE_TTL_S)
        ref = self._refs.get(key)
        if ref is None or not await self._blobs.has(ref):
            ref = self._refs[key] = await self._blobs.put(key, packed, TTL_S)
        return ref

    def _variant(self, size: Size, seen: SeenPictures) -> str:
        """Return what the text varies with, as the end of a key."""
        if seen:
            pictures = hashlib.sha256()
            for picture in seen:
                pictures.update(str(picture.shape).encode() + picture.tobytes())
            return f"-{size}-{pictures.hexdigest()}"
        return f"-{size}" if self._model.text_varies_with_size else ""

    async def _encoded(self, key: str, size: Size, seen: SeenPictures) -> bytes:
        if key not in self._packed:
            text, _ = await self._thread.timed(CallPriority.BEGIN, self._model.encode_text, "", size, seen)
            self._packed[key] = await asyncio.to_thread(tensors.pack, text)
        packed = self._packed[key]
        self._packed.move_to_end(key)
        while len(self._packed) > SIZES:
            forgotten, _ = self._packed.popitem(last=False)
            self._refs.pop(forgotten, None)
        return packed


# Text parts of LoRAs act while one job's prompts are encoded: by hooks, so that the weights stay as they are.


class TextFactors(NamedTuple):
    """Low-rank factors of one module of a text encoder, alpha and rank folded in."""

    down: torch.Tensor
    """(rank, in)."""
    up: torch.Tensor
    """(out, rank)."""


class TextLora(NamedTuple):
    """The changes of one LoRA of a job to text encoders."""

    scale: float
    encoders: Mapping[str, Mapping[str, TextFactors]]
    """Factors by module, by the text encoder's name."""


@contextmanager
def act_text_loras(model: ImageModel, loras: Sequence[TextLora]) -> Iterator[None]:
    """Inside, each module's output has `scale * up @ down @ input` of every LoRA added. In the model's thread.

    Raises:
        LoraMismatch: the model has no such linear layer of such a shape.
    """
    with ExitStack() as stack:
        for lora in loras:
            for name, modules in lora.encoders.items():
                encoder = model.text_encoder(name)
                for path, factors in modules.items():
                    module = _linear(encoder, name, path, factors)
                    down, up = (factor.to(module.weight) for factor in factors)
                    hook = partial(_added, down=down, up=up, scale=lora.scale)
                    stack.callback(module.register_forward_hook(hook).remove)
        yield


def _added(
    _module: nn.Module, given: tuple[Tensor, ...], output: Tensor, *, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    # Encoders that ran out of memory have gone to another device since.
    return output + linear(linear(given[0], down.to(output)), up.to(output)) * scale


def _linear(encoder: nn.Module | None, name: str, path: str, factors: TextFactors) -> nn.Linear:
    module = None if encoder is None else dict(encoder.named_modules()).get(path)
    down, up = (tuple(factor.shape) for factor in factors)
    if not isinstance(module, nn.Linear):
        raise LoraMismatch(
            "The LoRA changes a part of a text encoder that the model does not have.",
            received=f"{name}.{path}",
            accepted=f"linear layers of {'no text encoder' if encoder is None else type(encoder).__name__}",
        )
    rank = down[0] if down else 0
    wanted = (rank, module.in_features), (module.out_features, rank)
    if (down, up) != wanted:
        raise LoraMismatch(
            "The LoRA's factors have other shapes than the text encoder's module.",
            received=f"{name}.{path}: {down} and {up}",
            accepted=f"{wanted[0]} and {wanted[1]}",
        )
    return module


# What the model makes of a job before it is denoised, as it travels. In the model's thread.


MOST_TOKENS: Final = 16_384
"""Most tokens of a prompt that no family cuts: memory and time grow with their square."""


class EncodingInputs(NamedTuple):
    """The inputs of encoding beside the job: safetensors of its inspection, and text parts of its LoRAs."""

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


def encode_job(model: ImageModel, job: Job, inputs: EncodingInputs, size: Size) -> JobConditioning:
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
        if Task.GENERATE not in model.card.tasks:
            raise TaskNotSupported(received=Task.GENERATE, accepted=", ".join(model.card.tasks))
        rows = model.noise_rows(size, seeds, draws=draws, first=controls.condition)
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


def seen_pictures(model: ImageModel, prepared: bytes | None, references: bytes | None = None) -> SeenPictures:
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
    seen = seen_pictures(model, inputs.prepared, inputs.references)
    with act_text_loras(model, inputs.text_loras):
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
        return model.encode_controls([], None)
    if inputs.controls is None:
        raise InputLost("The inspection of this job has no control images.", received=job.job_id)
    pictures = tensors.unpack(inputs.controls)
    images = [(pictures[control_name(index)].numpy(), use.sees) for index, use in enumerate(job.controls)]
    mask = None if inputs.prepared is None else _picture(inputs.prepared)[1]
    return model.encode_controls(images, mask)


def _references(model: ImageModel, given: bytes) -> bytes:
    if not model.card.max_references:
        raise NotSupported("The model takes no references.", field=REFERENCE)
    pictures = tensors.unpack(given)
    return tensors.pack({name: model.encode_reference(pixels.numpy()) for name, pixels in pictures.items()})
