"""``python -m giornata_lab.rehearsals.chaos``: faults under load; 1 and a list of what broke where anything did."""

from __future__ import annotations

import asyncio
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import Final

import click

from giornata.families import Family
from giornata_lab.rehearsals.chaos.faults import ALL
from giornata_lab.rehearsals.chaos.run import Report, run
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import choose
from giornata_tools.launcher.process import LaunchError

OUT: Final = Path("out") / "chaos.json"
LOGS: Final = OUT.parent / "chaos-logs"
say = partial(print, flush=True)


@click.command("chaos", context_settings={"show_default": True})
@click.option("--edits", type=int, default=500, help="How many are sent.")
@click.option(
    "--faults",
    type=int,
    default=ALL,
    help=f"How many are inflicted; from {ALL} on every kind comes to every service and server.",
)
@click.option("--seed", type=int, help="Draws the same edits and faults again; any by default.")
@click.pass_context
def main(ctx: click.Context, edits: int, faults: int, seed: int | None) -> None:
    """Faults under load; ends with 1 and a list of what broke where anything did."""

    async def disturbed() -> Report:
        model = await choose({}, Family.FLUX_FILL, MODELS, say)
        chosen = secrets.randbelow(10_000) if seed is None else seed
        return await run(edits, faults, chosen, Path(model.source), LOGS, say)

    try:
        report = asyncio.run(disturbed())
    except LaunchError as error:
        print(error, file=sys.stderr)
        ctx.exit(1)
    report.write(OUT)
    report.show()
    say(f"Written to {OUT}; logs are in {LOGS}.")
    ctx.exit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
