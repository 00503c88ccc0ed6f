"""``giornata up``: the stack in the foreground; accepted jobs survive a restart."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog

from giornata.families import Family
from giornata.logs import configure_logs
from giornata.model_cards import digest as digest_of
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName
from giornata_tools import terminal
from giornata_tools.checkout import MODELS, PROFILE, STATE
from giornata_tools.clients.edits import without_password
from giornata_tools.connection import StackAddresses, published
from giornata_tools.launcher import models as launcher_models
from giornata_tools.launcher.plan import ONE_EACH, StackPlan, planned
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.stack import Stack, running

# How a command that runs a stack ends.


log = structlog.get_logger(__name__)


def say(text: str) -> None:
    """Print a line for the person who runs the program; none is worth its end."""
    terminal.tell(f"{text}\n", ordinary=True)


def run(name: str, main: Callable[[], Awaitable[int]]) -> int:
    """Run `main` to the exit status: its own; 1 with a sentence on standard error; 130 after a signal."""
    configure_logs("error", "console", name)
    try:
        # A second signal ends the processes at once, and still removes temporary folders.
        return terminal.run(main, told="\nStopping; once more to stop at once.\n", end=sys.exit)
    except LaunchError as error:
        terminal.tell(f"{error}\n")
    except Exception as error:  # the program's edge: a person reads a sentence last
        log.exception("unforeseen")
        terminal.tell(f"{name} failed: {type(error).__name__}: {error}\n")
    return 1


# ``giornata up``: the stack in the foreground; accepted jobs survive a restart.


CHECKED_S: Final = 15.0
"""How long a stack whose services are ready waits for the checks of its LoRAs, before it is ready without some."""
DEVICES: Final = "GIORNATA_DEVICES"
ALIASES: Final = "GIORNATA_MODEL_ALIASES"
CLIENTS: Final = (NatsRole.OBSERVER, NatsRole.OPERATOR, NatsRole.PROFILER)
"""Users of NATS that commands log in as."""
Say = Callable[[str], None]
Beside = Callable[[Stack, Say], Awaitable[None]]
"""What is done while a stack runs; it ends when it is cancelled."""


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
    controlnet_services: int = 0
    """Each computes the ControlNets that GIORNATA_CONTROLNETS names, by default those that ship with the model."""
    profile_loras: bool = False
    """Whether LoRAs are profiled beside the stack; the caller of :func:`up` knows how."""
    devices: str = ""
    """Devices of each denoiser, separated by commas; empty for the one of GIORNATA_DEVICE."""
    models: tuple[str, ...] = ()
    """Folders or hub ids, each with NAME= before it or not; none: see :func:`model.choose`."""
    aliases: tuple[str, ...] = ()
    """Other names of served models, each as ALIAS=NAME; beside those of GIORNATA_MODEL_ALIASES."""
    state: Path = STATE
    """What the stack keeps; commands find the stack by the file that lies there while it runs."""


async def idle(stack: Stack, say: Say) -> None:  # noqa: ARG001 - what is done beside a stack takes both
    """Do nothing until cancelled."""
    await asyncio.Event().wait()


async def up(options: UpOptions, say: Say, beside: Beside = idle) -> int:
    """Start, print the addresses, do `beside` until cancelled, drain; 1 where something did not end in order."""
    chosen = await launcher_models.choose_all(options.models, os.environ, options.family, MODELS, say)
    asked = plan(options, chosen)
    say("Starting; this takes some seconds.")
    async with running(asked, say) as stack:
        await stack.bring_up()
        stack.keep_up = True
        unchecked = await stack.unchecked_loras(CHECKED_S)
        with published(options.state, connection(stack)):
            say(addresses(stack, unchecked))
            with suppress(asyncio.CancelledError):  # a signal ends the waiting, not the drain
                await beside(stack, say)
        say("Draining: what runs is finished or kept for the next start.")
    for obituary in stack.obituaries:
        say(obituary)
    return 1 if stack.obituaries else 0


def plan(options: UpOptions, chosen: tuple[launcher_models.StackModel, ...]) -> StackPlan:
    """The stack that the flags and the environment ask for.

    Raises:
        LaunchError: a cluster is asked for, and external servers are named.
        LaunchError: the profile that is named is of no model.
        LaunchError: a ControlNet service has nothing to compute.
    """
    replicas = {
        **ONE_EACH,
        ServiceName.DENOISER: options.denoisers,
        ServiceName.ROUTER: options.routers,
        ServiceName.PREPOST: options.prepost,
        ServiceName.CONTROLNET: options.controlnet_services,
    }
    models = profiled(PROFILE, chosen, options.torch_threads, os.environ)
    models = launcher_models.with_controlnets(models, os.environ)
    nets = launcher_models.service_controlnets(models, os.environ)
    if options.controlnet_services and not nets:
        raise LaunchError(
            f"--controlnet-services {options.controlnet_services} needs GIORNATA_CONTROLNETS: folders or hub ids, "
            "separated by commas."
        )
    asked = planned(models, options.state, options.state / "logs", options.torch_threads, {})
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
        nats_servers=options.nats_servers,
        env_of={
            ServiceName.GATEWAY: aliases_of(options.aliases, models, os.environ),
            ServiceName.DENOISER: {DEVICES: options.devices} if options.devices else {},
            ServiceName.PREPOST: launcher_models.shipped_masks(models, os.environ),
            ServiceName.LORA_STORE: launcher_models.shared_loras(models, os.environ),
            ServiceName.CONTROLNET: {launcher_models.NETS: nets} if nets else {},
        },
    )


def aliases_of(
    aliases: tuple[str, ...], models: tuple[launcher_models.StackModel, ...], env: Mapping[str, str]
) -> dict[str, str]:
    """The gateway's setting for `aliases`; LaunchError where one leads to none of the `models`."""
    names = [each.served_name for each in models]
    for alias in aliases:
        if alias.partition("=")[2] not in names:
            raise LaunchError(
                f"--alias {alias} leads to no model; write ALIAS=NAME with one of {', '.join(names)}."
            )
    return {ALIASES: ",".join(filter(None, (env.get(ALIASES), *aliases)))} if aliases else {}


