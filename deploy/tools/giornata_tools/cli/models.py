"""``giornata models``: which models a gateway serves, and what a request for one may name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.text import Text

from giornata.wire.errors import ErrorBody
from giornata.wire.requests import EditParameters
from giornata_tools import terminal
from giornata_tools.cli.options import api_key_option, gateway_of, option_name, url_option
from giornata_tools.clients.edits import RequestRefused
from giornata_tools.clients.http import open_http
from giornata_tools.terminal import show, table

PATH: Final = "/v1/models"
FILES: Final = {"image": "IN", "mask": "--mask"}
"""Fields that are no parameters, as the command line has them."""


@click.command()
@click.argument("name", required=False)
@url_option
@api_key_option
@click.option("--json", "as_json", is_flag=True, help="Print what the gateway tells.")
@click.pass_context
def models(
    ctx: click.Context, name: str | None, url: str | None, api_key: str | None, *, as_json: bool
) -> None:
    """List the models that are served, or the options of one.

    Of the model NAME each option has its default by task, and its samplers and ControlNets are named.
    """
    gateway = gateway_of(url)
    ctx.exit(terminal.run(lambda: run(gateway, api_key, name, as_json=as_json)))


async def run(url: str, api_key: str | None, name: str | None, *, as_json: bool) -> int:
    """Ask and print; the exit status."""
    try:
        async with open_http(url, api_key) as door:
            told = (await door.read(PATH))["data"]
        chosen = told if name is None else [_named(told, name)]
    except RequestRefused as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    if as_json:
        click.echo(json.dumps(chosen, indent=2))
    else:
        show(models_table(chosen) if name is None else model_table(chosen[0]))
    return 0


def _named(told: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    for model in told:
        if model["id"] == name:
            return model
    served = ", ".join(model["id"] for model in told) or "none"
    raise RequestRefused(
        ErrorBody(code="model_not_found", message="No such model is served.", received=name, accepted=served)
    )


def models_table(told: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A line per model of ``GET /v1/models``."""
    if not told:
        return Text("No model is served.")
    lines = table("model", "family", "tasks", "guidance", "native size", "sides")
    for model in told:
        side = model["native_size"]
        lines.add_row(
            model["id"],
            model["family"],
            ", ".join(model["tasks"]),
            model["guidance"],
            f"{side}x{side}",
            f"multiples of {model['size_multiple']}",
        )
    return lines


def model_table(model: Mapping[str, Any]) -> RenderableType:
    """A line per option that a model of ``GET /v1/models`` takes for some task: its default by task."""
    tasks, fields = model["tasks"], model["fields"]
    lines = table("option", *tasks)
    for name in dict.fromkeys(name for task in tasks for name in fields[task]):
        if name in EditParameters.model_fields or name in FILES:
            lines.add_row(_option(name), *(_default(model, task, name) for task in tasks))
    named = [Text(f"samplers: {', '.join(model['samplers'])}")]
    if model["controlnets"]:
        named.append(Text(f"ControlNets: {', '.join(map(_controlnet, model['controlnets']))}"))
    return Group(models_table([model]), Text(), lines, Text(), *named)


def _controlnet(net: Mapping[str, Any]) -> str:
    return f"{net['name']} (mode 0 to {net['modes'] - 1})" if net["modes"] else str(net["name"])


def _option(name: str) -> str:
    return FILES.get(name) or option_name(name)


def _default(model: Mapping[str, Any], task: str, name: str) -> str:
    """The default as a cell; empty where an option has none, and may be left out."""
    if name not in model["fields"][task]:
        return "-"
    field, default = EditParameters.model_fields.get(name), model["defaults"][task].get(name)
    if default is None and field is not None:
        default = "required" if field.is_required() else field.get_default(call_default_factory=True)
    return "" if default is None or default == () else str(default)
