"""``giornata up``: the whole system on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from giornata.families import Family
from giornata_tools import checkout
from giornata_tools.cli import extras
from giornata_tools.cli.options import (
    COUNT,
    STATE_VARIABLE,
    models_option,
    torch_threads_option,
)

ENVIRONMENT: Final = """\b
Environment:
  GIORNATA_NATS_URL    an external NATS with JetStream instead of the embedded one
  GIORNATA_BLOBS_URL   an external blob store instead of the embedded one: a Redis-protocol server (no eviction!) or s3://
  GIORNATA_MODEL       a diffusers checkpoint, local folder or hub id, instead of the small trained one that ships
  GIORNATA_MASK_MODEL  what makes masks from words; empty: nothing; by default the one that ships, for that model alone
  GIORNATA_*           every other setting, see `python -m giornata_gateway --help` and its siblings
"""

threads_option: Final = torch_threads_option("Threads of each process; OMP_NUM_THREADS does not count.")
family_option: Final = click.option(
    "--family",
    type=click.Choice([str(family) for family in Family]),
    callback=lambda _, __, family: family and Family(family),
    help="Serve a small model of this family with random weights instead of the trained one.",
)


@click.command(context_settings={"show_default": True}, epilog=ENVIRONMENT)
@click.option(
    "--host",
    default="127.0.0.1",
    envvar="GIORNATA_HOST",
    show_envvar=True,
    help="Address of the REST API; one that other machines reach needs GIORNATA_API_KEYS_FILE.",
)
@click.option(
    "--port",
    type=int,
    default=8000,
    envvar="GIORNATA_PORT",
    show_envvar=True,
    help="Port of the REST API; 0 takes any free one.",
)
@click.option("--denoisers", type=COUNT, default=1, metavar="N", help="How many to start.")
@click.option(
    "--devices",
    default="",
    envvar="GIORNATA_DEVICES",
    show_envvar=True,
    metavar="LIST",
    help="Devices of each denoiser that compute steps together, as a pool: cuda:0,cuda:1, or cpu,cpu.",
)
@click.option("--routers", type=COUNT, default=1, metavar="N", help="One is active, others stand by.")
@click.option("--prepost", type=COUNT, default=1, metavar="N", help="How many to start.")
@click.option(
    "--controlnet-services",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Processes that compute the ControlNets of GIORNATA_CONTROLNETS beside the denoisers'.",
)
@click.option(
    "--nats-servers",
    type=click.Choice([1, 3]),
    default=1,
    help="3: a cluster that loses nothing with one of its servers; its store is not that of 1.",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path, resolve_path=True),
    default=checkout.STATE,
    show_default=".giornata of the checkout",
    envvar=STATE_VARIABLE,
    show_envvar=True,
    metavar="FOLDER",
    help="What a stack keeps: queue, blobs, LoRAs, logs. Each of several stacks has its own, and its own --port.",
)
@threads_option
@models_option(
    "A diffusers checkpoint to serve, as GIORNATA_MODEL; give it several times to serve several. Each has the "
    "denoisers and preposts above."
)
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    metavar="ALIAS=NAME",
    help="Another name that requests may call a served model by, such as gpt-image-1=NAME; several times for several.",
)
@family_option
@click.option(
    "--profile-loras",
    is_flag=True,
    help="See in pictures how late each LoRA may join, by one batch edit at a time: `giornata lora profile --watch`.",
)
@click.pass_context
def up(ctx: click.Context, /, **given: Any) -> None:
    """Run the whole system on this machine until Ctrl-C, then drain. Accepted jobs go on at the next start."""
    if given["models"] and given["family"]:
        raise click.UsageError("--family serves a small model of its own; leave it or --model out.")
    extras.require_system()
    from giornata_tools.launcher import up as launcher

    options, say = launcher.UpOptions(**given), launcher.say
    beside: launcher.Beside = launcher.idle
    if options.profile_loras:
        from giornata_tools.lora_profiler.sessions import profiling as beside
    ctx.exit(launcher.run("up", partial(launcher.up, options, say, beside)))
