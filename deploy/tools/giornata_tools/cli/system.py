"""``giornata up``: the whole system on this machine; ``giornata profile``: what a denoising step costs on it."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from giornata.families import Family
from giornata_tools import checkout
from giornata_tools.cli import extras
from giornata_tools.cli.options import (
    COUNT,
    STATE_VARIABLE,
    device_option,
    dtype_option,
    model_option,
    models_option,
    torch_threads_option,
)
from giornata_tools.terminal import INTERRUPTED

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
        from giornata_tools.lora_profiler.profiler import profiling as beside
    ctx.exit(launcher.run("up", partial(launcher.up, options, say, beside)))


# ``giornata profile``: the denoiser's profiler.


THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Libraries read these when they are imported."""


@click.command()
@model_option("Checkpoint to measure; default the one that the checkout carries.")
@device_option
@dtype_option
@click.option(
    "--devices",
    metavar="LIST",
    help="Devices of a pool, as of `giornata up` (cuda:0,cuda:1 or cpu,cpu): steps of several are timed, too.",
)
@torch_threads_option("Threads that compute, as the denoiser will have.")
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the profile is written; default .giornata/profile.json of the checkout, where `giornata up` looks.",
)
@click.option(
    "--quick", is_flag=True, help="Fewer sizes and rounds: half a minute with the model that ships."
)
@click.option(
    "--least-r2",
    type=float,
    default=0.9,
    show_default=True,
    help="A fit of a lower R², and of errors above a tenth, is told with its worst samples and not written.",
)
@click.pass_context
def profile(ctx: click.Context, /, *, torch_threads: int, quick: bool, least_r2: float, **given: Any) -> None:
    """Measure what a denoising step costs on this machine.

    Steps of many mixtures of rows are timed: picture sizes, masks, batch sizes, and what is computed, projected or
    taken from templates; and loads of templates. Their costs are fitted, printed with how well they predict, and
    written to FILE, which a denoiser reads at its start (GIORNATA_PROFILE). Nothing else should run meanwhile.
    """
    if find_spec("giornata_denoiser") is None:
        raise click.ClickException(
            "The denoiser, which is what is measured, is not installed here. Run `make setup` in a checkout of "
            "Giornata, or `giornata profile` where a denoiser runs."
        )
    model, out = given["model"], given["out"]
    if checkout.find() is None and (model is None or out is None):
        raise click.UsageError("There is no checkout of Giornata here: name --model and --out.")
    os.environ.update(dict.fromkeys(THREADS, str(torch_threads)))
    from giornata_denoiser.profiling.__main__ import main

    told = given | {"model": model or str(checkout.TRAINED), "out": str(out or checkout.PROFILE)}
    names = [name for name in ("model", "device", "dtype", "devices", "out") if told[name]]
    flags = [word for name in names for word in (f"--{name}", told[name])]
    flags += ["--least-r2", str(least_r2)]
    try:
        ctx.exit(main([*flags, *(["--quick"] if quick else [])]))
    except KeyboardInterrupt:
        ctx.exit(INTERRUPTED)
