"""What a command needs beyond the distribution's own requirements."""

from __future__ import annotations

import re
from importlib import metadata

import click

from giornata_tools.provenance import installed

DISTRIBUTION = "giornata-tools"


def require(extra: str) -> None:
    """Refuse to go on where the environment lacks what `extra` of the distribution names.

    Raises:
        click.ClickException: names what is missing and says how to get it.
    """
    named = [item for item in metadata.requires(DISTRIBUTION) or () if f'extra == "{extra}"' in item]
    missing = [name for item in named if installed(name := re.split(r"[^\w.-]", item)[0]) is None]
    if missing:
        raise click.ClickException(
            f"This command needs {', '.join(missing)}: run `make setup` in the checkout, or "
            f"`pip install --constraint constraints.txt --editable 'deploy/tools[{extra}]'` there."
        )
