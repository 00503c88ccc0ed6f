"""How a denoiser's end is opened."""

from __future__ import annotations

import os
import socket
from typing import Final

from giornata.control.link.frames import MAX_MESSAGE_BYTES, MalformedFrame, read_from_instance
from giornata.control.link.losses import LinkLost
from giornata.control.link.slabs import SharedSlab
from giornata.control.link.sockets import FramedConnection
from giornata.wire.control_steps import LinkOpened, OpenLink
from giornata.wire.controlnets import DataPath

CONNECT_S: Final = 5.0
"""How long an instance may take to be reached, and again to admit this denoiser."""


def connected(path: DataPath, address: str, token: str, slab: SharedSlab) -> FramedConnection:
    """A connection to the instance at `address`, which has admitted this denoiser and has its slab.

    Raises:
        LinkLost: no instance is there, or it refuses.
    """
    try:
        connection = FramedConnection(_socket(path, address))
    except (OSError, ValueError) as error:
        raise LinkLost(f"no ControlNet instance can be reached at {address}: {error}") from error
    opening = OpenLink(token=token, path=path, slab_bytes=len(slab.memory), memory=slab.device_memory)
    try:
        if slab.descriptor is None:
            connection.send(opening)
        else:
            connection.send_with(opening, [slab.descriptor])
        _wait_until_opened(connection)
    except (OSError, MalformedFrame) as error:
        connection.close()
        raise LinkLost(
            f"the ControlNet instance at {address} does not open the data path: {error}"
        ) from error
    return connection


def _wait_until_opened(connection: FramedConnection) -> None:
    data, descriptor = connection.receive_opening(MAX_MESSAGE_BYTES, CONNECT_S)
    if descriptor is not None:
        os.close(descriptor)
    message = read_from_instance(data)
    if not isinstance(message, LinkOpened):
        raise MalformedFrame(f"the first message is of kind {message.kind!r}; accepted: 'opened'")


def _socket(path: DataPath, address: str) -> socket.socket:
    if path is DataPath.TCP:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
    found = socket.socket(socket.AF_UNIX)
    try:
        found.settimeout(CONNECT_S)
        found.connect(address)
    except BaseException:
        found.close()
        raise
    return found
