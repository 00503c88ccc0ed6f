"""Options that the commands of this folder share."""

from __future__ import annotations

from typing import Final

import click

from giornata.families import Family
from giornata_tools import checkout
from giornata_tools.cli import extras

COUNT: Final = click.IntRange(min=1)

torch_threads_option = click.option(
    "--torch-threads",
    type=COUNT,
    default=1,
    metavar="N",
    help="Threads of each process; OMP_NUM_THREADS does not count.",
)
family_option = click.option(
    "--family",
    type=click.Choice([str(family) for family in Family]),
    callback=lambda _, __, family: family and Family(family),
    help="Serve a small model of this family with random weights instead of the trained one.",
)

ENVIRONMENT: Final = """\b
Environment:
  GIORNATA_NATS_URL    an external NATS with JetStream instead of the embedded one
  GIORNATA_REDIS_URL   an external Redis-protocol server (no eviction!) instead of the embedded one
  GIORNATA_MODEL       a diffusers checkpoint, local folder or hub id, instead of the small trained one that ships
  GIORNATA_*           every other setting, see `python -m giornata_gateway --help` and its siblings
"""


def require_system() -> None:
    """Refuse to go on where the system cannot be started.

    Raises:
        click.ClickException: there is no checkout around this package, or something is not installed.
    """
    if checkout.find() is None:
        raise click.ClickException(
            "There is no checkout of Giornata here. Clone the repository and run `giornata up` inside, or start the "
            "containers with `docker compose -f deploy/compose.yaml up`."
        )
    extras.require("local")
