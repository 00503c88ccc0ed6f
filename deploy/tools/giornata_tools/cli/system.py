"""``giornata up``, ``demo`` and ``quality``: the whole system on this machine, to use or to measure."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from giornata.families import Family
from giornata.wire.requests import Reuse
from giornata_tools import checkout
from giornata_tools.cli import extras
from giornata_tools.cli.options import (
    COUNT,
    STATE_VARIABLE,
    folder_option,
    models_option,
    server_option,
    torch_threads_option,
)
from giornata_tools.doors.addresses import NATS_VARIABLE

ENVIRONMENT: Final = """\b
Environment:
  GIORNATA_NATS_URL    an external NATS with JetStream instead of the embedded one
  GIORNATA_BLOBS_URL   an external blob store instead of the embedded one: a Redis-protocol server (no eviction!) or s3://
  GIORNATA_MODEL       a diffusers checkpoint, local folder or hub id, instead of the small trained one that ships
  GIORNATA_MASK_MODEL  what makes masks from words; empty: nothing; by default the one that ships, for that model alone
  GIORNATA_*           every other setting, see `python -m giornata_gateway --help` and its siblings
"""
QUALITY: Final = """\b
Gates, each over the whole set:
  (a) "a COLOUR SHAPE": colour and shape both right, by a checker without a model, in at least 90 %
  (b) "remove it": mean PSNR in the mask against the true background at least 24 dB
  (c) "remove it": mean gradient across the mask's border 0.8 to 1.2 times that of the truth
  and no pixel outside of a mask changed

Things are added with a hard edge, since the checker looks for them inside of the mask, and removed with the edge
that requests have by default; --mask-blur 0 shows the model's own seams. The exit status is 0 where every gate holds.

\b
Compare two runs picture by picture (SSIM, PSNR, Fréchet distance):
  giornata quality --out out/full
  giornata quality --out out/fast --against out/full

\b
Environment:
  GIORNATA_NATS_URL    a running system to measure, as --nats; then GIORNATA_API_KEY where its gateways ask for one, and
                       GIORNATA_NATS_PASSWORD_FILE, the observer's password: `giornata up` writes it to
                       .giornata/nats-users/clients/observer
  GIORNATA_MODEL       the checkpoint of the stack that is started otherwise, instead of the built-in one
  GIORNATA_*           every other setting of that stack's services
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
    from giornata_tools.launcher import program
    from giornata_tools.launcher import up as launcher

    options, say = launcher.UpOptions(**given), program.say
    beside: launcher.Beside = launcher.idle
    if options.profile_loras:
        from giornata_tools.joining.background import profiling as beside
    ctx.exit(program.run("up", partial(launcher.up, options, say, beside)))


@click.command(context_settings={"show_default": True}, epilog=ENVIRONMENT)
@folder_option("--out", default=Path("out/demo"), help="Where pictures and report are written.")
@click.option("--steps", type=COUNT, default=20, metavar="N", help="Denoising steps.")
@click.option("--seed", type=int, default=7, metavar="N", help="Of every edit.")
@click.option("--no-oracle", is_flag=True, help="Skip the comparison with diffusers, for large models.")
@threads_option
@family_option
@click.pass_context
def demo(ctx: click.Context, /, **given: Any) -> None:
    """Edit two photographs and three scenes with the whole system, and measure.

    In the third scene words say what is repainted, and others show the adapters, where the model that ships is served.

    Exit status 0 only if every pixel outside the masks is kept and every picture without an adapter is diffusers' own.
    """
    extras.require_system()
    from giornata_tools.launcher import program
    from giornata_tools.launcher.demo import demo as launcher

    ctx.exit(program.run("demo", partial(launcher.demo, launcher.DemoOptions(**given))))


@click.command(context_settings={"show_default": True}, epilog=QUALITY)
@folder_option(
    "--out",
    default=Path("out/quality"),
    help="Folder of the pictures; numbers and page go beside it, as .json and .html.",
)
@folder_option("--against", help="An earlier run's --out, to compare with.")
@click.option("--limit", type=COUNT, metavar="N", help="A quick look at N edits, spread over the set.")
@click.option("--steps", type=COUNT, metavar="N", help="Denoising steps; default the model card's.")
@click.option("--guidance", type=float, metavar="G", help="Guidance scale; default the model card's.")
@click.option(
    "--mask-blur",
    type=float,
    metavar="PX",
    help="Feather of every edit's paste; default none to add, and a request's own to remove.",
)
@click.option(
    "--reuse",
    type=click.Choice([str(reuse) for reuse in Reuse]),
    default=str(Reuse.AUTO),
    callback=lambda _, __, reuse: Reuse(reuse),
    help="As in a request. Every picture of the set comes once, and is recorded first only with "
    "GIORNATA_TEMPLATE_POLICY=inline.",
)
@click.option("--in-flight", type=COUNT, default=8, metavar="N", help="Edits at a time.")
@click.option("--timeout-s", type=float, default=600.0, metavar="S", help="For one edit, waiting included.")
@threads_option
@server_option("--nats", envvar=NATS_VARIABLE, help="A running system; by default one is started.")
@click.option("--model-name", metavar="NAME", help="Which model of the running system, if it serves several.")
@click.option("--no-gates", is_flag=True, help="Exit with 0 also where a gate fails.")
@click.pass_context
def quality(ctx: click.Context, /, **given: Any) -> None:
    """Measure the model's edits: fixed held-out scenes through the whole system, an independent checker, gates."""
    extras.require_system()
    from giornata_tools.launcher import program
    from giornata_tools.quality.evaluation import QualityOptions, evaluate

    ctx.exit(program.run("quality", partial(evaluate, QualityOptions(**given))))
