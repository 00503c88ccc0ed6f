"""``giornata up`` and ``giornata demo``: the whole system on this machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from giornata.families import Family
from giornata_tools.cli import extras
from giornata_tools.cli.options import COUNT, torch_threads_option

ENVIRONMENT: Final = """\b
Environment:
  GIORNATA_NATS_URL    an external NATS with JetStream instead of the embedded one
  GIORNATA_REDIS_URL   an external Redis-protocol server (no eviction!) instead of the embedded one
  GIORNATA_MODEL       a diffusers checkpoint, local folder or hub id, instead of the small trained one that ships
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
@click.option("--routers", type=COUNT, default=1, metavar="N", help="One is active, others stand by.")
@click.option("--prepost", type=COUNT, default=1, metavar="N", help="How many to start.")
@click.option(
    "--nats-servers",
    type=click.Choice([1, 3]),
    default=1,
    help="3: a cluster that loses nothing with one of its servers; its store is not that of 1.",
)
@threads_option
@family_option
@click.pass_context
def up(ctx: click.Context, /, **given: Any) -> None:
    """Run the whole system on this machine until Ctrl-C, then drain. Accepted jobs go on at the next start."""
    extras.require_system()
    from giornata_tools.launcher import program
    from giornata_tools.launcher import up as launcher

    options = launcher.UpOptions(**given)
    ctx.exit(program.run("up", partial(launcher.up, options, partial(print, flush=True))))


@click.command(context_settings={"show_default": True}, epilog=ENVIRONMENT)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out/demo"),
    metavar="FOLDER",
    help="Where pictures and report are written.",
)
@click.option("--steps", type=COUNT, default=20, metavar="N", help="Denoising steps.")
@click.option("--seed", type=int, default=7, metavar="N", help="Of every edit.")
@click.option("--no-oracle", is_flag=True, help="Skip the comparison with diffusers, for large models.")
@threads_option
@family_option
@click.pass_context
def demo(ctx: click.Context, /, **given: Any) -> None:
    """Edit two photographs and two scenes with the whole system, and measure.

    Exit status 0 only if every pixel outside the masks is kept and every picture is diffusers' own.
    """
    extras.require_system()
    from giornata_tools.launcher import program
    from giornata_tools.launcher.demo import demo as launcher

    ctx.exit(program.run("demo", partial(launcher.demo, launcher.DemoOptions(**given))))
