"""Whether a port can be listened on."""

from __future__ import annotations

import socket


def port_error(host: str, port: int) -> OSError | None:
    """Why no server can listen at `port` of `host`; None where one can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(address)
            own.listen()
    except OSError as error:
        return error
    return None
