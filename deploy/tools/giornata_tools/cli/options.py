"""Options that several commands share, and what follows from those that name a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from giornata.wire.errors import GiornataError
from giornata.wire.subjects import NatsRole
from giornata_tools import checkout
from giornata_tools.clients.edits import (
    LOCAL_GATEWAY,
    LOCAL_NATS,
    NATS_VARIABLE,
    choose_door,
    gateway_url,
    nats_urls,
    without_password,
)
from giornata_tools.connection import StackAddresses, running

ABOVE_0: Final = click.FloatRange(min=0, min_open=True)
AT_LEAST_0: Final = click.FloatRange(min=0)
COUNT: Final = click.IntRange(min=1)
READABLE: Final = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)

STATE_VARIABLE: Final = "GIORNATA_STATE"
FIELDS: Final = {"loras": "--lora", "controlnets": "--controlnet"}
"""Fields of requests whose options are not called as they are."""

Command = Callable[..., Any]
Option = Callable[[Command], Command]

server_option: Final = partial(click.option, show_envvar=True, metavar="URL")
state_option: Final = click.option(
    "--state",
    envvar=STATE_VARIABLE,
    show_envvar=True,
    type=click.Path(file_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _, folder: ctx.meta.update({STATE_VARIABLE: folder}),
    metavar="FOLDER",
    help="Talk to the stack that runs with this --state of `giornata up`.  [default: the checkout's]",
)


def running_stack() -> StackAddresses | None:
    """Return how to reach the stack that ``giornata up`` runs here; None where it runs none."""
    ctx = click.get_current_context(silent=True)
    return running((ctx and ctx.meta.get(STATE_VARIABLE)) or checkout.STATE)


def url_option(command: Command) -> Command:
    """A gateway; without one see :func:`gateway_of`."""
    gateway = server_option(
        "--url",
        envvar="GIORNATA_URL",
        help=f"Gateway to talk to over HTTP.  [default: what `giornata up` runs, or {LOCAL_GATEWAY}]",
    )
    return gateway(state_option(command))


api_key_option: Final = server_option(
    "--api-key", envvar="GIORNATA_API_KEY", metavar="KEY", help="Where the gateway asks for one."
)
folder_option: Final = partial(
    click.option, type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER"
)
device_option: Final = click.option(
    "--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu, cuda or cuda:N."
)
dtype_option: Final = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Of the model; auto: bfloat16 on a GPU, float32 on a CPU.",
)


def option_name(field: str) -> str:
    """``--mask-blur`` for ``mask_blur``; of a list, the option that brings one element."""
    return FIELDS.get(field, f"--{field.replace('_', '-')}")


def door_options(command: Command) -> Command:
    """Options of a gateway, or of the servers of the NATS door instead."""
    nats = server_option(
        "--nats", "nats_url", envvar=NATS_VARIABLE, help="NATS server(s) to talk over instead."
    )
    blobs = server_option(
        "--blobs",
        "blobs_url",
        envvar="GIORNATA_BLOBS_URL",
        help="Blob store; over NATS needed for pictures above 6 MiB.",
    )
    return url_option(nats(blobs(command)))


def user_options(user: NatsRole, does: str) -> Option:
    """NATS servers as `url`, and a `password_file` of `user`, for :func:`login_of`; `does` says what servers do."""
    servers = server_option(
        "--nats",
        "url",
        envvar=NATS_VARIABLE,
        help=f"NATS server(s) {does}.  [default: those of `giornata up`, or {LOCAL_NATS}]",
    )
    password = click.option(
        "--password-file",
        envvar="GIORNATA_NATS_PASSWORD_FILE",
        show_envvar=True,
        type=READABLE,
        metavar="FILE",
        help=f"Holds the password of the NATS user `{user}`, where the server asks for one.",
    )
    return lambda command: servers(password(state_option(command)))


def model_option(text: str, **more: Any) -> Option:
    """A checkpoint."""
    return click.option(
        "--model", envvar="GIORNATA_MODEL", show_envvar=True, metavar="FOLDER_OR_ID", help=text, **more
    )


def models_option(text: str) -> Option:
    """Checkpoints, each with the name that requests call it by, or without one.

    No variable: a list in one could not tell where a path with blanks ends.
    """
    return click.option("--model", "models", multiple=True, metavar="[NAME=]FOLDER_OR_ID", help=text)


def torch_threads_option(text: str, default: int | None = 1) -> Option:
    """Threads that torch computes with."""
    return click.option(
        "--torch-threads", type=COUNT, default=default, show_default=True, metavar="N", help=text
    )


def typed(ctx: click.Context) -> set[str]:
    """Names of the parameters that were typed, and not taken from the environment or their defaults."""
    return {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def door_of(ctx: click.Context, url: str | None, nats_url: str | None) -> str:
    """The address, of a gateway or of NATS servers, that the options of a command name.

    Raises:
        click.UsageError: two doors, or no address.
    """
    with usage_errors():
        return choose_door(url if nats_url else _gateway(url), nats_url, typed(ctx))


def gateway_of(url: str | None) -> str:
    """The gateway that an option names, else that of the running stack, else the usual one of this machine.

    Raises:
        click.UsageError: it is no address.
    """
    with usage_errors():
        return gateway_url(_gateway(url))


def _gateway(url: str | None) -> str:
    return url or ((stack := running_stack()) and stack.url) or LOCAL_GATEWAY


def connection_failure(error: GiornataError, url: str) -> str:
    """Return why servers at `url` do not let a command in, and what to do."""
    from giornata.bus.connection import NO_SERVER  # with the library, which not every command needs

    if str(error) != NO_SERVER:
        return str(error)
    start = "Start a stack with `giornata up`, or name one by --state or --nats."
    return f"No NATS server answers at {without_password(url)}. {start}"


def login_of(
    url: str | None, password_file: Path | None, user: NatsRole
) -> tuple[str, Path | None, str | None]:
    """Servers, the file of `user`'s password there, and blob store: the option's, else the running stack's.

    Raises:
        click.UsageError: one is no address.
    """
    if url is None and (stack := running_stack()):
        return stack.nats_url, password_file or stack.password_file(user), stack.blobs_url
    with usage_errors():
        return nats_urls(url or LOCAL_NATS), password_file, None


@contextmanager
def usage_errors(of: object = "") -> Iterator[None]:
    """What is refused inside, or cannot be read or written, is a mistake in the command line: in the option `of`.

    Raises:
        click.UsageError: the same in words.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise click.UsageError(f"{of}: {error}." if of else str(error)) from error
