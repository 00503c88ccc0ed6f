"""``python -m tests.chaos``: faults under load; exit status 1 and a list of what broke where anything did."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import Final

from giornata.families import Family
from giornata_tools.launcher.model import choose
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.up import MODELS
from tests.chaos.plan import FULL
from tests.chaos.report import OUT, Report
from tests.chaos.run import Size, run

LOGS: Final = OUT.parent / "chaos-logs"
say = partial(print, flush=True)


def main() -> int:
    """Exit status."""
    made = argparse.ArgumentParser(prog="make chaos", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--edits", type=int, default=1000, help="(%(default)s)")
    made.add_argument(
        "--faults",
        type=int,
        default=60,
        help=f"from {FULL} on every kind comes to every service and server (%(default)s)",
    )
    made.add_argument("--seed", type=int, help="draws the same edits and faults again; default any")
    made.add_argument("--nats-servers", type=int, choices=(1, 3), default=1, help="(%(default)s)")
    flags = vars(made.parse_args())
    if flags["seed"] is None:
        flags["seed"] = secrets.randbelow(10_000)
    try:
        report = asyncio.run(_run(Size(**flags)))
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    report.write()
    report.show()
    say(f"Written to {OUT}; logs are in {LOGS}.")
    return 1 if report.violations else 0


async def _run(size: Size) -> Report:
    model = await choose({}, Family.FLUX_FILL, MODELS, say)
    return await run(size, Path(model.source), LOGS, say)


if __name__ == "__main__":
    sys.exit(main())
