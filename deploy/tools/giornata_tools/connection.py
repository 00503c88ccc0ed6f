"""The way to the stack that ``giornata up`` runs, and whether a port can be listened on."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

# Whether a port can be listened on.


def port_error(host: str, port: int) -> OSError | None:
    """Return why no server can listen at `port` of `host`; None where one can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(address)
            own.listen()
    except OSError as error:
        return error
    return None


# How to reach the stack that ``giornata up`` runs: a file in its state folder, which other commands read.


FILE: Final = "connection.json"


@dataclass(frozen=True)
class StackAddresses:
    """Addresses of a running stack, and where the passwords for its servers lie."""

    url: str
    nats_url: str
    blobs_url: str
    password_files: Mapping[str, str]
    """By user of NATS; empty for servers that the stack has not started itself."""

    def password_file(self, user: str) -> Path | None:
        """The file with the password of `user`; None where the stack knows none."""
        return Path(self.password_files[user]) if user in self.password_files else None


@contextmanager
def published(state: Path, connection: StackAddresses) -> Iterator[None]:
    """Keep the file in the folder `state`, readable by its owner alone, while inside.

    It is locked until this process ends, however that is: the lock tells a running stack's file from one left behind.
    """
    path, draft = state / FILE, state / f".{FILE}.new"
    draft.unlink(missing_ok=True)
    with open(draft, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump(asdict(connection), file)
        file.flush()
        draft.replace(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def running(state: Path) -> StackAddresses | None:
    """The connection of the stack that runs with the folder `state`; None without one."""
    with suppress(OSError, ValueError, TypeError), (state / FILE).open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # held: the stack's process lives
            return StackAddresses(**json.load(file))
    return None
