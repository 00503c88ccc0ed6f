"""``giornata demo`` and ``quality``: the whole system on this machine, to look at and to measure."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from giornata.wire.requests import Reuse
from giornata_tools.cli import extras
from giornata_tools.cli.options import COUNT, folder_option, server_option
from giornata_tools.cli.system import ENVIRONMENT, family_option, threads_option
from giornata_tools.clients.edits import NATS_VARIABLE

QUALITY: Final = """\b
Gates, each over the whole set:
  (a) "a COLOUR SHAPE": colour and shape both right, by a checker without a model, in at least 90 %
  (b) "remove it": mean PSNR in the mask against the true background at least 24 dB
  (c) "remove it": mean gradient across the mask's border 0.8 to 1.2 times that of the truth
  and no pixel outside of a mask changed

Things are added with a hard edge, since the checker looks for them inside of the mask, and removed with the edge
that requests have by default; --mask-blur 0 shows the model's own seams. The exit status is 0 where every gate holds.

\b
Compare two runs picture by picture (SSIM, PSNR):
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
    extras.require_system("lab")
    from giornata_lab.demo import demo as launcher
    from giornata_tools.launcher import up

    ctx.exit(up.run("demo", partial(launcher.demo, launcher.DemoOptions(**given))))


@click.command(context_settings={"show_default": True}, epilog=QUALITY)
@folder_option(
    "--out",
    default=Path("out/quality"),
    help="Folder of the pictures; numbers go beside it, as .json, and a picture of the edits that fail.",
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
    extras.require_system("lab")
    from giornata_lab.quality.evaluation import QualityOptions, evaluate
    from giornata_tools.launcher import up

    ctx.exit(up.run("quality", partial(evaluate, QualityOptions(**given))))
