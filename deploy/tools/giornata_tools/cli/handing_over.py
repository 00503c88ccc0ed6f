"""Commands that are a module of the checkout: it runs in this process's place, with all flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from giornata_tools.cli import checkout


def passes_flags(function: Callable[..., Any]) -> click.Command:
    """Makes a command of a function of `flags`: all that is typed after its name, ``--help`` too."""
    settings = {
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "allow_interspersed_args": False,
    }
    flags = click.argument("flags", nargs=-1, type=click.UNPROCESSED)
    return click.command(add_help_option=False, context_settings=settings)(flags(function))


def become(*words: str, absent: str) -> NoReturn:
    """``python -m`` with `words`, a module of the checkout and its flags.

    Args:
        words: of the command.
        absent: what to do where there is no checkout.

    Raises:
        click.ClickException: there is none.
    """
    root = checkout.find()
    if root is None:
        raise click.ClickException(f"There is no checkout of Giornata here{absent}")
    command, environment = module(root, words, os.environ)
    sys.stdout.flush()
    os.execve(command[0], command, environment)  # noqa: S606 - signals then reach the module itself


def module(root: Path, words: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of ``python -m`` with `words`, a module of the checkout `root` and its flags.

    The working directory stays, since flags and variables may name files; ``-P`` keeps a package called `deploy` that
    lies in it from being taken for the checkout's.
    """
    path = os.pathsep.join(part for part in (str(root), env.get("PYTHONPATH")) if part)
    return [sys.executable, "-P", "-m", *words], {**env, "PYTHONPATH": path}
