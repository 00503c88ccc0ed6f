"""Users of NATS that ``giornata keys`` makes: what an application logs in with, and how servers learn of it."""

from __future__ import annotations

import asyncio
import re
import secrets
from pathlib import Path
from typing import Final, NamedTuple

import bcrypt
import click
from pydantic import ValidationError

from giornata.api_keys import KeysFileError, NatsUser
from giornata.logs import configure_logs
from giornata.nats_reload import reload_servers
from giornata.nats_users import PASSWORD_BYTES, password_file, update_users
from giornata.wire.errors import GiornataError, ServiceUnavailable
from giornata.wire.permissions import RELOADER, application_user, inbox
from giornata_tools.cli.options import Command

ROUNDS: Final = 4
"""The fewest that bcrypt has: 256 random bits need no stretching, and servers hash again at every login and reload."""
LOGIN: Final = re.compile(r"://(?:[^,/@]*@)?")
"""What stands before a host in an address."""


class NatsLogin(NamedTuple):
    """A new user with the password that is shown once."""

    user: NatsUser
    password: str

    @property
    def inbox(self) -> str:
        """Prefix of the inboxes."""
        return inbox(application_user(self.user.name))

    def address(self, nats_url: str | None) -> str:
        """The servers' addresses with user and password."""
        login = f"://{application_user(self.user.name)}:{self.password}@"
        return LOGIN.sub(login, nats_url or "nats://HOST:4222")


def new_login(name: str) -> NatsLogin:
    """A user with a random password for the application `name`; KeysFileError where that is no such name."""
    password = secrets.token_hex(PASSWORD_BYTES)
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(ROUNDS)).decode()
    try:
        return NatsLogin(NatsUser(name=name, bcrypt=hashed), password)
    except ValidationError:
        raise KeysFileError(
            f"{name!r} is no name of an application: at most 32 small letters, digits and hyphens, no hyphen first"
        ) from None


def nats_options(command: Command) -> Command:
    """Options that say which servers learn of a change."""
    command = click.option(
        "--nats",
        "nats_url",
        envvar="GIORNATA_NATS_URL",
        show_envvar=True,
        metavar="URL",
        help="Running servers, which take the change at once.",
    )(command)
    return click.option(
        "--nats-users",
        "users",
        envvar="GIORNATA_NATS_USERS",
        show_envvar=True,
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="What `python -m giornata.nats_users` or `giornata up` has written (.giornata/nats-users).",
    )(command)


def apply_users(folder: Path | None, keys: Path, nats_url: str | None) -> str:
    """Write the servers' users again and have the servers take them; what came of it, as a sentence.

    Raises:
        KeysFileError: there is no such folder, or the keys cannot be read.
        ServiceUnavailable: the servers have not taken the change.
    """
    if folder is None:
        return (
            "NATS servers learn of it from `python -m giornata.nats_users FOLDER --keys FILE --reload URL`."
        )
    try:
        update_users(folder, keys)
    except OSError as error:
        raise KeysFileError(f"the users of NATS in {folder} cannot be written: {error.strerror}") from error
    if nats_url is None:
        return "NATS servers take it when they reload their configuration."
    configure_logs("error", "console", "giornata")  # or the library's warnings go to standard output
    try:
        n = asyncio.run(reload_servers(LOGIN.sub("://", nats_url), password_file(folder, RELOADER)))
    except GiornataError as error:
        raise ServiceUnavailable(
            f"The change is in the files, and NATS servers have not taken it: {error} Reload them"
        ) from error
    return f"NATS servers that have taken it: {n}."
