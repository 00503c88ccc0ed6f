"""The messages of leader and ranks: frames over pairs of Unix sockets, tensors in shared memory."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal, get_args

import msgpack
import torch
from pydantic import BaseModel
from torch import Tensor

from giornata.frames import FramedConnection
from giornata.packed.low_rank import LowRankFactors, SequenceLoras
from giornata.packed.packing import Region
from giornata.planning.cost_model import Profile
from giornata.scheduling.batch import RowKey
from giornata.scheduling.degrees.pool import Devices
from giornata.wire.adapters import ControlCard, ControlWork
from giornata.wire.controlnets import DataPath
from giornata.wire.errors import ErrorBody
from giornata.wire.jobs import Priority
from giornata.wire.models import TaylorSeerSchedule
from giornata.wire.workers import StepCacheCounters, StepSample
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.residuals import ControlLinkAddress, ControlNetSession
from giornata_denoiser.pool.shared_memory import (
    ExpansionHead,
    StateRing,
    TensorLocation,
    TensorPlaces,
    dtype_name,
)
from giornata_denoiser.rows.parts import Adapters, RowControl, RowLora, TaylorRule
from giornata_denoiser.rows.row import (
    Prompt,
    RecordingSpec,
    Row,
    RowInputs,
    RowReuse,
    RowWishes,
    SamplerTable,
)
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Correction, Entry, StoredTensor

MESSAGE_BYTES: Final = 1 << 30
MOST_FILES: Final = 64


def connect(one: socket.socket) -> FramedConnection:
    """An end of a pair of Unix sockets; it ends when the process at its other end does, however that ends."""
    return FramedConnection(one, MESSAGE_BYTES, files=MOST_FILES)


# What leader and ranks tell each other. Rows, slabs and kept objects are named by the leader's numbers.


@dataclass(frozen=True)
class RankSetup:
    """The first message of a leader to a rank."""

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
    correction_bits: int | None
    """See :class:`giornata_denoiser.engine.step_plan.ReuseOptions`: every rank keeps what edits learn alike."""
    threads: int | None = None
    """Threads of torch on a CPU; None as the environment says."""


@dataclass(frozen=True)
class MapSlab:
    """A slab, whose file comes along."""

    number: int
    size_bytes: int


@dataclass(frozen=True)
class PutSharedObject:
    """A template, correction or set of LoRAs that rows refer to."""

    number: int
    data: bytes
    """See :func:`pack`."""
    own: int
    """The slab of tensors that were in none; 0 where there are none."""


@dataclass(frozen=True)
class PutRow:
    """A row's inputs, and where its states are."""

    number: int
    data: bytes
    own: int
    """As :attr:`PutSharedObject.own`."""
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
    loras_from: int = 0
    """As :attr:`giornata_denoiser.rows.parts.Adapters.loras_from`: LoRAs may join after the row was put."""
    remembers: ExpansionHead | None = None
    """What a fresh row's step cache remembers; the factors are in its slab."""
    low_rank: int | None = None
    """Number of the set of LoRAs that act in the step, if any do."""
    session: ControlNetSession[ControlLinkAddress] | None = None
    """Where the row is open for its ControlNets, by an address; None where ranks compute them, or it has none."""


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
    """A message with the resources that no order will name any more."""

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


@dataclass(frozen=True)
class RowAdvanced:
    """A row whose state is in its slab, one step further."""

    number: int
    step: int
    """Steps computed now."""
    plain: bool = False
    """Whether it takes nothing from a template any more, since a step that did has failed."""
    entry: Entry | None = None
    """What the step has recorded of it."""
    corrections: tuple[Correction, ...] | None = None
    """By sequence, if the step has taught them."""
    remembers: ExpansionHead | None = None
    """What its step cache remembers."""
    preview: tuple[int, Tensor] | None = None
    """What it looks like after the step: which preview, and (height, width, 3) uint8."""


@dataclass(frozen=True)
class RowBlamed:
    """A row that could not be computed, as of its last good step."""

    number: int
    error: ErrorBody
    cause: str = ""
    """What was raised, for the log."""


@dataclass(frozen=True)
class RankReady:
    """The model is loaded and has computed a picture."""

    profile: Profile
    """What steps cost here."""
    controls: tuple[ControlCard, ...] = ()
    """ControlNets that are loaded beside it."""


@dataclass(frozen=True)
class RankRefused:
    """The model cannot be loaded as it is configured, or cannot compute; the process ends."""

    error: ErrorBody


@dataclass(frozen=True)
class Pong:
    """The process runs."""


@dataclass(frozen=True)
class RankStepEnded:
    """A step has been computed. Those of a group all tell so; its first rank tells what it did."""

    order: int
    began_s: float
    ended_s: float
    """By the machine's monotonic clock."""
    advanced: tuple[RowAdvanced, ...] = ()
    blamed: tuple[RowBlamed, ...] = ()
    sample: StepSample | None = None
    cached: StepCacheCounters | None = None


