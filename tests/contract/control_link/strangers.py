"""A listener in this process, and strangers who know its words."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgpack
import torch
from hypothesis import HealthCheck, settings

from giornata.control.link import encode_frame, slabs
from giornata.control.link.client import ControlLink
from giornata.control.link.server import ControlStepRequest, Listener, is_known_token
from giornata.frames import LENGTH
from giornata.wire import codec
from giornata.wire.controlnets import (
    CancelStep,
    DataPath,
    Dtype,
    LinkOpened,
    OpenLink,
    ResidualReady,
    ResidualsRequest,
)
from tests.patience import HUNG_S

TOKEN = "a-secret"  # noqa: S105 - of these tests
CPU = torch.device("cpu")
SLAB_BYTES = 4096
ASK = ResidualsRequest(
    number=0,
    row="j/1/0",
    step=3,
    level=0.5,
    whole=True,
    latents_dtype=Dtype.FLOAT32,
    dtype=Dtype.FLOAT32,
    offsets=(0, 1024),
    tokens=(4, 2),
    channels=(64, 128),
)
LATENTS_BYTES = 1024
FUZZED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@dataclass
class Served:
    """A listener in this process."""

    listener: Listener
    asked: queue.SimpleQueue[ControlStepRequest] = field(default_factory=queue.SimpleQueue)

    def connect(self, path: DataPath) -> socket.socket:
        """A socket of a stranger."""
        address = self.listener.addresses[path]
        if path is DataPath.UNIX:
            found = socket.socket(socket.AF_UNIX)
            found.connect(address)
        else:
            host, port = address.split(":")
            found = socket.create_connection((host, int(port)))
        found.settimeout(HUNG_S)
        return found

    def still_serves(self) -> None:
        """A denoiser gets its sample."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.asked.get_nowait()
        address = self.listener.addresses[DataPath.UNIX]
        with ControlLink(DataPath.UNIX, address, TOKEN, slab_bytes=SLAB_BYTES, device=CPU) as link:
            latents = torch.randn(4, 64)
            with link.ask(
                row="good",
                step=0,
                level=1.0,
                latents=latents,
                tokens=[4],
                channels=[64],
                dtype=torch.float32,
                whole=True,
            ) as asked:
                step = self.asked.get(timeout=HUNG_S)
                assert step.row == "good"
                step.answer(0, step.latents)
                assert torch.equal(asked.sample(0, HUNG_S), latents)


@contextlib.contextmanager
def listening_at(unix: Path | None, tcp: tuple[str, int] | None) -> Iterator[Served]:
    """A listener in this process."""
    asked: queue.SimpleQueue[ControlStepRequest] = queue.SimpleQueue()
    admits = partial(is_known_token, tokens=[TOKEN])
    with Listener(admits, asked.put, unix=unix, tcp=tcp, device=CPU) as listener:
        yield Served(listener, asked)


def to_the_end(stranger: socket.socket) -> bytes:
    """What the other end says before it closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := stranger.recv(1 << 16):
            found += more
    return found


def say(stranger: socket.socket, data: bytes) -> None:
    """As much as the other end listens to."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stranger.sendall(data)


def admitted(served: Served, path: DataPath) -> socket.socket:
    """A stranger who knows the token."""
    stranger = served.connect(path)
    opening = encode_frame(OpenLink(token=TOKEN, path=path, slab_bytes=SLAB_BYTES))
    if path is DataPath.UNIX:
        slab = slabs.make_slab(path, SLAB_BYTES, CPU)
        assert slab.descriptor is not None
        socket.send_fds(stranger, [opening], [slab.descriptor])
        slab.sent()
    else:
        stranger.sendall(opening)
    opened = encode_frame(LinkOpened())
    assert stranger.recv(len(opened), socket.MSG_WAITALL) == opened
    return stranger


def changed(message: ResidualsRequest | CancelStep | OpenLink | ResidualReady, **fields: object) -> bytes:
    """A frame whose fields nobody has validated."""
    data = msgpack.packb({**codec.unpack(encode_frame(message)[LENGTH.size :]), **fields})
    return LENGTH.pack(len(data)) + bytes(data)
