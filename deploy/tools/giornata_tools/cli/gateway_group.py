"""Groups of commands that ask one gateway: their options, their refusals, and lists that come page by page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Final

import click

from giornata_tools import interrupts
from giornata_tools.cli.options import Command, server_option, usage_errors
from giornata_tools.doors.addresses import LOCAL_GATEWAY, gateway_url
from giornata_tools.doors.edits import Refused
from giornata_tools.doors.http_door import HttpClient, open_http

Act = Callable[..., Awaitable[int]]
"""What a command does: given a gateway, `as_json` and its own parameters, it returns the exit status."""
PAGE: Final = 100


def gateway_command(group: click.Group, name: str) -> Callable[[Act], Command]:
    """Makes an :data:`Act` the command `name` of `group`."""

    def made(act: Act) -> Command:
        @group.command(name)
        @server_option(
            "--url",
            "url",
            envvar="GIORNATA_URL",
            default=LOCAL_GATEWAY,
            show_default=True,
            help="Gateway.",
        )
        @click.option(
            "--api-key",
            envvar="GIORNATA_API_KEY",
            show_envvar=True,
            metavar="KEY",
            help="Where the gateway asks for one.",
        )
        @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
        @click.pass_context
        @wraps(act)
        def command(ctx: click.Context, /, url: str, api_key: str | None, **given: Any) -> None:
            with usage_errors():
                address = gateway_url(url)
            ctx.exit(interrupts.run(lambda: _connected(address, api_key, act, given)))

        return command

    return made


async def _connected(url: str, api_key: str | None, act: Act, given: dict[str, Any]) -> int:
    async with open_http(url, api_key) as gateway:
        try:
            return await act(gateway, **given)
        except Refused as error:
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
