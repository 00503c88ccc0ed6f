"""Frames and memory between processes.

A frame is four bytes of length, little-endian, and a message; over Unix sockets open files travel with it.

The messages are msgpack. Who uses a connection says what is in them: a ControlNet's data path
(:mod:`giornata.control.link`), and the leader of a pool of devices with its ranks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

LENGTH: Final = struct.Struct("<I")
CHUNK: Final = 1 << 18
STALLED_S: Final = 5
"""How long a peer may take in nothing of what is sent, or leave the network unanswered, before it counts as gone."""
_GONE: Final = (
    ("TCP_KEEPIDLE", STALLED_S),
    ("TCP_KEEPINTVL", 1),
    ("TCP_KEEPCNT", STALLED_S),
    ("TCP_USER_TIMEOUT", STALLED_S * 1000),
)
"""Options that end a connection whose other host does not answer: to nothing, and to what was sent."""
_DESCRIPTOR: Final = struct.Struct("@i")
_CLOSED_ON_EXEC: Final = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class MalformedFrame(ValueError):
    """The bytes that came are no message of this connection."""


class PeerEnded(ConnectionError):
    """The peer has closed its end, or was too slow."""


def framed(data: bytes) -> bytes:
    """`data` with its length before it."""
    return LENGTH.pack(len(data)) + data


def frame_length(head: bytes | bytearray, limit_bytes: int) -> int:
    """Bytes of the message behind these four.

    Raises:
        MalformedFrame: an empty message, or one of more than `limit_bytes`.
    """
    (length,) = LENGTH.unpack(head)
    if not 1 <= length <= limit_bytes:
        raise MalformedFrame(f"a message of {length} bytes; accepted: 1 to {limit_bytes}")
    return int(length)


class FramedConnection:
    """One end of a connection. One thread reads; any may send.

    Args:
        connected: a stream socket, from now on this object's.
        limit_bytes: of a message that is received.
        files: most open files that may come with one read; others are closed.
    """

    def __init__(self, connected: socket.socket, limit_bytes: int, *, files: int = 0) -> None:
        self._socket, self._limit_bytes, self._most_files = connected, limit_bytes, files
        self._sending = threading.Lock()
        self._read = bytearray()
        self._files: deque[int] = deque()
        self._ended = False
        limit = struct.pack("@ll", STALLED_S, 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _GONE:
                if hasattr(socket, name):
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Return what a selector waits for: it is readable where :meth:`receive_ready` has something to tell."""
        return self._socket.fileno()

    def send(self, frame: bytes, files: Sequence[int] = (), behind: memoryview | None = None) -> None:
        """Send what :func:`framed` gave, with open files, which stay the sender's, and a tensor's bytes `behind` it.

        Raises:
            OSError: the connection is broken, or the peer takes nothing in. It may have got a part, so nothing more can
                be sent.
        """
        with self._sending:
            sent = socket.send_fds(self._socket, [frame], files) if files else 0
            if sent < len(frame):
                self._socket.sendall(memoryview(frame)[sent:])
            if behind is not None:
                self._socket.sendall(behind)

    def receive(self) -> bytes:
        """The next message, however long it takes; its files are there for :meth:`take_file`.

        Raises:
            PeerEnded: the peer has closed.
            OSError: the connection is broken.
            MalformedFrame: its length.
        """
        return self._whole(self._limit_bytes)

    def receive_first(self, limit_bytes: int, within_s: float) -> tuple[bytes, int | None]:
        """The first message, with the file that came along over a Unix socket; it is the caller's to close.

        Raises:
            PeerEnded: the peer has closed, or has not sent all of it in time.
            OSError: the connection is broken.
            MalformedFrame: its length, or the number of files.
        """
        admitted, self._most_files = self._most_files, 1
        try:
            data = self._whole(limit_bytes, time.monotonic() + within_s)
            if len(self._files) > 1:
                raise MalformedFrame(f"{len(self._files)} files; accepted: one at most")
            return data, self._files.popleft() if self._files else None
        finally:
            self._most_files = admitted
            self._close_files()

    def receive_into(self, data: memoryview) -> None:
        """Fill `data` with what follows a message; raises PeerEnded and OSError as :meth:`receive` does."""
        while data:
            count = self._socket.recv_into(data, 0, socket.MSG_WAITALL)
            if not count:
                raise PeerEnded("the connection was closed")
            data = data[count:]

    def receive_ready(self) -> tuple[tuple[bytes, ...], bool]:
        """The messages that are here, and whether the peer has closed, so that no others come. Never waits.

        Raises:
            MalformedFrame: a length.
        """
        while not self._ended:
            try:
                self._fill(CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:  # such as a reset by a process that was killed
                self._ended = True
        found: list[bytes] = []
        while len(self._read) >= LENGTH.size:
            end = LENGTH.size + frame_length(self._read[: LENGTH.size], self._limit_bytes)
            if len(self._read) < end:
                break
            found.append(bytes(self._read[LENGTH.size : end]))
            del self._read[:end]
        return tuple(found), self._ended

    def take_file(self) -> int:
        """The next open file that has come, the caller's to close; MalformedFrame where there is none."""
        if not self._files:
            raise MalformedFrame("a message came without its file")
        return self._files.popleft()

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
        self._close_files()

    def _whole(self, limit_bytes: int, until_s: float | None = None) -> bytes:
        """The next message, of which nothing behind it is read."""
        head = self._exactly(LENGTH.size, until_s)
        data = self._exactly(frame_length(head, limit_bytes), until_s)
        if until_s is not None:
            self._socket.settimeout(None)
        return data

    def _exactly(self, count: int, until_s: float | None) -> bytes:
        while len(self._read) < count:
            if until_s is not None:
                self._socket.settimeout(max(until_s - time.monotonic(), 1e-3))
            try:
                self._fill(count - len(self._read), 0)
            except TimeoutError as error:
                raise PeerEnded("the first message did not come in time") from error
            if self._ended:
                raise PeerEnded("the connection was closed")
        data = bytes(self._read[:count])
        del self._read[:count]
        return data

    def _fill(self, most: int, flags: int) -> None:
        """Read once, with the files that come along; not by `socket.recv_fds`, which drops the flags."""
        room = socket.CMSG_SPACE(self._most_files * _DESCRIPTOR.size) if self._most_files else 0
        data, beside, _, _ = self._socket.recvmsg(most, room, flags | _CLOSED_ON_EXEC)
        self._read += data
        for level, kind, content in beside:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(content) - len(content) % _DESCRIPTOR.size
                self._files += (descriptor for (descriptor,) in _DESCRIPTOR.iter_unpack(content[:whole]))
        self._ended = not data

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.popleft())


