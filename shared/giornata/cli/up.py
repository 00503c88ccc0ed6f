"""``giornata up``: the launcher of the checkout, in this process's place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from giornata.cli import checkout


@click.command(
    add_help_option=False,
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
    },
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def up(flags: tuple[str, ...]) -> None:
    """Run the whole system on this machine until Ctrl-C, as `make up` does; --help lists the launcher's flags."""
    root = checkout.find()
    if root is None:
        raise click.ClickException(
            "There is no checkout of Giornata here. Clone the repository and run `giornata up` inside, "
            "or start the containers with `docker compose -f deploy/compose.yaml up`."
        )
    command, environment = launcher(root, flags, os.environ)
    sys.stdout.flush()
    os.execve(command[0], command, environment)  # noqa: S606 - signals then reach the launcher itself


def launcher(root: Path, flags: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of ``python -m deploy.launcher up`` of the checkout `root`."""
    return module(root, ("deploy.launcher", "up", *flags), env)


def module(root: Path, words: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of ``python -m`` with `words`, a module of the checkout `root` and its flags.

    The working directory stays, since flags and variables may name files; ``-P`` keeps a package called `deploy` that
    lies in it from being taken for the checkout's.
    """
    path = os.pathsep.join(part for part in (str(root), env.get("PYTHONPATH")) if part)
    return [sys.executable, "-P", "-m", *words], {**env, "PYTHONPATH": path}
