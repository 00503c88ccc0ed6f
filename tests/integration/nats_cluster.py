"""Three real NATS servers in a cluster, to be killed and started again one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nats.js import JetStreamContext
from nats.js.errors import ServiceUnavailableError

from giornata.bus.connection import ask_jetstream
from giornata.nats_users import USERS_CONF, password_file, write_cluster, write_users
from giornata.wire.subjects import NatsRole
from giornata_tools.launcher.plan import free_ports
from tests.integration.nats_server import NatsServer
from tests.patience import HUNG_S

NAMES = ("n1", "n2", "n3")


class NatsCluster:
    """The servers by name; each has a store of its own, and all let the same users in."""

    def __init__(self, folder: Path) -> None:
        self.users = folder / "users"
        write_users(self.users, anonymous=None)
        ports = free_ports(2 * len(NAMES))  # at once, for none is held until its server listens
        places = [f"127.0.0.1:{port}" for port in ports[len(NAMES) :]]
        self.servers: dict[str, NatsServer] = {}
        for name, place, port in zip(NAMES, places, ports, strict=False):
            write_cluster(self.users, place, places, f"{name}.conf")
            (folder / name).mkdir()
            includes = f'include "../users/{USERS_CONF}"\ninclude "../users/server/{name}.conf"'
            self.servers[name] = NatsServer(folder / name, f"server_name: {name}\n{includes}", port=port)

    @property
    def url(self) -> str:
        """Addresses of all servers, with commas in between."""
        return ",".join(server.url for server in self.servers.values())

    def password_file(self, user: NatsRole) -> Path:
        return password_file(self.users, user)

    async def leader(self, jetstream: JetStreamContext, stream: str) -> str:
        """Which server leads a stream, once one does."""

        async def read() -> str:
            info = await jetstream.stream_info(stream)
            if info.cluster is None or info.cluster.leader is None:
                raise ServiceUnavailableError
            return info.cluster.leader

        return await ask_jetstream(read, HUNG_S)


@contextmanager
def nats_cluster(folder: Path) -> Iterator[NatsCluster]:
    """Started, until it is left."""
    cluster = NatsCluster(folder)
    try:
        for server in cluster.servers.values():
            server.start()
        yield cluster
    finally:
        for server in cluster.servers.values():
            server.kill()
