"""``giornata up``: the whole system on this machine."""

from __future__ import annotations

from functools import partial
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
@torch_threads_option
@family_option
@click.pass_context
def up(ctx: click.Context, /, **given: Any) -> None:
    """Run the whole system on this machine until Ctrl-C, then drain. Accepted jobs go on at the next start."""
    require_system()
    from giornata_tools.launcher import program
    from giornata_tools.launcher.up import UpOptions
    from giornata_tools.launcher.up import up as bring_up

    ctx.exit(program.run("up", partial(bring_up, UpOptions(**given), partial(print, flush=True))))
