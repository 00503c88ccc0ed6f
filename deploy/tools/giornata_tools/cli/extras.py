"""The distributions of this environment, and the extras that some commands need."""

from __future__ import annotations

import re
from importlib import metadata

import click

from giornata_tools import checkout


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


def installed(name: str) -> str | None:
    """The version of a distribution in this environment, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def lacking(name: str, extra: str = "") -> list[str]:
    """Names of what an installed distribution, or its `extra`, requires and is not installed."""
    parts = (item.partition("extra == ") for item in metadata.requires(name) or ())
    needed = (re.split(r"[^\w.-]", item)[0] for item, _, belongs in parts if belongs.strip("\"'") == extra)
    return [required for required in needed if installed(required) is None]
