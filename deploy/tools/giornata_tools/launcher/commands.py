"""The services as commands: which module, which flags, which environment. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from giornata.config import ENV_PREFIX
from giornata.wire.workers import ServiceName
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.process import Command

MODULES: Final[Mapping[ServiceName, str]] = {
    ServiceName.GATEWAY: "giornata_gateway",
    ServiceName.ROUTER: "giornata_router",
    ServiceName.DENOISER: "giornata_denoiser",
    ServiceName.PREPOST: "giornata_prepost",
    ServiceName.CONTROLNET: "giornata_controlnet",
    ServiceName.LORA_STORE: "giornata_lora_store",
}
"""The module of each service, which starts as ``python -m <module>``."""


@dataclass(frozen=True)
class ServiceSurroundings:
    """What every service is told."""

    plan: StackPlan
    nats_url: str
    nats_password_file: Path | None
    """The password of this service's user; None where the address holds user and password, or none are asked for."""
    redis_url: str


def environment(base: Mapping[str, str], around: ServiceSurroundings) -> dict[str, str]:
    """Add the addresses, the model and the thread count to `base`.

    These are no flags, because addresses may hold passwords and everybody can read a command line.
    """
    plan, password_file = around.plan, around.nats_password_file
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(plan.torch_threads)
    )
    own = {
        "NATS_URL": around.nats_url,
        "REDIS_URL": around.redis_url,
        "MODEL": plan.model,
        "DRAIN_S": f"{plan.drain_s:g}",
        **({"MODEL_NAME": plan.model_name} if plan.model_name else {}),
        **({"NATS_PASSWORD_FILE": str(password_file)} if password_file else {}),
        **({"REPLICAS": str(plan.nats_servers)} if plan.nats_servers > 1 else {}),
    }
    return {
        **base,
        **threads,
        **{ENV_PREFIX + name: value for name, value in own.items()},
        "PYTHONUNBUFFERED": "1",
    }


def service_command(service: ServiceName, instance: str, env: Mapping[str, str], *flags: str) -> Command:
    """The command that starts one instance of `service`."""
    return Command(instance, (sys.executable, "-m", MODULES[service], "--instance", instance, *flags), env)


def gateway_flags(host: str, port: int, port_file: Path) -> tuple[str, ...]:
    """Say where a gateway listens; with port 0 it takes a free one and writes its number to `port_file`."""
    return "--host", host, "--port", str(port), "--port-file", str(port_file)
