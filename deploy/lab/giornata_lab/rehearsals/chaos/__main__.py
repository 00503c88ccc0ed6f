"""``python -m giornata_lab.rehearsals.chaos``: faults under load; 1 and a list of what broke where anything did."""

from __future__ import annotations

import asyncio
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from giornata.families import Family
from giornata_lab.rehearsals.chaos.plan import ALL
from giornata_lab.rehearsals.chaos.report import OUT, Report
from giornata_lab.rehearsals.chaos.run import RehearsalSize, run
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import choose
from giornata_tools.launcher.process import LaunchError

LOGS: Final = OUT.parent / "chaos-logs"
say = partial(print, flush=True)


@click.command("chaos", context_settings={"show_default": True})
@click.option("--edits", type=int, default=1000, help="How many are sent.")
@click.option(
    "--faults",
    type=int,
    default=60,
    help=f"How many are inflicted; from {ALL} on every kind comes to every service and server that it can come to.",
)
@click.option("--seed", type=int, help="Draws the same edits and faults again; any by default.")
@click.option("--nats-servers", type=click.Choice([1, 3]), default=1, help="How many are started.")
@click.pass_context
def main(ctx: click.Context, /, **flags: Any) -> None:
    """Faults under load; ends with 1 and a list of what broke where anything did."""
    if flags["seed"] is None:
        flags["seed"] = secrets.randbelow(10_000)
    try:
        report = asyncio.run(_run(RehearsalSize(**flags)))
    except LaunchError as error:
        print(error, file=sys.stderr)
        ctx.exit(1)
    report.write()
    report.show()
    say(f"Written to {OUT}; logs are in {LOGS}.")
    ctx.exit(1 if report.violations else 0)


async def _run(size: RehearsalSize) -> Report:
    model = await choose({}, Family.FLUX_FILL, MODELS, say)
    return await run(size, Path(model.source), LOGS, say)


if __name__ == "__main__":
    main()
