"""``giornata bench baseline``: the checkout's server of diffusers' pipeline, in this process's place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from giornata.cli import checkout
from giornata.cli.up import module


@click.command(
    add_help_option=False,
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
    },
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def baseline(flags: tuple[str, ...]) -> None:
    """Serve diffusers' own pipeline with static batching, to compare with; --help lists the server's flags."""
    root = checkout.find()
    if root is None:
        raise click.ClickException(
            "There is no checkout of Giornata here, and the baseline is part of it. Clone the repository and run "
            "`giornata bench baseline` inside."
        )
    command, environment = server(root, flags, os.environ)
    sys.stdout.flush()
    os.execve(command[0], command, environment)  # noqa: S606 - signals then reach the server itself


def server(root: Path, flags: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of ``python -m deploy.baseline`` of the checkout `root`."""
    return module(root, ("deploy.baseline", *flags), env)