# Memory without a name that processes of one machine share: a descriptor of it travels over a Unix socket. It goes with
# the last process that has mapped it, so that nothing stays behind of a process that is killed.


_SEALABLE: Final = hasattr(os, "memfd_create")
"""Whether the memory can be kept from shrinking under whoever has mapped it."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if _SEALABLE else 0


def allocate_memory(name: str, size_bytes: int) -> int:
    """A descriptor of new memory, the caller's to close; `name` is shown in the process's maps alone.

    Raises:
        OSError: there is not so much memory, as far as the platform can tell.
    """
    descriptor = _unnamed_file(name)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size_bytes)
        else:
            os.ftruncate(descriptor, size_bytes)
        if _SEALABLE:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Whether the memory cannot shrink, as far as the platform can tell; raises OSError for a closed descriptor."""
    return not _SEALABLE or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS


def map_memory(descriptor: int, size_bytes: int, *, touched: bool = True) -> mmap.mmap:
    """The memory in this process; where it is not `touched`, pages come as they are read. OSError if it cannot be."""
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if touched else 0)
    return mmap.mmap(descriptor, size_bytes, flags)


def _unnamed_file(name: str) -> int:
    if _SEALABLE:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)  # noqa: PTH108 - a descriptor, not a path, is what stays
    return descriptor
