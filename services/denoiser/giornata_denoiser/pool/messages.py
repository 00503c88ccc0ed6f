"""What leader and ranks tell each other.

Ranks unpickle what their own leader sends; a leader reads JSON from its ranks. Rows, slabs and kept objects are named
by the leader's numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from giornata.planning.profiles import Profile
from giornata.scheduling.degrees.pool import Devices
from giornata.wire.error_root import ErrorBody
from giornata.wire.values import WireModel
from giornata.wire.workers import StepSample
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.pool.objects import StateRing


@dataclass(frozen=True)
class RankSetup:
    """What a leader tells a rank first."""

    config: DenoiserConfig
    """With the rank's device, and without what only the service needs."""
    me: int
    """Its place among the devices."""
    store: tuple[str, int]
    """Host and port of what makes groups meet."""
    groups: int
    """How many groups of several devices the rank belongs to: their memory is set aside."""
    group_s: float
    """How long members of a group wait for each other, before they take it for lost."""
    threads: int | None = None
    """Threads of torch on a CPU; None as the environment says."""


@dataclass(frozen=True)
class MapSlab:
    """A slab, whose file comes along."""

    number: int
    size_bytes: int


@dataclass(frozen=True)
class PutSharedObject:
    """A template or correction that rows refer to."""

    number: int
    data: bytes


@dataclass(frozen=True)
class PutRow:
    """A row's inputs, and where its states are."""

    number: int
    data: bytes
    slab: int
    ring: StateRing


@dataclass(frozen=True)
class OrderedRow:
    """A row of a step."""

    number: int
    step: int
    """Steps computed before this one."""
    fresh: bool
    """Whether it begins on these devices: from the state in its slab, with nothing kept of earlier steps. Else the
    rank refuses the order where it is at another step."""
    corrections: tuple[int, ...] | None = None
    """Numbers of the kept corrections of a fresh row's sequences, if it has any."""
    plain: bool = False
    """Whether a fresh row takes nothing from a template, since a step that did has failed."""
    leaves: bool = False
    """Whether a fresh row records its steps for later edits, as far as it was put so."""


@dataclass(frozen=True)
class StepOrder:
    """A step, which begins as soon as the rank has ended what came before."""

    number: int
    devices: Devices
    epoch: int
    """Epoch of the devices' group: another one after a member, or the group itself, was lost."""
    rows: tuple[OrderedRow, ...]
    halves: bool = False
    """Whether one of two devices computes the unconditional sequences; else all share each sequence's tokens."""


@dataclass(frozen=True)
class WarmGroup:
    """A group is to be made now."""

    devices: Devices
    epoch: int


@dataclass(frozen=True)
class ReleaseRows:
    """Rows are computed elsewhere from now on: what steps have kept of them goes, what was put stays."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class ForgetResources:
    """What no order will name any more."""

    rows: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    slabs: tuple[int, ...] = ()


@dataclass(frozen=True)
class AbortGroup:
    """A member of a group is lost or has failed: the others are to wait for it no more. Obeyed at once."""

    devices: Devices
    epoch: int


@dataclass(frozen=True)
class Ping:
    """A question whether the process runs."""

    number: int


@dataclass(frozen=True)
class Stop:
    """The rank is to end after what came before."""


Order = (
    MapSlab
    | PutSharedObject
    | PutRow
    | StepOrder
    | WarmGroup
    | ReleaseRows
    | ForgetResources
    | AbortGroup
    | Ping
    | Stop
)


class TensorLayout(WireModel):
    """A tensor in the file that comes along."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


class StoredTensorLayout(WireModel):
    """A :class:`giornata_denoiser.rows.stored.StoredTensor`."""

    data: TensorLayout
    scale: TensorLayout | None = None
    low: TensorLayout | None = None


class EntryLayout(WireModel):
    """What a step recorded of a row."""

    level: float
    blocks: tuple[dict[str, StoredTensorLayout], ...]
    """By block: its parts by name."""


class CorrectionDeltaLayout(WireModel):
    """A part of a correction."""

    block: int
    part: str
    delta: StoredTensorLayout


class PreviewLayout(WireModel):
    """What a row looks like after the step."""

    index: int
    pixels: TensorLayout


class RowAdvanced(WireModel):
    """A row whose state is in its slab, one step further."""

    number: int
    step: int
    """Steps computed now."""
    plain: bool = False
    """Whether it takes nothing from a template any more, since a step that did has failed."""
    entry: EntryLayout | None = None
    corrections: tuple[tuple[CorrectionDeltaLayout, ...], ...] | None = None
    """By sequence, if the step has taught them."""
    preview: PreviewLayout | None = None


class RowBlamed(WireModel):
    """A row that could not be computed, as of its last good step."""

    number: int
    error: ErrorBody
    cause: str = ""
    """What was raised, for the log."""


class RankReady(WireModel):
    """The model is loaded and has computed a picture."""

    kind: Literal["ready"] = "ready"
    profile: Profile
    """What steps cost here."""


class RankRefused(WireModel):
    """The model cannot be loaded as it is configured, or cannot compute; the process ends."""

    kind: Literal["refused"] = "refused"
    error: ErrorBody


class Pong(WireModel):
    """The process runs."""

    kind: Literal["pong"] = "pong"
    number: int


class RankStepEnded(WireModel):
    """A step has been computed. Those of a group all tell so; its first rank tells what it did."""

    kind: Literal["ended"] = "ended"
    order: int
    began_s: float
    ended_s: float
    """By the machine's monotonic clock."""
    advanced: tuple[RowAdvanced, ...] = ()
    blamed: tuple[RowBlamed, ...] = ()
    sample: StepSample | None = None
    left_bytes: int = 0
    """Size of the file that comes along; 0 for none."""


class RankStepFailed(WireModel):
    """Nothing of a step has come to anything: its rows are as they were."""

    kind: Literal["failed"] = "failed"
    order: int
    reason: Literal["stale", "group", "memory", "raised"]
    """`group`: another member has ended or closed it."""
    text: str = ""


Answer = Annotated[
    RankReady | RankRefused | Pong | RankStepEnded | RankStepFailed, Field(discriminator="kind")
]
ANSWER: TypeAdapter[RankReady | RankRefused | Pong | RankStepEnded | RankStepFailed] = TypeAdapter(Answer)
"""Reads what a rank tells."""
