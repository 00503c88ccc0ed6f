"""Blocking sockets of the data path: whole messages in and out, and an end to waiting for a peer that is gone."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from pydantic import BaseModel

from giornata.control.link.frames import LENGTH, MAX_MESSAGE_BYTES, MalformedFrame, framed, length_of

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
        head = framed(message)
        with self._sending:
            self._socket.sendall(head)
            if data is not None:
                self._socket.sendall(data)

    def send_with(self, message: BaseModel, descriptors: Sequence[int]) -> None:
        """A message with open files. Raises OSError as :meth:`send` does."""
        head = framed(message)
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
        data = bytearray(length_of(head, MAX_MESSAGE_BYTES))
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
            data = self._opening(length_of(head, limit_bytes), until_s, descriptors)
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
