"""``giornata lora``: adapters that edits can name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from rich.table import Table

from giornata.wire.errors import ErrorBody
from giornata_tools.cli.groups import gateway_command, listed, tell_all
from giornata_tools.cli.lora_profile import profile
from giornata_tools.cli.options import READABLE
from giornata_tools.clients.edits import sentence
from giornata_tools.clients.http import HttpClient, uploaded
from giornata_tools.terminal import show, table


@click.group()
def lora() -> None:
    """Upload, list, pin, remove and profile LoRAs.

    A LoRA is a file of safetensors for one model, with the names of diffusers, PEFT, kohya or XLabs.
    """


lora.add_command(profile)
_of_lora: Final = partial(gateway_command, lora)


@_of_lora("add")
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


@_of_lora("list")
async def list_loras(gateway: HttpClient, *, as_json: bool) -> None:
    """Show those that the API key may use, the newest first."""
    tell_all(await listed(gateway, "/v1/loras"), _table, "There is no LoRA.", as_json=as_json)


@_of_lora("show")
@click.argument("lora_id", metavar="ID")
async def show_lora(gateway: HttpClient, lora_id: str, *, as_json: bool) -> None:
    """Show all that is known of one."""
    told = await gateway.read(f"/v1/loras/{lora_id}")
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        show(_table([told]))
        if told["error"] is not None:
            click.echo(f"{told['error']['code']}: {told['error']['message']}")


@_of_lora("rm")
@click.argument("lora_id", metavar="ID")
async def remove(gateway: HttpClient, lora_id: str, *, as_json: bool) -> None:
    """Remove one. Edits that have begun end as before."""
    told = await gateway.delete(f"/v1/loras/{lora_id}")
    _told(told, f"{lora_id} is removed.", as_json=as_json)


@_of_lora("pin")
@click.argument("lora_id", metavar="ID")
async def pin(gateway: HttpClient, lora_id: str, *, as_json: bool) -> None:
    """Have every host keep one."""
    told = await gateway.put(f"/v1/loras/{lora_id}/pin")
    _told(told, f"{lora_id} is pinned.", as_json=as_json)


@_of_lora("unpin")
@click.argument("lora_id", metavar="ID")
async def unpin(gateway: HttpClient, lora_id: str, *, as_json: bool) -> None:
    """Let hosts let go of one again."""
    told = await gateway.delete(f"/v1/loras/{lora_id}/pin")
    _told(told, f"{lora_id} is not pinned.", as_json=as_json)


def _told(told: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    """Print the gateway's answer, or what it comes to."""
    click.echo(json.dumps(told) if as_json else sentence, err=not as_json)


def _table(loras: Sequence[dict[str, Any]]) -> Table:
    lines = table(
        *("id", "name", "model", "state", "rank", "joins within", "MB"),
        numbers={"rank", "joins within", "MB"},
    )
    for one in loras:
        state = one["state"] if one["error"] is None else f"{one['state']}: {one['error']['code']}"
        share = one.get("joins_within")  # pictures, or an older gateway, may not tell
        within = "" if share is None else f"{share:.0%}"
        about = (str(one[name] or "") for name in ("id", "name", "model"))
        lines.add_row(*about, state, str(one["rank"] or ""), within, f"{one['bytes'] / 1e6:.1f}")
    return lines
