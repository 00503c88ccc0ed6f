"""What to run, as a value, and when to try again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from giornata.config import ServiceConfig, load
from giornata.wire.workers import ServiceName
from giornata_tools.launcher.model import StackModel

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
    """What a stack runs."""

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
