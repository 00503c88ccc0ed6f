"""``python -m deploy.launcher up``: the stack in the foreground; accepted jobs survive a restart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from deploy.launcher import model
from deploy.launcher.plan import Plan
from deploy.launcher.stack import Stack, running
from giornata.models import Family
from giornata.workers import ServiceName

Say = Callable[[str], None]

STATE: Final = model.ROOT / ".giornata"
MODELS: Final = STATE / "models"


@dataclass(frozen=True)
class UpOptions:
    """Flags of ``up``."""

    host: str
    port: int
    denoisers: int
    routers: int
    prepost: int
    torch_threads: int
    family: Family


async def up(options: UpOptions, say: Say) -> int:
    """Start, print the addresses, stay until cancelled, drain; 1 where something did not end in order."""
    chosen = await model.choose(os.environ, options.family, MODELS, say)
    say("Starting; this takes some seconds.")
    async with running(plan(options, chosen), say) as stack:
        await stack.bring_up()
        stack.keep_up = True
        say(addresses(stack, chosen))
        with suppress(asyncio.CancelledError):  # a signal ends the waiting, not the drain
            await asyncio.Event().wait()
        say("Draining: what runs is finished or kept for the next start.")
    for obituary in stack.obituaries:
        say(obituary)
    return 1 if stack.obituaries else 0


def plan(options: UpOptions, chosen: model.Model) -> Plan:
    """The stack that the flags and the environment ask for."""
    replicas = {
        **dict.fromkeys(ServiceName, 1),
        ServiceName.DENOISER: options.denoisers,
        ServiceName.ROUTER: options.routers,
        ServiceName.PREPOST: options.prepost,
    }
    return Plan(
        state=STATE,
        logs=STATE / "logs",
        model=chosen.source,
        model_name=chosen.name,
        replicas=replicas,
        nats_url=os.environ.get("GIORNATA_NATS_URL"),
        redis_url=os.environ.get("GIORNATA_REDIS_URL"),
        host=options.host,
        port=options.port,
        torch_threads=options.torch_threads,
    )


def addresses(stack: Stack, chosen: model.Model) -> str:
    """What a user needs to know of a running stack."""
    return (
        f"\nGiornata is ready.\n"
        f"  REST    {stack.url}   (also /readyz, /metrics, /openapi.json)\n"
        f"  NATS    {stack.nats_url}\n"
        f"  Redis   {stack.redis_url}\n"
        f"  Model   {chosen.name or chosen.source}\n"
        f"  Logs    {stack.plan.logs}\n\n"
        f"Edit a picture:\n"
        f"  curl -sS -H 'Accept: image/png' -o edited.png {stack.url}/v1/images/edits \\\n"
        f"    -F image=@photo.png -F mask=@mask.png -F prompt='a red balloon' -F num_inference_steps=8\n\n"
        f"Ctrl-C drains and stops.\n"
    )
