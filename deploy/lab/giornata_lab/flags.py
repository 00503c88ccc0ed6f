"""Flags of the benchmarks and rehearsals, read by click."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import click
from click.types import convert_type


class Several(click.ParamType[list[Any]]):
    """Values with commas between them, each of the type `of`."""

    name = "several"

    def __init__(self, of: Any) -> None:
        self._of = convert_type(of)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """A list."""
        parts = value.split(",") if isinstance(value, str) else value
        return [self._of.convert(part, param, ctx) for part in parts if part != ""]


def option(name: str, **settings: Any) -> click.Option:
    """A flag; its default is shown."""
    return click.Option([name], show_default=not settings.get("is_flag"), **settings)


def parsed(
    doc: str | None, parameters: Sequence[click.Parameter], arguments: Sequence[str] | None = None
) -> SimpleNamespace:
    """What `arguments`, by default those of the process, say; ends the program where they say nothing that is known.

    Args:
        doc: of the program; its first paragraph is told by ``--help``.
        parameters: in the order in which ``--help`` tells them.
        arguments: flags and their values.
    """
    command = click.Command(
        None,
        params=list(parameters),
        help=(doc or "").split("\n\n", maxsplit=1)[0],
        callback=SimpleNamespace,
    )
    try:
        found = command.main(arguments, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    if not isinstance(found, SimpleNamespace):  # after --help
        sys.exit(found)
    return found
