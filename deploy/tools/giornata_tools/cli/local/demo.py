"""``giornata demo``: four edits end to end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from giornata_tools.cli.local.options import (
    COUNT,
    ENVIRONMENT,
    family_option,
    require_system,
    torch_threads_option,
)


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
@torch_threads_option
@family_option
@click.pass_context
def demo(ctx: click.Context, /, **given: Any) -> None:
    """Edit two photographs and two scenes with the whole system, and measure.

    Exit status 0 only if every pixel outside the masks is kept and every picture is diffusers' own.
    """
    require_system()
    from giornata_tools.launcher import program
    from giornata_tools.launcher.demo.demo import DemoOptions
    from giornata_tools.launcher.demo.demo import demo as run

    ctx.exit(program.run("demo", partial(run, DemoOptions(**given))))
