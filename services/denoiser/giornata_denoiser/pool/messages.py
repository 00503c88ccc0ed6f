"""The messages of leader and ranks, over pairs of Unix sockets."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from giornata.planning.cost_model import Profile
from giornata.scheduling.degrees.pool import Devices
from giornata.wire.errors import ErrorBody
from giornata.wire.values import WireModel
from giornata.wire.workers import StepSample
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.pool.shared_memory import StateRing

# Whole messages between leader and rank over a pair of Unix sockets, with open files beside them.
#
# The socket ends when the process at its other end does, however that ends.


HEAD: Final = struct.Struct("<QH")
"""Bytes of a message, and how many files come with it."""
_DESCRIPTOR: Final = struct.Struct("@i")
CHUNK: Final = 1 << 18
MOST_FILES: Final = 64
_CLOSED_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class ChannelClosed(ConnectionError):
    """The other end has closed, or takes nothing in."""


class Message(NamedTuple):
    """A message that has come."""

    data: bytes
    files: tuple[int, ...]
    """Descriptors, the receiver's to close."""


class Channel:
    """One end. Any thread may send, one receives.

    Args:
        connected: a Unix stream socket, from now on this object's.
        patience_s: how long the other end may take in nothing of what is sent; None for ever.
    """

    def __init__(self, connected: socket.socket, patience_s: float | None = None) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._files: deque[int] = deque()
        self._ended = False
        if patience_s is not None:
            whole = int(patience_s)
            limit = struct.pack("@ll", whole, int((patience_s - whole) * 1e6))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        """Return what a selector waits for: it is readable where :meth:`receive_ready` has something to tell."""
        return self._socket.fileno()

    def send(self, data: bytes, files: Sequence[int] = ()) -> None:
        """Send a message; the files stay the sender's.

        Raises:
            Ended: the other end is gone, or has taken in nothing for too long. Nothing more can be sent then.
        """
        head = HEAD.pack(len(data), len(files))
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [head, data], files)
                whole = memoryview(head + data)[sent:] if sent < len(head) + len(data) else b""
                if whole:
                    self._socket.sendall(whole)
        except OSError as error:
            raise ChannelClosed(f"the other process does not listen: {error}") from error

    def receive(self) -> Message:
        """The next message, however long it takes. Raises Ended where none comes any more."""
        while (found := self._whole()) is None:
            if self._ended:
                raise ChannelClosed("the other process has ended")
            self._read(0)
        return found

    def receive_ready(self) -> tuple[tuple[Message, ...], bool]:
        """The messages that are here, and whether the other end has closed, so that no others come. Never waits."""
        while not self._ended:
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
        found: list[Message] = []
        while (message := self._whole()) is not None:
            found.append(message)
        return tuple(found), self._ended

    def end(self) -> None:
        """Wake whoever receives: nothing travels any more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only when no thread uses it any more."""
        self._socket.close()
        while self._files:
            os.close(self._files.popleft())

    def _read(self, flags: int) -> None:
        try:
            # Not `socket.recv_fds`, which drops the flags.
            room = socket.CMSG_SPACE(MOST_FILES * _DESCRIPTOR.size)
            data, beside, _, _ = self._socket.recvmsg(CHUNK, room, flags | _CLOSED_ON_EXEC)
        except BlockingIOError:
            raise
        except OSError:  # such as a reset by a process that was killed
            data, beside = b"", []
        self._buffer += data
        for level, kind, content in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % _DESCRIPTOR.size
                self._files += (descriptor for (descriptor,) in _DESCRIPTOR.iter_unpack(content[:whole]))
        self._ended = not data

    def _whole(self) -> Message | None:
        if len(self._buffer) < HEAD.size:
            return None
        length, count = HEAD.unpack_from(self._buffer)
        if len(self._buffer) < HEAD.size + length:
            return None
        data = bytes(self._buffer[HEAD.size : HEAD.size + length])
        del self._buffer[: HEAD.size + length]
        return Message(data, tuple(self._files.popleft() for _ in range(count)))


def pair(patience_s: float) -> tuple[Channel, socket.socket]:
    """The leader's end, and the socket of the rank's."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(here, patience_s), there


# What leader and ranks tell each other.
#
# Ranks unpickle what their own leader sends; a leader reads JSON from its ranks. Rows, slabs and kept
# objects are named by the leader's numbers.


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
    """A :class:`giornata_denoiser.rows.template.StoredTensor`."""

    data: TensorLayout
    scale: TensorLayout | None = None
    low: TensorLayout | None = None


class EntryLayout(WireModel):
    """The layout of an entry that a step recorded of a row."""

    level: float
    blocks: tuple[dict[str, StoredTensorLayout], ...]
    """By block: its parts by name."""


class CorrectionDeltaLayout(WireModel):
    """A part of a correction."""

    block: int
    part: str
    delta: StoredTensorLayout


class PreviewLayout(WireModel):
    """The layout of a row's preview after a step."""

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
