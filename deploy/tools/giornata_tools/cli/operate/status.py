"""``giornata status``: the fleet, once or live."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from giornata.wire.errors import ErrorBody
from giornata.wire.workers import FleetView
from giornata_tools import interrupts
from giornata_tools.cli.connecting import api_key_option, gateway_of, url_option
from giornata_tools.cli.operate.fleet_table import fleet_table
from giornata_tools.doors.edits import Refused
from giornata_tools.doors.http_door import HttpClient, open_http

PATH = "/v1/fleet"


@click.command()
@url_option
@api_key_option
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print what the gateway tells; with --watch a line each time."
)
@click.pass_context
def status(ctx: click.Context, url: str | None, api_key: str | None, *, watch: bool, as_json: bool) -> None:
    """Show every instance of every service: its state, its pictures in progress, its pace; and the queue.

    A question mark is what is not known yet, such as the pace of a worker that has computed nothing lately.
    """
    gateway = gateway_of(url)
    ctx.exit(interrupts.run(lambda: run(gateway, api_key, watch=watch, as_json=as_json)))


async def run(url: str, api_key: str | None, *, watch: bool, as_json: bool) -> int:
    """Ask and print; the exit status. Ctrl-C is how watching ends, and so no failure."""
    try:
        async with open_http(url, api_key) as door:
            if watch:
                return await _watch(door, as_json=as_json)
            told = await door.read(PATH)
            if as_json:
                click.echo(json.dumps(told, indent=2))
            else:
                Console().print(fleet_table(_fleet(told)))
    except Refused as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    return 0


async def _watch(door: HttpClient, *, as_json: bool) -> int:
    try:
        if as_json:
            async for told in door.follow(PATH):
                click.echo(json.dumps(told))
        else:
            with Live(console=Console(), auto_refresh=False) as live:
                async for told in door.follow(PATH):
                    live.update(fleet_table(_fleet(told)), refresh=True)
    except asyncio.CancelledError:
        return 0
    click.echo("The gateway ended the stream; it is shutting down.", err=True)
    return 1


def _fleet(told: dict[str, Any]) -> FleetView:
    try:
        return FleetView.model_validate(told)
    except ValidationError as error:
        message = f"The gateway tells of its fleet in another form than this version reads: {error}"
        raise Refused(ErrorBody(code="schema_mismatch", message=message)) from error
