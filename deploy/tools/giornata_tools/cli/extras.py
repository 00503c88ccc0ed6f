"""The extras of the distribution that some commands need."""

from __future__ import annotations

import click

from giornata_tools import checkout
from giornata_tools.provenance import lacking


def require(extra: str, part: str = "tools") -> None:
    """Refuse to go on where the environment lacks what `extra` of a distribution names, of the tools' or the lab's.

    Raises:
        click.ClickException: names what is missing and says how to get it.
    """
    if missing := lacking(f"giornata-{part}", extra):
        raise click.ClickException(
            f"This command needs {', '.join(missing)}: run `make setup` in the checkout, or "
            f"`pip install --constraint constraints.txt --editable 'deploy/{part}[{extra}]'` there."
        )


def require_system(part: str = "tools") -> None:
    """Refuse to go on where the system cannot be started, or a distribution lacks what it does with it.

    Raises:
        click.ClickException: there is no checkout around this package, or something is not installed.
    """
    if checkout.find() is None:
        raise click.ClickException(
            "There is no checkout of Giornata here. Clone the repository and run `giornata up` inside, or start the "
            "containers with `docker compose -f deploy/compose.yaml up`."
        )
    require("local")
    if part != "tools":
        require("local", part)
