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
from giornata_tools.cli.groups import asks_gateway
from giornata_tools.cli.options import api_key_option, option_name, url_option
from giornata_tools.clients.edits import RequestRefused
from giornata_tools.clients.http import HttpClient
from giornata_tools.terminal import show, table

PATH: Final = "/v1/models"
FILES: Final = {"image": "IN", "mask": "--mask"}
"""Fields that are no parameters, as the command line has them."""


@click.command()
@click.argument("name", required=False)
@url_option
@api_key_option
@click.option("--json", "as_json", is_flag=True, help="Print what the gateway tells.")
@asks_gateway
async def models(gateway: HttpClient, name: str | None, *, as_json: bool) -> None:
    """List the models that are served, or the options of one.

    Of the model NAME each option has its default by task, and its samplers and ControlNets are named.
    """
    told = (await gateway.read(PATH))["data"]
    chosen = told if name is None else [_named(told, name)]
    if as_json:
        click.echo(json.dumps(chosen, indent=2))
    else:
        show(models_table(chosen) if name is None else model_table(chosen[0]))


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
        side, tasks = model["native_size"], ", ".join(model["tasks"])
        sizes = (f"{side}x{side}", f"multiples of {model['size_multiple']}")
        lines.add_row(model["id"], model["family"], tasks, model["guidance"], *sizes)
    return lines


def model_table(model: Mapping[str, Any]) -> RenderableType:
    """A line per option that a model of ``GET /v1/models`` takes for some task: its default by task."""
    tasks, fields = model["tasks"], model["fields"]
    lines = table("option", *tasks)
    for name in dict.fromkeys(name for task in tasks for name in fields[task]):
        if name in EditParameters.model_fields or name in FILES:
            option = FILES.get(name) or option_name(name)
            lines.add_row(option, *(_default(model, task, name) for task in tasks))
    named = [Text(f"samplers: {', '.join(model['samplers'])}")]
    if model["controlnets"]:
        named.append(Text(f"ControlNets: {', '.join(map(_controlnet, model['controlnets']))}"))
    return Group(models_table([model]), Text(), lines, Text(), *named)


def _controlnet(net: Mapping[str, Any]) -> str:
    return f"{net['name']} (mode 0 to {net['modes'] - 1})" if net["modes"] else str(net["name"])


def _default(model: Mapping[str, Any], task: str, name: str) -> str:
    """The default as a cell; empty where an option has none, and may be left out."""
    if name not in model["fields"][task]:
        return "-"
    field, default = EditParameters.model_fields.get(name), model["defaults"][task].get(name)
    if default is None and field is not None:
        default = "required" if field.is_required() else field.get_default(call_default_factory=True)
    return "" if default is None or default == () else str(default)
