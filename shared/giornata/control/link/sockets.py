"""Messages of the data path as bytes, and the blocking sockets that carry them."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType, UnionType
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel

from giornata.wire import codec
from giornata.wire.controlnets import FromDenoiser, FromInstance, LinkMessage
from giornata.wire.errors import SchemaMismatch

# What a denoiser hears instead of a sample.


class LinkLost(ConnectionError):
    """The data path to the instance is closed or broken: the rows have to be opened elsewhere."""


class LinkLate(TimeoutError):
    """An answer has not come in time; the link is up."""


class ControlFailed(Exception):
    """The instance refused a step, or failed in it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        """Stable."""
        self.message = message


# Messages of the data path as bytes: four bytes of length, little-endian, and msgpack.


LENGTH: Final = struct.Struct("<I")
MAX_OPENING_BYTES: Final = 8 << 10
"""Most bytes of a message from a denoiser that is not yet admitted."""
MAX_MESSAGE_BYTES: Final = 64 << 10


class MalformedFrame(ValueError):
    """The bytes that came are no message of the data path."""


M = TypeVar("M", bound=BaseModel)


def encode_frame(message: BaseModel) -> bytes:
    """`message` with its length before it."""
    data = codec.encode(message, limit_bytes=MAX_MESSAGE_BYTES)
    return LENGTH.pack(len(data)) + data


def frame_length(head: bytes | bytearray, limit_bytes: int) -> int:
    """Bytes of the message behind these four.

    Raises:
        Malformed: an empty message, or one of more than `limit_bytes`.
    """
    (length,) = LENGTH.unpack(head)
    if not 1 <= length <= limit_bytes:
        raise MalformedFrame(f"a message of {length} bytes; accepted: 1 to {limit_bytes}")
    return int(length)


def read_from_denoiser(data: bytes) -> FromDenoiser:
    """A message to an instance; Malformed where it is none."""
    message: FromDenoiser = _read(_FROM_DENOISER, data)
    return message


def read_from_instance(data: bytes) -> FromInstance:
    """A message to a denoiser; Malformed where it is none."""
    message: FromInstance = _read(_FROM_INSTANCE, data)
    return message


def _by_kind(union: UnionType) -> Mapping[str, type[BaseModel]]:
    kinds: tuple[type[BaseModel], ...] = get_args(union)
    return MappingProxyType({kind.model_fields["kind"].default: kind for kind in kinds})


_FROM_DENOISER: Final = _by_kind(FromDenoiser)
_FROM_INSTANCE: Final = _by_kind(FromInstance)


def _read(kinds: Mapping[str, type[BaseModel]], data: bytes) -> Any:
    try:
        fields = codec.fields_of(LinkMessage, data)
        name = fields.get("kind")
        if not isinstance(name, str) or name not in kinds:
            raise MalformedFrame(f"a message of kind {str(name)[:50]!r}; accepted: {', '.join(kinds)}")
        return codec.validated(kinds[name], fields)
    except SchemaMismatch as error:
        raise MalformedFrame(str(error)) from error


# Blocking sockets of the data path: whole messages in and out, and an end to waiting for a peer that is
# gone.


STALLED_S: Final = 5
"""How long a peer may take in nothing of what is sent, or leave the network unanswered, before it counts as gone."""
_GONE: Final = (
    ("TCP_KEEPIDLE", STALLED_S),
    ("TCP_KEEPINTVL", 1),
    ("TCP_KEEPCNT", STALLED_S),
    ("TCP_USER_TIMEOUT", STALLED_S * 1000),
)
"""Options that end a connection whose other host does not answer: to nothing, and to what was sent."""


class LinkEnded(ConnectionError):
    """The peer has closed its end, or was too slow."""


class FramedConnection:
    """One end of a connection. One thread reads; any may send.

    Args:
        connected: a stream socket, from now on this object's.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        limit = struct.pack("@ll", STALLED_S, 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _GONE:
                if hasattr(socket, name):
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: BaseModel, data: memoryview | None = None) -> None:
        """A message, and the tensor's bytes behind it.

        Raises:
            OSError: the connection is broken, or the peer takes nothing in. It may have got a part, so nothing more can
                be sent.
        """
        head = encode_frame(message)
        with self._sending:
            self._socket.sendall(head)
            if data is not None:
                self._socket.sendall(data)

    def send_with(self, message: BaseModel, descriptors: Sequence[int]) -> None:
        """A message with open files. Raises OSError as :meth:`send` does."""
        head = encode_frame(message)
        with self._sending:
            sent = socket.send_fds(self._socket, [head], descriptors)
            if sent < len(head):
                self._socket.sendall(head[sent:])

    def receive(self) -> bytes:
        """The next message, however long it takes.

        Raises:
            Ended: the peer has closed.
            OSError: the connection is broken.
            Malformed: its length.
        """
        head = bytearray(LENGTH.size)
        self.receive_into(memoryview(head))
        data = bytearray(frame_length(head, MAX_MESSAGE_BYTES))
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, data: memoryview) -> None:
        """Fill `data`. Raises Ended and OSError as :meth:`receive` does."""
        while data:
            count = self._socket.recv_into(data, 0, socket.MSG_WAITALL)
            if not count:
                raise LinkEnded("the connection was closed")
            data = data[count:]

    def receive_opening(self, limit_bytes: int, within_s: float) -> tuple[bytes, int | None]:
        """The first message, with the file that came along over a Unix socket; it is the caller's to close.

        Raises:
            Ended: the peer has closed, or has not sent all of it in time.
            OSError: the connection is broken.
            Malformed: its length.
        """
        until_s = time.monotonic() + within_s
        descriptors: list[int] = []
        try:
            head = self._opening(LENGTH.size, until_s, descriptors)
            data = self._opening(frame_length(head, limit_bytes), until_s, descriptors)
            self._socket.settimeout(None)
            if len(descriptors) > 1:
                raise MalformedFrame(f"{len(descriptors)} files; accepted: one at most")
            return data, descriptors.pop() if descriptors else None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _opening(self, count: int, until_s: float, descriptors: list[int]) -> bytes:
        found = b""
        while len(found) < count:
            self._socket.settimeout(max(until_s - time.monotonic(), 1e-3))
            try:
                if self._socket.family == socket.AF_UNIX:
                    some, came, _, _ = socket.recv_fds(self._socket, count - len(found), 1)
                    descriptors += came
                else:
                    some = self._socket.recv(count - len(found))
            except TimeoutError as error:
                raise LinkEnded("the first message did not come in time") from error
            if not some:
                raise LinkEnded("the connection was closed before the first message")
            found += some
        return found

    def finish(self) -> None:
        """Send nothing more; the peer reads to the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def stop_reading(self) -> None:
        """Wake the thread that reads: it sees the end. What others send still travels."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def interrupt(self) -> None:
        """Wake whoever reads or sends; nothing travels any more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Only when no thread uses it any more."""
        self._socket.close()
