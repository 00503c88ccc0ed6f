"""Whole messages between leader and rank over a pair of Unix sockets, with open files beside them.

The socket ends when the process at its other end does, however that ends.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

HEAD: Final = struct.Struct("<QH")
"""Bytes of a message, and how many files come with it."""
_DESCRIPTOR: Final = struct.Struct("@i")
CHUNK: Final = 1 << 18
MOST_FILES: Final = 64
_CLOSED_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class ChannelClosed(ConnectionError):
    """The other end has closed, or takes nothing in."""


class Message(NamedTuple):
    """What has come."""

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
        """What a selector waits for: it is readable where :meth:`receive_ready` has something to tell."""
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
