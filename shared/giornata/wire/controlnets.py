"""The questions to one ControlNet instance. Steps never travel here: they have a data path of their own.

A denoiser opens each row that it wants computed at one instance, which keeps what all steps of the row share. The
answer tells where samples are asked for, and with which token.
"""

from __future__ import annotations

from enum import StrEnum

from giornata.wire.adapters import ControlKind
from giornata.wire.jobs import Encoding, Inspection, Job
from giornata.wire.values import CellMap, WireModel


class DataPath(StrEnum):
    """How latents and samples travel between a denoiser and a ControlNet instance."""

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
    """Its `controls` act."""
    attempt: int
    index: int
    """The row's index within its job; with job and attempt, its key."""
    inspection: Inspection
    encoding: Encoding
    """Claim checks of the prompt and of the control images."""
    base: ControlBase
    """What they add to."""
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
    """Where it runs: :func:`giornata.machine.host_name`, equal for processes that can share memory."""
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
    of those that act (:func:`giornata.control.expansion.summed`), scaled, for each sequence that is computed."""


class StepRefusal(StrEnum):
    """Code of a step that an instance does not compute (:class:`giornata.wire.control_steps.ControlNetStepFailed`)."""

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
    """:func:`giornata.control.devices.device_id`."""
    threads: int = 0
    """That compute, on a processor."""
    cores: tuple[int, ...] = ()
    """Numbers of the machine's cores that they may compute on; empty from versions that tell none."""
    rows: int = 0
    """Open now."""
    resident: tuple[str, ...] = ()
    """Digests of the ControlNets whose weights are on the device, the last used first."""
    resident_bytes: int = 0
    hits: int = 0
    """Rows that were opened while all of their ControlNets were resident, since the start."""
    misses: int = 0
    """Rows that waited for weights."""
    evicted: int = 0
    """ControlNets whose weights had to go."""
    steps_total: int = 0
    """Row steps since the start."""
    late_total: int = 0
    """Row steps that nobody waited for any longer when their turn came."""
    work_ms: float | None = None
    """Time of 1e9 multiplications, as the latest forwards took; on a processor, of its own time. None before the first
    one."""
    pending_ms: float = 0.0
    """Predicted time of the steps that wait or run now."""


def control_row(job_id: str, attempt: int, index: int) -> str:
    """What the data path knows a row by."""
    return f"{job_id}.{attempt}.{index}"
