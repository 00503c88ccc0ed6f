"""Groups of commands that ask one place: their options, refusals, exit status, and lists page by page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial, wraps
from typing import Any, Final

import click

from giornata_tools import terminal
from giornata_tools.cli.options import Command, Option, api_key_option, gateway_of, url_option
from giornata_tools.clients.edits import RequestRefused
from giornata_tools.clients.http import HttpClient, open_http

# Commands of a group that all ask one place: the options that name it, ``--json``, and the exit status.


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
            ctx.exit(terminal.run(asking(act, **given)))

        whole: Command = command
        for option in reversed(tuple(options)):
            whole = option(whole)
        return group.command(name)(whole)

    return made


# Groups of commands that ask one gateway: their options, their refusals, and lists that come page by page.


PAGE: Final = 100
OPTIONS: Final = (url_option, api_key_option)


def gateway_command(group: click.Group, name: str) -> Callable[[Act], Command]:
    """Makes an :data:`Act` the command `name` of `group`: it is given a gateway, and returns the exit status."""
    return grouped(group, _asking, OPTIONS, name)


def _asking(act: Act, url: str | None, api_key: str | None, **given: Any) -> Callable[[], Awaitable[int]]:
    address = gateway_of(url)
    return lambda: _connected(address, api_key, partial(act, **given))


async def _connected(url: str, api_key: str | None, act: Callable[[HttpClient], Awaitable[int]]) -> int:
    async with open_http(url, api_key) as gateway:
        try:
            return await act(gateway)
        except RequestRefused as error:
            click.echo(f"Error: {error}", err=True)
            return 1


async def listed(gateway: HttpClient, path: str) -> list[dict[str, Any]]:
    """All that a list of the API holds, the newest first; it raises as :meth:`HttpClient.read`."""
    found: list[dict[str, Any]] = []
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        after = f"&after={found[-1]['id']}" if found else ""
        page = await gateway.read(f"{path}?limit={PAGE}{after}")
        found += page["data"]
    return found