def profiled(
    path: Path, models: tuple[launcher_models.StackModel, ...], torch_threads: int, env: Mapping[str, str]
) -> tuple[launcher_models.StackModel, ...]:
    """`models`, each with the profile in `path` if it is of that model, or else the one that `env` names.

    A denoiser refuses a profile of another model. So one that is named for several goes to the one that it is of.

    Raises:
        LaunchError: it is of none of them.
    """
    named = env.get("GIORNATA_PROFILE")
    if named and len(models) == 1:
        return models
    found = Path(named or path)
    own = [is_of(found, each, torch_threads) for each in models]
    if named and not any(own):
        raise LaunchError(
            f"GIORNATA_PROFILE names {named}, which is of none of the models, or of other threads."
        )
    others = {"GIORNATA_PROFILE": ""} if named else {}
    return tuple(
        replace(each, env={"GIORNATA_PROFILE": str(found)} if its else others)
        for each, its in zip(models, own, strict=True)
    )


def is_of(profile: Path, chosen: launcher_models.StackModel, torch_threads: int) -> bool:
    """Return whether the file `profile` was measured with this model, and so many threads or a GPU."""
    if not profile.is_file() or not Path(chosen.source).is_dir():
        return False
    try:
        content = json.loads(profile.read_text(encoding="utf-8"))
        digest, device = str(content["model_digest"]), str(content["device"])
    except (ValueError, TypeError, KeyError):
        return False
    threads = device.partition("threads: ")[2]
    return digest == digest_of(Path(chosen.source)) and threads in {"", str(torch_threads)}


def connection(stack: Stack) -> StackAddresses:
    """Return how commands of this machine reach a running stack."""
    files = {str(user): stack.nats_password_file(user) for user in CLIENTS}
    known = {user: str(file) for user, file in files.items() if file}
    return StackAddresses(stack.url, stack.nats_url, stack.blobs_url, known)


def addresses(stack: Stack, unchecked: int = 0) -> str:
    """Return what a user needs to know of a running stack; `unchecked` LoRAs cannot be used yet."""
    models = [served.served_name for served in stack.plan.models]
    named = "" if stack.plan.state == STATE else f"   (each with --state {stack.plan.state})"
    naming = f" -F model={models[0]}" if len(models) > 1 else ""
    return (
        f"\nGiornata is ready.{f' LoRAs still being checked: {unchecked}.' if unchecked else ''}\n"
        f"  REST    {stack.url}   (also /readyz, /metrics, /openapi.json)\n"
        f"  NATS    {without_password(stack.nats_url)}\n"
        f"  blobs   {without_password(stack.blobs_url)}\n"
        f"  Models  {', '.join(models)}\n"
        f"  Logs    {stack.plan.logs}\n"
        f"  Look    giornata status, giornata top, giornata lora list{named}\n\n"
        f"Edit a picture:\n"
        f"  curl --fail-with-body -sS {stack.url}/v1/images/edits -F response_format=image -o edited.png \\\n"
        f"    -F image=@photo.png -F mask=@mask.png -F prompt='a red star' -F padding_mask_crop=88{naming}\n\n"
        f"Ctrl-C drains and stops.\n"
    )
