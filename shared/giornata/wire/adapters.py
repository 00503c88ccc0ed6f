"""The adapters that a request may ask for, and what a job keeps of them once they are found.

A *LoRA* changes weights of the denoising network (:mod:`giornata.wire.loras`). A *ControlNet* is a network beside it
that sees a control image and adds to what the network's blocks make.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import Field, StringConstraints, model_validator

from giornata.wire.values import RecordModel, WireModel

MAX_LORAS: Final = 4
MAX_CONTROLNETS: Final = 3
MAX_SCALE: Final = 4.0
CONTROL_IMAGE: Final = "control_image"
"""Name of the messages' field."""
CONTROL_IMAGES: Final = tuple(f"{CONTROL_IMAGE}_{index}" for index in range(MAX_CONTROLNETS))
"""Names of the files that a request brings as control images, as :attr:`AskedControl.image` counts them."""


class LoraWait(StrEnum):
    """The behaviour of a row whose LoRAs are not loaded yet."""

    EXACT = "exact"
    """It waits: every step has them."""
    BOUNDED = "bounded"
    """It begins without them, and they act from a later step on; at the latest from the one up to which pictures of
    this LoRA stay alike (Katz, ATC '25, §6)."""


class Annotator(StrEnum):
    """The maker of a control image from a picture."""

    CANNY = "canny"
    SOFT_EDGE = "soft_edge"
    TILE = "tile"


class ControlInput(StrEnum):
    """The form in which a ControlNet sees its control image."""

    USUAL = "usual"
    """What its kind usually sees. UNets: pixels in 0 to 1. Transformers: latents, normalised as those of pictures."""
    PIXELS = "pixels"
    """Pixels in -1 to 1; ControlNets of Flux with an `input_hint_block`, as XLabs trains them."""
    UNSHIFTED = "unshifted"
    """Latents from which the autoencoder's shift is not subtracted; InstantX's ControlNets of SD3."""
    MASKED = "masked"
    """Latents of a picture without the pixels that are edited, and one channel more: 1 where a latent pixel is kept;
    ControlNets of SD3 that inpaint."""


class AskedLora(RecordModel):
    """A LoRA of a request."""

    id: Annotated[str, StringConstraints(pattern=r"^lora_[0-9a-f]{32}$")] = Field(
        description="As `POST /v1/loras` tells it."
    )
    scale: float = Field(
        1.0,
        ge=-MAX_SCALE,
        le=MAX_SCALE,
        allow_inf_nan=False,
        description="How strongly it acts; 1 as it was trained.",
    )


class AskedControl(RecordModel):
    """A ControlNet of a request."""

    model: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}$")] = Field(
        description="Name of the ControlNet; `GET /v1/models` tells which ones a model has."
    )
    image: Annotated[int, Field(ge=0, lt=MAX_CONTROLNETS)] | None = Field(
        None,
        description="Its control image: 0 is the file `control_image_0`; default: the picture that is edited.",
    )
    annotator: Annotator | None = Field(
        None, description="What makes the control image of that picture; default: the file is one already."
    )
    scale: float = Field(1.0, ge=0, le=MAX_SCALE, description="How strongly it acts.")
    start: float = Field(0.0, ge=0, lt=1, description="Share of the steps before which it does nothing.")
    end: float = Field(1.0, gt=0, le=1, description="Share of the steps from which on it does nothing.")
    mode: Annotated[int, Field(ge=0, lt=64)] | None = Field(
        None, description="Which kind of control image it is; of union ControlNets, which need it, alone."
    )

    @model_validator(mode="after")
    def _says_what_it_sees(self) -> Self:
        if self.image is None and self.annotator is None:
            raise ValueError("needs image or annotator")
        if self.start >= self.end:
            raise ValueError(f"start must be below end, received {self.start} and {self.end}")
        return self


def joined_at(share: float, asked: Mapping[str, object]) -> float:
    """The `share` of the steps after which the LoRAs of the fields `asked` join; ValueError where that means nothing.

    A field that is missing from `asked` is at fault itself, and its own mistake is told.
    """
    if asked.get("loras") == ():
        raise ValueError("needs loras")
    if asked.get("lora_wait") is LoraWait.BOUNDED:
        raise ValueError("tells the step, which lora_wait=bounded leaves open; name one of the two")
    return share


class LoraUse(RecordModel):
    """A LoRA that a job uses, as its record was when the job was accepted."""

    lora_id: str
    sha256: str
    """sha-256 of the canonical file; what rows and workers know the LoRA by."""
    size_bytes: int
    rank: int
    modules: int
    """Modules of the denoising network that it changes."""
    text_modules: int = 0
    """Modules of text encoders that it changes: prepost applies them."""
    weights: int = 0
    """In the factors of the denoising network's modules, as :attr:`giornata.wire.loras.CanonicalLora.weights` tells."""
    scale: float = 1.0
    joins_within: float = 0.0
    """Share of the steps that a row may make before its files are loaded; 0: it waits. Above 0 of jobs with
    `lora_wait` `bounded`, as :attr:`giornata.wire.loras.LoraRecord.joins_within` tells, and of jobs with `lora_join`,
    whose rows make all of them without it."""


class ControlUse(RecordModel):
    """A ControlNet that a job uses."""

    model: str
    digest: str
    image: int | None = None
    """Index into the job's control images; None for the picture that is edited."""
    annotator: Annotator | None = None
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0
    mode: int | None = None
    sees: ControlInput = ControlInput.USUAL
    """As its card tells."""


class ControlKind(StrEnum):
    """The networks that a ControlNet adds to, by diffusers' class."""

    FLUX = "flux"
    SD3 = "sd3"
    UNET = "unet"
    """`ControlNetModel`: Stable Diffusion 1 and 2, SDXL."""


class ControlWork(WireModel):
    """The work of a ControlNet for one sequence of a row in one step: multiplications."""

    sequence: float = 0.0
    """Whatever the picture's size: what depends on the noise level and the text alone."""
    text: float = 0.0
    """In layers, for a text token beside the picture's."""
    image: float = 0.0
    """In layers, and in attention to a text that passes none, for a token of the picture."""
    pair: float = 0.0
    """In attention, for a query and a key of the picture."""
    text_pair: float = 0.0
    """In attention, for a query and a key one of which, or both, is a text token beside the picture's."""
    shared: bool = False
    """Whether it is computed for one sequence, and the others of the row have its samples, too."""


class ControlCard(WireModel):
    """A ControlNet that an instance has loaded."""

    name: str
    digest: str
    """sha-256 over configuration files and samples of the weight files, as that of models."""
    kind: ControlKind
    text_channels: int
    """Width of the text embeddings that it takes, which tells SD 1.5, SD 2 and SDXL apart."""
    modes: int = 0
    """Kinds of control images that a union ControlNet knows, counted from 0; 0 for others."""
    sees: ControlInput = ControlInput.USUAL
    weight_bytes: int = 0
    work: ControlWork | None = None
    """Beside the model of the instance, whose tokens it counts; None where the instance tells its size alone."""


def control_name(index: int) -> str:
    """The name of a control image's tensor where those of a job travel together."""
    return f"control_{index}"


def control_field(index: int) -> str:
    """The name of the request's file that is its control image `index`."""
    return f"{CONTROL_IMAGE}_{index}"
