"""Groups of commands that ask one gateway: their options, their refusals, and lists that come page by page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import click

from giornata_tools.cli.grouped import Act, grouped
from giornata_tools.cli.options import Command, api_key_option, gateway_of, url_option
from giornata_tools.doors.edits import RequestRefused
from giornata_tools.doors.http_door import HttpClient, open_http

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
