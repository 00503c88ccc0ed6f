"""The questions to one ControlNet instance, and what travels on the data path of steps."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from giornata.wire.adapters import ControlKind
from giornata.wire.jobs import Encoding, Inspection, Job
from giornata.wire.values import CellMap, WireModel

# The questions to one ControlNet instance. Steps never travel here: they have a data path of their own.
#
# A denoiser opens each row that it wants computed at one instance, which keeps what all steps of the row
# share. The answer tells where samples are asked for, and with which token.


class DataPath(StrEnum):
    """The way in which latents and samples travel between a denoiser and a ControlNet instance."""

    UNIX = "unix"
    """A Unix socket, and a ring of memory that both map; of one host."""
    CUDA = "cuda"
    """A Unix socket, and device memory that the other process opens by its handle; of one host."""
    TCP = "tcp"
    """A TCP connection; between hosts."""


class ControlBase(WireModel):
    """A denoising network, as ControlNets that add to it have to know it."""

    kind: ControlKind
    channels: tuple[int, ...]
    """By block: of a token of what is added behind it. Blocks of a UNet are its skip connections, and its middle."""
    singles: int = 0
    """So many of the blocks, the last ones, have one joint stream; of Flux."""
    latent_channels: int
    """Channels of a token of a row's latent."""
    token_pixels: int
    """Pixels of the picture a side of a token."""
    text_channels: int
    """Width of the text's embeddings."""
    pooled_channels: int | None = None
    """Channels of the pooled text; None without one."""


class OpenControl(WireModel):
    """denoiser → one ControlNet instance: keep what all steps of a row share. Answered by :class:`OpenControlReply`.

    Idempotent: a row that is open already gets the same answer.
    """

    job: Job
    attempt: int
    index: int
    """The row's index within its job; with job and attempt, its key."""
    inspection: Inspection
    encoding: Encoding
    """Claim checks of the prompt and of the control images."""
    base: ControlBase
    grid: tuple[int, int]
    """Height and width of the picture in tokens."""
    times: tuple[float, ...]
    """What the network is told of each step."""
    sequences: int
    """Sequences of the row: 2 with classifier-free guidance."""
    acting: tuple[tuple[int, int], ...]
    """By ControlNet of the job: the first step in which it acts, and the one before which it ends; equal for none."""
    computed: CellMap | None = None
    """The tokens that steps ask for which are not whole; None: all."""
    denoiser: str
    """The instance that asks."""
    host: str
    """Where it runs: :func:`giornata.runtime.host_name`, equal for processes that can share memory."""
    paths: tuple[DataPath, ...]
    """What it can use, the best one first."""
    remaining_ms: int


class OpenControlReply(WireModel):
    """ControlNet instance → denoiser: the row's samples can be asked for there."""

    path: DataPath
    """One of those that were offered."""
    address: str
    """Path of a Unix socket, or host and port of TCP as ``host:port``."""
    token: str
    """Opens the data path to this denoiser alone: the first thing that is sent there."""
    behind: tuple[tuple[int | None, ...], ...]
    """By ControlNet of the job, and by block: which of its samples is added behind it. A step's samples are the sums
    of those that act (:func:`giornata.control.layout.sum_residuals`), scaled, for each sequence that is computed."""


class StepRefusal(StrEnum):
    """Code of a step that an instance does not compute (:class:`giornata.wire.controlnets.ControlNetStepFailed`)."""

    ROW_UNKNOWN = "controlnet_row_unknown"
    """The row is not open here any longer, or not to this denoiser: open it, and ask again."""
    STEP_MISMATCH = "controlnet_step_mismatch"
    """Number, noise level, latents or samples are not those of a step of the row."""
    OUT_OF_MEMORY = "controlnet_out_of_memory"
    """The step, alone, does not fit onto the device: ask another instance."""
    POISONED = "row_poisoned"
    """The step, alone, cannot be computed; the instance's log has the details."""


class CloseControl(WireModel):
    """denoiser → one ControlNet instance: the row has ended here or elsewhere. See :class:`CloseControlReply`."""

    job_id: str
    attempt: int
    index: int
    remaining_ms: int


class CloseControlReply(WireModel):
    """ControlNet instance → denoiser: it keeps nothing of the row."""

    was_open: bool


class ControlState(WireModel):
    """Telemetry of a ControlNet instance, beside the cards of what it computes."""

    capacity_rows: int
    machine: str = ""
    """As :attr:`OpenControl.host`."""
    device: str = ""
    """:func:`giornata.control.networks.device_id`."""
    threads: int = 0
    """That compute, on a processor."""
    cores: tuple[int, ...] = ()
    """Numbers of the machine's cores that they may compute on."""
    rows: int = 0
    resident: tuple[str, ...] = ()
    """Digests of the ControlNets whose weights are on the device, the last used first."""
    resident_bytes: int = 0
    hits: int = 0
    """Rows that were opened while all of their ControlNets were resident, since the start."""
    misses: int = 0
    evicted: int = 0
    steps_total: int = 0
    late_total: int = 0
    """Row steps that nobody waited for any longer when their turn came."""
    work_ms: float | None = None
    """Time of 1e9 multiplications, as the latest forwards took; on a processor, of its own time. None before the first
    one."""
    pending_ms: float = 0.0
    """Predicted time of the steps that wait or run now."""


def control_row(job_id: str, attempt: int, index: int) -> str:
    """Return what the data path knows a row by."""
    return f"{job_id}.{attempt}.{index}"


# What a denoiser and a ControlNet instance say on the data path of steps, over a socket between the two.
#
# The denoiser owns the memory: it tells the place of every tensor in a slab of its own, and the instance writes there.
# Frames are four bytes of length and a message; over TCP a tensor's bytes follow its message. The denoiser sends
# `OpenLink` once, then `ResidualsRequest`, followed by the latents, and `CancelStep`; the instance sends `LinkOpened`
# once, then `ResidualReady`, followed by the sample, `ControlNetStepFailed` and `StepCancelled`.


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
    whole: bool
    """Whether samples of all tokens are asked for, not of some."""
    latents_dtype: Dtype
    dtype: Dtype
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
        """Return whether all places lie in a slab of this size, apart from each other."""
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
