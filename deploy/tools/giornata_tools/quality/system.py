"""The system that is measured: one that runs already, or a stack that is started for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from giornata.fleet import Fleet
from giornata.wire.errors import NotPermitted, ServiceUnavailable
from giornata.wire.models import ModelCard
from giornata_tools.checkout import MODELS
from giornata_tools.launcher import model
from giornata_tools.launcher.plan import planned
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.servers import socket_folder
from giornata_tools.launcher.stack import running
from giornata_tools.launcher.watch import TelemetryWatch

HEARD_S: Final = 10.0
"""How long a running system's telemetry is waited for; it comes 2-4 times a second."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class System:
    """Where edits go, and the model that makes them."""

    nats_url: str
    redis_url: str | None
    api_key: str | None
    card: ModelCard


@asynccontextmanager
async def attached(nats_url: str, model_name: str | None) -> AsyncIterator[System]:
    """The system that runs at `nats_url`; its telemetry is heard as the user `observer`.

    Raises:
        LaunchError: no server answers, or lets us hear; no worker serves `model_name`, or several models are served and
            none is named.
    """
    watch = TelemetryWatch()
    password_file = os.environ.get("GIORNATA_NATS_PASSWORD_FILE")
    try:
        async with watch.listening(nats_url, Path(password_file) if password_file else None):
            await watch.until(
                lambda fleet: bool(fleet.cards()),
                HEARD_S,
                lambda _: "no model is served at this NATS address.",
            )
            card = _chosen(watch.fleet, model_name)
    except (ServiceUnavailable, NotPermitted) as error:
        raise LaunchError(str(error)) from error
    redis_url, key = (os.environ.get(name) or None for name in ("GIORNATA_REDIS_URL", "GIORNATA_API_KEY"))
    yield System(nats_url, redis_url, key, card)


@asynccontextmanager
async def started(logs: Path, torch_threads: int, say: Say) -> AsyncIterator[System]:
    """A stack of one instance of each service, drained on leaving.

    Raises:
        LaunchError: something did not start, or did not end in order.
    """
    chosen = await model.choose(os.environ, None, MODELS, say)
    with tempfile.TemporaryDirectory(prefix="giornata-", dir=socket_folder()) as state:
        plan = planned(chosen, Path(state), logs, torch_threads, {"GIORNATA_API_KEYS_FILE": ""})
        say("Starting NATS, Valkey and six services.")
        async with running(plan, say) as stack:
            await stack.bring_up()
            yield System(stack.nats_url, stack.redis_url, None, _chosen(stack.watch.fleet, chosen.name))
        if stack.obituaries:
            raise LaunchError("\n".join(stack.obituaries))


def _chosen(fleet: Fleet, name: str | None) -> ModelCard:
    cards = fleet.cards()
    if name is None and len(cards) == 1:
        return next(iter(cards.values()))
    if name not in cards:
        raise LaunchError(f"The model to measure: received {name}, accepted {', '.join(sorted(cards))}.")
    return cards[name]
