"""The services as commands: which module, which flags, which environment; and the ports of gateways."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from giornata.config import ENV_PREFIX
from giornata.wire.workers import ServiceName
from giornata_tools.launcher.model import StackModel
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.process import LaunchCommand
from giornata_tools.launcher.servers import free_ports

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
    """What tells a service to load `model`."""
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
