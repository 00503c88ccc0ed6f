"""What a command needs beyond the distribution's own requirements."""

from __future__ import annotations

import click

from giornata_tools.provenance import lacking


def require(extra: str) -> None:
    """Refuse to go on where the environment lacks what `extra` of the distribution names.

    Raises:
        click.ClickException: names what is missing and says how to get it.
    """
    if missing := lacking("giornata-tools", extra):
        raise click.ClickException(
            f"This command needs {', '.join(missing)}: run `make setup` in the checkout, or "
            f"`pip install --constraint constraints.txt --editable 'deploy/tools[{extra}]'` there."
        )
