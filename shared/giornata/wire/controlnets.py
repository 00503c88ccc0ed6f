"""The questions to one ControlNet instance. Steps never travel here: :mod:`giornata.wire.control_steps` has them.

A denoiser opens each row that it wants computed at one instance, which keeps what all steps of the row share. The
answer tells where samples are asked for, and with which token.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from giornata.wire.jobs import Encoding, Inspection, Job
from giornata.wire.values import Wire


class DataPath(StrEnum):
    """How latents and samples travel between a denoiser and a ControlNet instance."""

    UNIX = "unix"
    """A Unix socket, and a ring of memory that both map; of one host."""
    CUDA = "cuda"
    """A Unix socket, and device memory that the other process opens by its handle; of one host."""
    TCP = "tcp"
    """A TCP connection; between hosts."""


class SampleSpec(Wire):
    """One of the samples that a row gets in each of its steps, in their order."""

    channels: int = Field(ge=1)
    """Of one token."""


class OpenControl(Wire):
    """denoiser → one ControlNet instance: keep what all steps of a row share. Answered by :class:`Opened`.

    Idempotent: a row that is open already gets the same answer.
    """

    job: Job
    """Its `controls` act."""
    attempt: int
    index: int
    """Of the row; with job and attempt, its key."""
    inspection: Inspection
    encoding: Encoding
    """Claim checks of the prompt and of the control images."""
    denoiser: str
    """The instance that asks."""
    host: str
    """Where it runs."""
    paths: tuple[DataPath, ...]
    """What it can use, the best one first."""
    remaining_ms: int


class Opened(Wire):
    """ControlNet instance → denoiser: the row's samples can be asked for there."""

    path: DataPath
    """One of those that were offered."""
    address: str
    """Path of a Unix socket, or host and port of TCP as ``host:port``."""
    token: str
    """Opens the data path to this denoiser alone: the first thing that is sent there."""


class CloseControl(Wire):
    """denoiser → one ControlNet instance: the row has ended here, or elsewhere. Answered by :class:`Closed`."""

    job_id: str
    attempt: int
    index: int
    remaining_ms: int


class Closed(Wire):
    """ControlNet instance → denoiser: it keeps nothing of the row."""

    was_open: bool
