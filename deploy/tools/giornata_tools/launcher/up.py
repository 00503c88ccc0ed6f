"""``python -m giornata_tools.launcher up``: the stack in the foreground; accepted jobs survive a restart."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from giornata import families
from giornata.families import Family
from giornata.wire.workers import ServiceName
from giornata_tools.launcher import environment, model
from giornata_tools.launcher.plan import Plan
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.stack import Stack, running

Say = Callable[[str], None]

STATE: Final = model.ROOT / ".giornata"
MODELS: Final = STATE / "models"
PROFILE: Final = STATE / "profile.json"
"""Where `giornata profile` writes by default."""


@dataclass(frozen=True)
class UpOptions:
    """Flags of ``up``."""

    host: str
    port: int
    denoisers: int
    routers: int
    prepost: int
    nats_servers: int
    torch_threads: int
    family: Family | None


async def up(options: UpOptions, say: Say) -> int:
    """Start, print the addresses, stay until cancelled, drain; 1 where something did not end in order."""
    chosen = await model.choose(os.environ, options.family, MODELS, say)
    asked = plan(options, chosen)
    say("Starting; this takes some seconds.")
    async with running(asked, say) as stack:
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
    """The stack that the flags and the environment ask for.

    Raises:
        LaunchError: a cluster is asked for, and external servers are named.
    """
    replicas = {
        **dict.fromkeys(ServiceName, 1),
        ServiceName.DENOISER: options.denoisers,
        ServiceName.ROUTER: options.routers,
        ServiceName.PREPOST: options.prepost,
    }
    asked = environment.plan(chosen, STATE, STATE / "logs", options.torch_threads)
    env = profile_env(PROFILE, chosen, options.torch_threads, os.environ)
    if asked.nats_url and options.nats_servers > 1:
        raise LaunchError(
            f"--nats-servers {options.nats_servers} starts servers of its own, and GIORNATA_NATS_URL names others; "
            "leave one out. For an external cluster name its servers there, and set GIORNATA_REPLICAS=3."
        )
    return replace(
        asked,
        replicas=replicas,
        host=options.host,
        port=options.port,
        env=env,
        nats_servers=options.nats_servers,
    )


def profile_env(
    path: Path, chosen: model.Model, torch_threads: int, env: Mapping[str, str]
) -> dict[str, str]:
    """What tells denoisers of the profile in `path`: nothing if `env` names one, or this one is of something else."""
    if env.get("GIORNATA_PROFILE") or not path.is_file() or not Path(chosen.source).is_dir():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        digest, device = str(content["model_digest"]), str(content["device"])
    except (ValueError, TypeError, KeyError):
        return {}
    threads = device.partition("threads: ")[2]
    ours = digest == families.digest(Path(chosen.source)) and threads in {"", str(torch_threads)}
    return {"GIORNATA_PROFILE": str(path)} if ours else {}


def addresses(stack: Stack, chosen: model.Model) -> str:
    """What a user needs to know of a running stack."""
    return (
        f"\nGiornata is ready.\n"
        f"  REST    {stack.url}   (also /readyz, /metrics, /openapi.json)\n"
        f"  NATS    {without_password(stack.nats_url)}\n"
        f"  Redis   {without_password(stack.redis_url)}\n"
        f"  Model   {chosen.name or chosen.source}\n"
        f"  Logs    {stack.plan.logs}\n\n"
        f"Edit a picture:\n"
        f"  curl --fail-with-body -sS {stack.url}/v1/images/edits -F response_format=image -o edited.png \\\n"
        f"    -F image=@photo.png -F mask=@mask.png -F prompt='a red star' -F padding_mask_crop=88\n\n"
        f"Ctrl-C drains and stops.\n"
    )


def without_password(urls: str) -> str:
    """One URL, or several with commas between them, fit for a terminal that others may see."""
    return ",".join(_without_password(url) for url in urls.split(","))


def _without_password(url: str) -> str:
    place = urlsplit(url)
    user, at, host = place.netloc.rpartition("@")
    return place._replace(netloc=f"***@{host}").geturl() if at and user else url
