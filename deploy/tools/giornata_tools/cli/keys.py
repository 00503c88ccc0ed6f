"""``giornata keys``: the file of API keys that gateways read, and applications' users of NATS."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import bcrypt
import click
from pydantic import ValidationError

from giornata import api_keys
from giornata.api_keys import ApiKey, KeysFile, KeysFileError, NatsUser, TenantLimits
from giornata.logs import configure_logs
from giornata.nats_users import PASSWORD_BYTES, password_file, read_keys, reload_servers, update_users
from giornata.wire.errors import GiornataError, ServiceUnavailable
from giornata.wire.subjects import RELOADER, application_user, inbox
from giornata_tools.cli.options import Command
from giornata_tools.terminal import show, table

# Users of NATS that ``giornata keys`` makes: what an application logs in with, and how servers learn of it.


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


# ``giornata keys``: the file of API keys that gateways read (GIORNATA_API_KEYS_FILE), and applications'
# users of NATS.
#
# One program at a time changes a file, whole or not at all.


MODE: Final = 0o600
"""Mode of a new file; a file that exists keeps its mode and its owner."""

file_option = click.option(
    "--file",
    "path",
    envvar="GIORNATA_API_KEYS_FILE",
    show_envvar=True,
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The file that the gateways read, too.",
)


def limit_options(command: Command) -> Command:
    """Options of what a tenant may do."""
    share = click.FloatRange(0, api_keys.MAX_WEIGHT, min_open=True)
    for name, kind, text in (
        ("--weight", share, "Share beside other tenants; default 1."),
        ("--per-minute", click.IntRange(0), "Pictures that the tenant may ask for in a minute; 0: no limit."),
        ("--in-progress", click.IntRange(0), "Pictures that the tenant may have in progress; 0: no limit."),
    ):
        command = click.option(name, type=kind, metavar="N", help=text)(command)
    text = "Whether `giornata status` tells it of hosts, instances and the load of others; default no."
    return click.option("--operator/--no-operator", default=None, help=text)(command)


tenant_option = click.option(
    "--tenant", required=True, metavar="NAME", help="Letters, digits, _ and -, at most 64."
)


@click.group()
def keys() -> None:
    """Make, list and revoke applications and the API keys that gateways ask for.

    Gateways read the file again when it has changed; it holds no keys, only their hashes.
    """


@keys.command()
@file_option
@tenant_option
@limit_options
def create(path: Path, tenant: str, **limits: Any) -> None:
    """Make a key for the HTTP door and print it, this once.

    Limits are the tenant's and hold for all of its keys. A limit that is not named stays as it is, or as the gateway's
    configuration says.
    """
    with _mistakes():
        key = _make(path, tenant, TenantLimits(**limits), None)
    click.echo(key)
    key_id = api_keys.hash_of(key)[: api_keys.ID_CHARACTERS]
    click.echo(f"Key {key_id} of tenant {tenant} is in {path}. It is not shown again.", err=True)


@keys.command()
@file_option
@nats_options
@click.option("--tenant", metavar="NAME", help="Default: the application's name.")
@limit_options
@click.argument("name")
def add(
    path: Path, users: Path | None, nats_url: str | None, tenant: str | None, name: str, **limits: Any
) -> None:
    """Make an application's API key and its user of NATS, and print what it needs, this once.

    NAME has at most 32 small letters, digits and hyphens. The user is app.NAME; answers and progress go below
    _INBOX_app.NAME, where no other user hears them. What is printed are variables of the environment, which
    `giornata edit` reads. Limits are the tenant's.
    """
    tenant = tenant or name
    with _mistakes():
        login = new_login(name)
        key = _make(path, tenant, TenantLimits(**limits), login.user)
        click.echo(f"GIORNATA_API_KEY={key}\nGIORNATA_NATS_URL={login.address(nats_url)}")
        told = apply_users(users, path, nats_url)
    click.echo(
        f"Application {name} of tenant {tenant} is in {path}; its inbox prefix is {login.inbox}. Key and password are "
        f"not shown again. {told}",
        err=True,
    )


def _make(path: Path, tenant: str, limits: TenantLimits, user: api_keys.NatsUser | None) -> str:
    """A new key, which is in the file."""
    key = api_keys.PREFIX + secrets.token_urlsafe(api_keys.KEY_BYTES)
    made = datetime.now(UTC).replace(microsecond=0)

    def changed(file: KeysFile) -> KeysFile:
        file = api_keys.with_key(file, key, tenant, made, user)
        return api_keys.with_limits(file, tenant, limits)

    change_keys(path, changed)
    return key


@keys.command()
@file_option
@tenant_option
@limit_options
def limit(path: Path, tenant: str, **limits: Any) -> None:
    """Change what a tenant may do; what is not named stays as it is."""
    changes = TenantLimits(**limits)
    if changes == TenantLimits():
        raise click.UsageError("Name a limit: --in-progress, --per-minute, --weight or --operator.")
    with _mistakes():
        change_keys(path, lambda file: api_keys.with_limits(file, tenant, changes))
    click.echo(f"Limits of tenant {tenant} are in {path}.", err=True)


@keys.command()
@file_option
@nats_options
@click.argument("key_id", metavar="ID")
def revoke(path: Path, users: Path | None, nats_url: str | None, key_id: str) -> None:
    """Forget a key, and the user of NATS that came with it: its connections are closed.

    ID is the user, or the beginning of the ID, that `giornata keys list` shows, and of one key alone.
    """
    revoked: list[ApiKey] = []

    def changed(file: KeysFile) -> KeysFile:
        file, key = api_keys.without_key(file, key_id)
        revoked.append(key)
        return file

    with _mistakes():
        _existing(path)
        change_keys(path, changed)
        click.echo(f"Key {revoked[0].key_id} of tenant {revoked[0].tenant} is revoked.", err=True)
        if revoked[0].nats is not None:
            click.echo(f"So is user {revoked[0].user}. {apply_users(users, path, nats_url)}", err=True)


@keys.command("list")
@file_option
def list_keys(path: Path) -> None:
    """Show all keys by their IDs, with what their tenants may do.

    A dash is what the gateway's configuration says.
    """
    with _mistakes():
        file = _existing(path)
    numbers = ("in progress", "per minute", "weight")
    lines = table("ID", "tenant", "user of NATS", "created", *numbers, numbers=numbers)
    for key in file.keys:
        limits = file.tenants.get(key.tenant, TenantLimits())
        shown = (limits.in_progress, limits.per_minute, limits.weight)
        lines.add_row(
            key.key_id,
            key.tenant,
            "-" if key.nats is None else key.user,
            f"{key.created:%Y-%m-%d}",
            *("-" if value is None else "none" if value == 0 else f"{value:g}" for value in shown),
        )
    show(lines)


def _existing(path: Path) -> KeysFile:
    """The keys in the file; KeysFileError where there is no such file."""
    if not path.exists():
        raise KeysFileError(f"there is no file {path}; `giornata keys create` makes one")
    return read_keys(path)


@contextmanager
def _mistakes() -> Iterator[None]:
    try:
        yield
    except (KeysFileError, GiornataError) as error:
        text = str(error).removesuffix(".")
        raise click.ClickException(f"{text[0].upper()}{text[1:]}.") from error


def change_keys(path: Path, changed: Callable[[KeysFile], KeysFile]) -> None:
    """Replace the file by what `changed` makes of it. A reader sees the old file or the new one.

    Raises:
        KeysFileError: it cannot be read or written, or `changed` refuses.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise KeysFileError(f"the folder {path.parent} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until the folder is closed
        _replace(path, api_keys.render(changed(read_keys(path))))
        os.fsync(folder)
    except OSError as error:
        raise KeysFileError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        new = Path(folder) / path.name
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            _like(path, file.fileno())
            os.fsync(file.fileno())
        new.replace(path)


def _like(path: Path, handle: int) -> None:
    """Give the open file the mode and the owner of `path`, so that who may read it still may."""
    try:
        known = path.stat()
    except FileNotFoundError:
        os.fchmod(handle, MODE)
        return
    own = os.fstat(handle)
    if (known.st_uid, known.st_gid) != (own.st_uid, own.st_gid):
        os.fchown(handle, known.st_uid, known.st_gid)
    os.fchmod(handle, known.st_mode & 0o777)
