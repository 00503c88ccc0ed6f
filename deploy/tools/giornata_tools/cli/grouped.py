"""Commands of a group that all ask one place: the options that name it, ``--json``, and the exit status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from typing import Any

import click

from giornata_tools import interrupts
from giornata_tools.cli.options import Command, Option

Act = Callable[..., Awaitable[Any]]
"""What a command does, given what it asks, `as_json` and its own parameters."""
Asking = Callable[..., Callable[[], Awaitable[int]]]
"""Given an :data:`Act` and what was typed, refuses what makes no sense, and returns what asks and tells the status."""


def grouped(
    group: click.Group, asking: Asking, options: Iterable[Option], name: str
) -> Callable[[Act], Command]:
    """Makes an :data:`Act` the command `name` of `group`; `options` say which place is asked."""

    def made(act: Act) -> Command:
        @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
        @click.pass_context
        @wraps(act)
        def command(ctx: click.Context, /, **given: Any) -> None:
            ctx.exit(interrupts.run(asking(act, **given)))

        whole: Command = command
        for option in reversed(tuple(options)):
            whole = option(whole)
        return group.command(name)(whole)

    return made
