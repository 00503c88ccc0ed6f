"""What the user's environment says of a stack."""

from __future__ import annotations

import os
from pathlib import Path

from giornata.config import ServiceConfig, load
from giornata_tools.launcher.model import Model
from giornata_tools.launcher.plan import StackPlan


def plan(chosen: Model, state: Path, logs: Path, torch_threads: int) -> StackPlan:
    """Plan one instance of every service, with the servers and the drain limit that the environment names.

    Exits with status 2 and a report of every mistake in what all services share, before anything is started.
    """
    config = load(ServiceConfig, "launcher", [])
    return StackPlan(
        state=state,
        logs=logs,
        model=chosen.source,
        model_name=chosen.name,
        nats_url=os.environ.get("GIORNATA_NATS_URL") or None,
        redis_url=os.environ.get("GIORNATA_REDIS_URL") or None,
        torch_threads=torch_threads,
        drain_s=config.drain_s,
        ready_s=chosen.ready_s,
    )
