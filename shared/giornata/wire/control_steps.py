"""What a denoiser and a ControlNet instance say on the data path of steps, over a socket between the two.

The denoiser owns the memory: it tells the place of every tensor in a slab of its own, and the instance writes there.
Frames are four bytes of length and a message; over TCP a tensor's bytes follow its message.

======================  ==========================================================================================
denoiser → instance     :class:`OpenLink`, once; :class:`ResidualsRequest`, followed by the latents; :class:`CancelStep`
instance → denoiser     :class:`LinkOpened`, once; :class:`ResidualReady`, followed by the sample;
:class:`ControlNetStepFailed`;
                        :class:`StepCancelled`
======================  ==========================================================================================
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from giornata.wire.controlnets import DataPath
from giornata.wire.values import WireModel

MAX_SLAB_BYTES: Final = 1 << 36
MAX_SAMPLES: Final = 256
"""Most samples of a step."""
MAX_TENSOR_BYTES: Final = 1 << 30
MAX_NUMBER: Final = 1 << 48
ALIGNMENT_BYTES: Final = 64
"""Every place in the slab begins at a multiple of it."""

Number: TypeAlias = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Side: TypeAlias = Annotated[int, Field(ge=1, le=MAX_TENSOR_BYTES)]
Column: TypeAlias = Annotated[tuple[Side, ...], Field(min_length=1, max_length=MAX_SAMPLES + 1)]


class Dtype(StrEnum):
    """Dtype of latents and samples."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def size_bytes(self) -> int:
        """Bytes of one number."""
        return 4 if self is Dtype.FLOAT32 else 2


class DeviceMemory(WireModel):
    """Device memory that another process opens: what torch tells of a shared CUDA storage, value by value."""

    device: str = Field(max_length=64)
    """Its unique identifier."""
    handle: bytes = Field(max_length=4096)
    offset_bytes: Number
    counter: bytes = Field(max_length=256)
    """Name of the shared memory that counts its users."""
    counter_offset: Number
    event: bytes = Field(max_length=1024)
    event_sync: bool


class LinkMessage(WireModel):
    """A message of either side."""

    kind: str


class OpenLink(LinkMessage):
    """The first message. Over a Unix socket, the descriptor of shared memory comes with its first byte."""

    kind: Literal["open"] = "open"
    token: str = Field(repr=False, max_length=256)
    """The secret of :class:`giornata.wire.controlnets.OpenControlReply`."""
    path: DataPath
    slab_bytes: int = Field(ge=1, le=MAX_SLAB_BYTES)
    memory: DeviceMemory | None = None
    """The slab's device memory with `DataPath.CUDA`; None with other paths."""


class LinkOpened(LinkMessage):
    """The instance admits the denoiser, and has its slab."""

    kind: Literal["opened"] = "opened"


class ResidualsRequest(LinkMessage):
    """Compute the samples of a row's step.

    The columns tell the place and shape of the latents first, then those of each sample.
    """

    kind: Literal["ask"] = "ask"
    number: Number
    """The step's number on this link; none comes twice."""
    row: str = Field(max_length=512)
    """Its key, as it was opened."""
    step: Number
    level: float = Field(allow_inf_nan=False)
    """Noise level."""
    whole: bool
    """Whether samples of all tokens are asked for, not of some."""
    latents_dtype: Dtype
    dtype: Dtype
    """Dtype of the samples."""
    offsets: Annotated[tuple[Number, ...], Field(max_length=MAX_SAMPLES + 1)]
    """Bytes from the slab's start, multiples of :data:`ALIGNMENT_BYTES`."""
    tokens: Column
    channels: Column

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not len(self.offsets) == len(self.tokens) == len(self.channels):
            raise ValueError("offsets, tokens and channels differ in number")
        if any(offset % ALIGNMENT_BYTES for offset in self.offsets):
            raise ValueError(f"an offset is no multiple of {ALIGNMENT_BYTES}")
        if max(self.sizes_bytes) > MAX_TENSOR_BYTES:
            raise ValueError(f"a tensor has more than {MAX_TENSOR_BYTES} bytes")
        return self

    @cached_property
    def sizes_bytes(self) -> tuple[int, ...]:
        """Bytes of the latents, then of each sample."""
        size = self.dtype.size_bytes
        samples = (a * b * size for a, b in zip(self.tokens[1:], self.channels[1:], strict=True))
        return (self.tokens[0] * self.channels[0] * self.latents_dtype.size_bytes, *samples)

    def fits(self, slab_bytes: int) -> bool:
        """Whether all places lie in a slab of this size, apart from each other."""
        places = sorted(zip(self.offsets, self.sizes_bytes, strict=True))
        apart = all(one + size <= other for (one, size), (other, _) in pairwise(places))
        return apart and sum(places[-1]) <= slab_bytes


class CancelStep(LinkMessage):
    """The step is not wanted any more. Answered by :class:`StepCancelled` in any case."""

    kind: Literal["cancel"] = "cancel"
    number: Number


class ResidualReady(LinkMessage):
    """A sample of a step lies at its place; over TCP, its bytes follow."""

    kind: Literal["sample"] = "sample"
    number: Number
    index: Number


class ControlNetStepFailed(LinkMessage):
    """The step will not be computed, and none of its places is written to any more."""

    kind: Literal["failed"] = "failed"
    number: Number
    code: str = Field(max_length=64)
    message: str = Field(max_length=2000)


class StepCancelled(LinkMessage):
    """None of the step's places is written to any more."""

    kind: Literal["cancelled"] = "cancelled"
    number: Number


FromDenoiser: TypeAlias = OpenLink | ResidualsRequest | CancelStep
FromInstance: TypeAlias = LinkOpened | ResidualReady | ControlNetStepFailed | StepCancelled
