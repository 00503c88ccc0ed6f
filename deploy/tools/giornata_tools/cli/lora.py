"""``giornata lora``: adapters that edits can name."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Column, Table

from giornata.wire.errors import ErrorBody
from giornata_tools import interrupts
from giornata_tools.cli.lora_profile import profile
from giornata_tools.cli.options import READABLE, Command, server_option, usage_errors
from giornata_tools.doors.addresses import LOCAL_GATEWAY, gateway_url
from giornata_tools.doors.edits import Refused, sentence
from giornata_tools.doors.http_door import HttpClient, open_http
from giornata_tools.doors.loras import uploaded

Act = Callable[..., Awaitable[int]]
PAGE: Final = 100


@click.group()
def lora() -> None:
    """Upload, list, pin, remove and profile LoRAs.

    A LoRA is a file of safetensors for one model, with the names of diffusers, PEFT, kohya or XLabs.
    """


lora.add_command(profile)


def _command(name: str) -> Callable[[Act], Command]:
    """Makes `act` a command of the group: it is called with a gateway, `as_json` and its own parameters."""

    def made(act: Act) -> Command:
        @lora.command(name)
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


@_command("add")
@click.argument("file", type=READABLE)
@click.option("--model", metavar="NAME", help="The model that it is for; default: the one that is served.")
@click.option("--name", metavar="TEXT", help="What to call it; default: the file's name.")
async def add(gateway: HttpClient, file: Path, model: str | None, name: str | None, *, as_json: bool) -> int:
    """Upload FILE, and wait until it can be used."""
    fields = {"model": model, "name": name}
    told = await uploaded(gateway, file, {key: text for key, text in fields.items() if text})
    if as_json:
        click.echo(json.dumps(told, indent=2))
    elif told["state"] == "ready":
        click.echo(told["id"])
        click.echo(f"Ready: rank {told['rank']}, {told['modules']} modules of {told['model']}.", err=True)
    if told["state"] == "ready":
        return 0
    error = told["error"] or {"code": told["state"], "message": "It was removed."}
    click.echo(f"Error: {sentence(ErrorBody.model_validate(error))}", err=True)
    return 1


@_command("list")
async def list_loras(gateway: HttpClient, *, as_json: bool) -> int:
    """Show those that the API key may use, the newest first."""
    found: list[dict[str, Any]] = []
    page: dict[str, Any] = {"has_more": True}
    while page["has_more"]:
        after = f"&after={found[-1]['id']}" if found else ""
        page = await gateway.read(f"/v1/loras?limit={PAGE}{after}")
        found += page["data"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif found:
        Console().print(_table(found))
    else:
        click.echo("There is no LoRA.", err=True)
    return 0


@_command("show")
@click.argument("lora_id", metavar="ID")
async def show_lora(gateway: HttpClient, lora_id: str, *, as_json: bool) -> int:
    """Show all that is known of one."""
    told = await gateway.read(f"/v1/loras/{lora_id}")
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        console = Console()
        console.print(_table([told]))
        if told["error"] is not None:
            console.print(f"{told['error']['code']}: {told['error']['message']}")
    return 0


@_command("rm")
@click.argument("lora_id", metavar="ID")
async def remove(gateway: HttpClient, lora_id: str, *, as_json: bool) -> int:
    """Remove one. Edits that have begun end as before."""
    told = await gateway.delete(f"/v1/loras/{lora_id}")
    return _told(told, f"{lora_id} is removed.", as_json=as_json)


@_command("pin")
@click.argument("lora_id", metavar="ID")
async def pin(gateway: HttpClient, lora_id: str, *, as_json: bool) -> int:
    """Have every host keep one."""
    told = await gateway.put(f"/v1/loras/{lora_id}/pin")
    return _told(told, f"{lora_id} is pinned.", as_json=as_json)


@_command("unpin")
@click.argument("lora_id", metavar="ID")
async def unpin(gateway: HttpClient, lora_id: str, *, as_json: bool) -> int:
    """Let hosts let go of one again."""
    told = await gateway.delete(f"/v1/loras/{lora_id}/pin")
    return _told(told, f"{lora_id} is not pinned.", as_json=as_json)


def _told(told: dict[str, Any], sentence: str, *, as_json: bool) -> int:
    """Print the gateway's answer, or what it comes to; the exit status."""
    click.echo(json.dumps(told) if as_json else sentence, err=not as_json)
    return 0


def _table(loras: list[dict[str, Any]]) -> Table:
    whole = Column("id", overflow="fold")  # other commands are given it
    table = Table(whole, "name", "model", "state", "rank", "joins within", "MB")
    for one in loras:
        state = one["state"] if one["error"] is None else f"{one['state']}: {one['error']['code']}"
        megabytes = f"{one['bytes'] / 1e6:.1f}"
        table.add_row(
            one["id"],
            one["name"] or "",
            one["model"] or "",
            state,
            str(one["rank"] or ""),
            _joining(one.get("joins_within")),
            megabytes,
        )
    return table


def _joining(share: float | None) -> str:
    """How much of the steps may pass without a LoRA; nothing where pictures, or an older gateway, do not tell."""
    return "" if share is None else f"{share:.0%}"
