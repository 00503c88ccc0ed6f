"""The embedded NATS: one server, or a cluster; fresh passwords at every start."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from giornata.nats_users import password_file, write_cluster, write_users
from giornata.wire.permissions import User
from giornata_tools.launcher.servers import NATS, NatsServer, cluster_file, free_ports


class EmbeddedNats:
    """The servers as values, and where each user's password lies.

    Args:
        state: folder of stores and passwords. The stores of one server and of a cluster are different ones.
        n: how many servers.
    """

    def __init__(self, state: Path, n: int) -> None:
        self._users = state / "nats-users"
        names = [NATS] if n == 1 else [f"{NATS}-{i + 1}" for i in range(n)]
        folders = [state / "nats"] if n == 1 else [state / f"nats-{i + 1}" for i in range(n)]
        self.servers = {
            name: NatsServer(name, folder, self._users, clustered=n > 1)
            for name, folder in zip(names, folders, strict=True)
        }
        self._write_users()

    @property
    def url(self) -> str:
        """Addresses of the servers that have been up, with commas between them."""
        return ",".join(f"nats://127.0.0.1:{one.port}" for one in self.servers.values() if one.port > 0)

    def password_file(self, user: User) -> Path:
        """Where the password of `user` lies."""
        return password_file(self._users, user)

    def listens(self, name: str, port: int) -> None:
        """A server has taken a port: its successors take it again, so that clients find them."""
        self.servers[name] = replace(self.servers[name], port=port)

    def _write_users(self) -> None:
        """A client without a password is an application: only this machine reaches the servers."""
        shutil.rmtree(self._users, ignore_errors=True)
        write_users(self._users, anonymous=User.APPLICATION)
        if len(self.servers) > 1:
            places = [f"127.0.0.1:{port}" for port in free_ports(len(self.servers))]
            for name, place in zip(self.servers, places, strict=True):
                write_cluster(self._users, place, places, cluster_file(name))
