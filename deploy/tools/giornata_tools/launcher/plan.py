"""The plan of a stack as a value: services as commands, and the folders of a stack."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from giornata.config import ENV_PREFIX, ServiceConfig, load
from giornata.scratch import lock_if_free
from giornata.wire.workers import ServiceName
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.process import LaunchCommand, LaunchError
from giornata_tools.launcher.servers import free_ports

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
