"""Commands that ask one place, a gateway or NATS servers: their options, refusals, exit status and lists."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click
from rich.console import RenderableType

from giornata.wire.subjects import NatsRole
from giornata_tools import terminal
from giornata_tools.cli.options import (
    Command,
    api_key_option,
    connection_failure,
    gateway_of,
    login_of,
    url_option,
)
from giornata_tools.clients.edits import RequestRefused
from giornata_tools.clients.http import HttpClient, open_http

Act = Callable[..., Awaitable[int | None]]
"""What a command does, given what it asks and its own parameters; the exit status, None for 0."""
PAGE: Final = 100
json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def asks_gateway(act: Act) -> Command:
    """Makes an :data:`Act` what a command calls: it is given the gateway of `url_option` and `api_key_option`."""

    async def connected(address: str, api_key: str | None, given: dict[str, Any]) -> int:
        async with open_http(address, api_key) as gateway:
            try:
                return await act(gateway, **given) or 0
            except RequestRefused as error:
                click.echo(f"Error: {error}", err=True)
                return 1

    @click.pass_context
    @wraps(act)
    def command(ctx: click.Context, /, url: str | None, api_key: str | None, **given: Any) -> None:
        address = gateway_of(url)
        ctx.exit(terminal.run(lambda: connected(address, api_key, given)))

    return command


def gateway_command(group: click.Group, name: str) -> Callable[[Act], Command]:
    """Makes an :data:`Act` the command `name` of `group`, which asks a gateway."""
    return lambda act: group.command(name)(url_option(api_key_option(json_option(asks_gateway(act)))))


def asks_nats(user: NatsRole) -> Callable[[Act], Command]:
    """Makes an :data:`Act` what a command calls: it is given a connection to the servers of `user_options`, as `user`.

    It may raise GiornataError, which is told.
    """

    def made(act: Act) -> Command:
        async def connected(address: str, password_file: Path | None, given: dict[str, Any]) -> int:
            from giornata.bus import bus
            from giornata.logs import configure_logs
            from giornata.wire.errors import GiornataError

            configure_logs("error", "console", "giornata")  # or the library's warnings go to standard output
            connecting = bus.connect(address, "giornata-cli", user=user, password_file=password_file)
            try:
                async with connecting as connection:
                    return await act(connection, **given) or 0
            except GiornataError as error:
                click.echo(f"Error: {connection_failure(error, address)}", err=True)
                return 1

        @click.pass_context
        @wraps(act)
        def command(ctx: click.Context, /, url: str | None, password_file: Path | None, **given: Any) -> None:
            address, password, _ = login_of(url, password_file, user)
            ctx.exit(terminal.run(lambda: connected(address, password, given)))

        return command

    return made


async def listed(gateway: HttpClient, path: str) -> list[dict[str, Any]]:
    """All that a list of the API holds, the newest first; it raises as :meth:`HttpClient.read`."""
    found: list[dict[str, Any]] = []
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        after = f"&after={found[-1]['id']}" if found else ""
        page = await gateway.read(f"{path}?limit={PAGE}{after}")
        found += page["data"]
    return found


def tell_all(
    found: Sequence[Any], drawn: Callable[[Sequence[Any]], RenderableType], none: str, *, as_json: bool
) -> None:
    """Print a list as JSON or as `drawn`; `none` is the sentence of an empty one."""
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif found:
        terminal.show(drawn(found))
    else:
        click.echo(none, err=True)