@dataclass(frozen=True)
class RankStepFailed:
    """Nothing of a step has come to anything: its rows are as they were."""

    order: int
    reason: Literal["stale", "group", "memory", "raised", "control"]
    """`group`: another member has ended or closed it. `control`: residuals do not come."""
    text: str = ""
    lost: tuple[tuple[int, str], ...] = ()
    """Rows that cannot be asked for any more where they were open, and why."""


Answer = RankReady | RankRefused | Pong | RankStepEnded | RankStepFailed


# Messages, rows, templates and corrections as msgpack. An object is a map of its fields with the name of its class;
# of a tensor there is the place where it lies.


KEPT: Final = (CachedTemplate, Correction, SequenceLoras)
"""What rows share: a rank has one object of each, whatever row it came with."""
_CLASS: Final = ""
"""The key of a class's name, which no field and no conditioning has."""
_CLASSES: Final[Mapping[str, Any]] = {
    each.__name__: each
    for each in (
        *(*get_args(Order), *get_args(Answer), RankSetup, OrderedRow, RowAdvanced, RowBlamed),
        *(StateRing, TensorLocation, ExpansionHead, DenoiserConfig, ErrorBody, Profile, StepCacheCounters),
        *(StepSample, ControlCard, ControlWork, Row, RowInputs, RowReuse, RowWishes, RowKey, RecordingSpec),
        *(Adapters, RowControl, RowLora),
        *(SamplerTable, TaylorRule, TaylorSeerSchedule, CachedTemplate, CachedBlock, Entry, Correction),
        *(StoredTensor, Region, SequenceLoras, LowRankFactors, CacheForm, Priority, Prompt, frozenset),
        *(ControlNetSession, ControlLinkAddress, DataPath),
    )
}
"""Nothing else is made of what comes."""


def pack(
    thing: object,
    places: TensorPlaces | None = None,
    number: Callable[[object], int | None] = lambda _: None,
) -> bytes:
    """`thing` as bytes; its tensors are put into `places`, and only the `number` is told of objects that have one."""

    def fields(part: Any) -> Any:
        kind = type(part)
        if kind is tuple:
            return list(part)
        if isinstance(part, Tensor):
            if places is None:
                raise TypeError("a message without shared memory has a tensor")
            return {_CLASS: "Tensor", "at": list(places.place(part))}
        if isinstance(part, torch.dtype):
            return {_CLASS: "dtype", "name": dtype_name(part)}
        name = kind.__name__
        if _CLASSES.get(name) is not kind:
            if isinstance(part, Mapping):
                return dict(part)
            raise TypeError(f"received a {kind.__name__}; accepted in messages: {', '.join(_CLASSES)}")
        if isinstance(part, KEPT) and (known := number(part)) is not None:
            return {_CLASS: "kept", "number": known}
        return {_CLASS: name, **_fields(part)}

    packed: bytes = msgpack.packb(thing, default=fields, strict_types=True)
    return packed


def _fields(part: Any) -> dict[str, Any]:
    if isinstance(part, BaseModel):
        return {"fields": part.model_dump(mode="json")}
    if isinstance(part, Enum):
        return {"value": part.value}
    if isinstance(part, frozenset):
        return {"items": list(part)}
    if isinstance(part, tuple):  # a named one
        return dict(zip(part._fields, part, strict=True))  # type: ignore[attr-defined]  # of a NamedTuple
    return {each.name: getattr(part, each.name) for each in dataclasses.fields(part) if each.init}


def _made(kind: Any, fields: dict[str, Any]) -> Any:
    if issubclass(kind, BaseModel):
        return kind.model_validate(fields["fields"])
    if issubclass(kind, Enum | frozenset):
        return kind(*fields.values())
    return kind(**fields)


def _no_tensor(place: TensorLocation) -> Tensor:
    raise ValueError(f"received a tensor at {place}; accepted are messages without")


def unpack(
    data: bytes,
    tensor: Callable[[TensorLocation], Tensor] = _no_tensor,
    kept: Mapping[int, object] | None = None,
) -> Any:
    """The inverse of :func:`pack`; `tensor` finds what lies at a place, and `kept` are numbered objects."""

    def made(fields: dict[str, Any]) -> Any:
        match fields:
            case {"": "Tensor", "at": at}:
                return tensor(TensorLocation(*at))
            case {"": "dtype", "name": name}:
                return getattr(torch, name)
            case {"": "kept", "number": known}:
                return (kept or {})[known]
            case {"": kind}:
                return _made(_CLASSES[kind], {name: each for name, each in fields.items() if name != _CLASS})
        return fields

    return msgpack.unpackb(data, object_hook=made, use_list=False, strict_map_key=False)
