"""Options by which commands are told whom to talk to, and the door that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from giornata_tools.doors.addresses import (
    LOCAL_GATEWAY,
    NATS_VARIABLE,
    URL_VARIABLE,
    Http,
    Nats,
    choose_door,
    gateway_url,
)

url_option = click.option(
    "--url",
    envvar=URL_VARIABLE,
    show_envvar=True,
    metavar="URL",
    help=f"Gateway to talk to over HTTP.  [default: {LOCAL_GATEWAY}]",
)
nats_option = click.option(
    "--nats",
    "nats_url",
    envvar=NATS_VARIABLE,
    show_envvar=True,
    metavar="URL",
    help="NATS server(s) to talk over instead.",
)
redis_option = click.option(
    "--redis",
    "redis_url",
    envvar="GIORNATA_REDIS_URL",
    show_envvar=True,
    metavar="URL",
    help="Blob store; over NATS needed for pictures above 6 MiB.",
)
api_key_option = click.option(
    "--api-key",
    envvar="GIORNATA_API_KEY",
    show_envvar=True,
    metavar="KEY",
    help="Where the gateway asks for one.",
)


def door_of(ctx: click.Context, url: str | None, nats_url: str | None) -> Http | Nats:
    """The door that the options of a command name.

    Raises:
        click.UsageError: two doors, or no address.
    """
    typed = {
        name: ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in ("url", "nats_url")
    }
    return _usage(choose_door, url, nats_url, url_typed=typed["url"], nats_typed=typed["nats_url"])  # type: ignore[no-any-return]


def gateway_of(url: str | None) -> str:
    """The gateway that an option names, or the local one.

    Raises:
        click.UsageError: it is no address.
    """
    return str(_usage(gateway_url, url or LOCAL_GATEWAY))


def _usage(decide: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return decide(*arguments, **named)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
