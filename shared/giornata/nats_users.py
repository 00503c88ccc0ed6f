"""``python -m giornata.nats_users FOLDER``: passwords for the users of NATS, and the servers' configuration."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import nats.errors

from giornata.api_keys import KeysFile, KeysFileError, parse
from giornata.bus.connection import FailFastNatsClient, open_client
from giornata.deadlines import Deadline
from giornata.scratch import exclusive_lock
from giornata.wire.errors import GiornataError, ServiceUnavailable
from giornata.wire.subjects import (
    CLUSTER_PORT,
    RELOADER,
    ROUTES_USER,
    NatsRole,
    cluster_config,
    has_anonymous,
    users_config,
)
from giornata.wire.workers import ServiceName

PING: Final = "$SYS.REQ.SERVER.PING"
LIMIT_S: Final = 5.0
"""How long a server may take to let us in, to tell of itself, or to reload."""


async def reload_servers(url: str, password_file: Path) -> int:
    """Reload every server of the cluster that `url` leads to; how many that were.

    A server that is away reads its configuration when it starts.

    Raises:
        ServiceUnavailable: no server answers or lets us in, or a server does not accept its configuration; the others
            have reloaded.
    """
    async with open_client(url, RELOADER, RELOADER, password_file, LIMIT_S) as client:
        servers = await _servers(client)
        if not servers:
            raise ServiceUnavailable(
                "No NATS server has told of itself, so that none is known to have reloaded."
            )
        failed = [server for server in servers if not await _reload(client, server)]
    if failed:
        raise ServiceUnavailable(
            f"Of {len(servers)} NATS servers, {len(failed)} did not take the new configuration; their logs say why.",
            received=", ".join(failed),
        )
    return len(servers)


async def _servers(client: FailFastNatsClient) -> list[str]:
    """IDs of the cluster's servers. Each tells how many it knows, so that all are heard; one may just have died."""
    inbox, deadline = client.new_inbox(), Deadline.after_ms(LIMIT_S * 1000)
    heard = await client.subscribe(inbox)
    await client.publish(PING, reply=inbox)
    found: list[str] = []
    expected = 1
    while len(found) < expected:
        try:
            message = await heard.next_msg(timeout=deadline.remaining_s())
        except nats.errors.TimeoutError:
            break
        told: dict[str, Any] = json.loads(message.data)
        found.append(told["server"]["id"])
        expected = max(expected, told["statsz"].get("active_servers", 1))
    await heard.unsubscribe()
    return found


async def _reload(client: FailFastNatsClient, server: str) -> bool:
    """Return whether the server has taken its configuration."""
    try:
        async with asyncio.timeout(LIMIT_S):
            answer = await client.request(f"$SYS.REQ.SERVER.{server}.RELOAD", timeout=LIMIT_S)
    except (TimeoutError, nats.errors.Error):
        return False
    return "error" not in json.loads(answer.data)


USERS_CONF: Final = Path("server", "users.conf")
CLUSTER_CONF: Final = "cluster.conf"
RUNNING: Final = frozenset({*ServiceName, NatsRole.PROFILER})
"""Users that are programs: each may run in a container, and has a folder of its own."""
PASSWORD_BYTES: Final = 32
"""A password of 256 random bits needs no stretching; its hexadecimal digits may stand in an address."""


def password_file(folder: Path, user: str) -> Path:
    """Return where the password of `user` lies. An application's lies nowhere."""
    return folder / user / "password" if user in RUNNING else folder / "clients" / user


def write_users(
    folder: Path,
    applications: Mapping[str, str] | None = None,
    *,
    anonymous: NatsRole | None = None,
) -> None:
    """Write a password for every user that has none yet, and ``server/users.conf``; only the owner may read any of it.

    Args:
        folder: is made. Below it lies a folder for each reader: ``<service>/password``, ``clients/<user>`` for people
            and for --reload, ``server/`` for ``include`` in nats-server's configuration.
        applications: hashes of the applications' passwords, by user.
        anonymous: whom clients without a password are; None refuses them.
    """
    users = [user for user in NatsRole if user is not NatsRole.APPLICATION or anonymous]
    passwords = {user.value: _password(password_file(folder, user)) for user in users}
    reloader = _password(password_file(folder, RELOADER))
    text = users_config(passwords | dict(applications or {}), reloader, anonymous=anonymous)
    _write(folder / USERS_CONF, text)


def update_users(folder: Path, keys: Path) -> None:
    """Write ``server/users.conf`` again, with the applications of the file `keys`; all else stays.

    One program at a time reads and writes, so that the last one knows every application. OSError where there is no such
    file in `folder`; KeysFileError as :func:`read_keys`.
    """
    config = folder / USERS_CONF
    with exclusive_lock(config.parent):
        anonymous = NatsRole.APPLICATION if has_anonymous(config.read_text(encoding="utf-8")) else None
        write_users(folder, read_keys(keys).passwords, anonymous=anonymous)


def read_keys(path: Path) -> KeysFile:
    """The API keys in the file; no keys where there is no file.

    Raises:
        KeysFileError: it cannot be read, or is not such a file.
    """
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        return KeysFile()
    except OSError as error:
        raise KeysFileError(f"{path} cannot be read: {error.strerror}") from error
    except KeysFileError as error:
        raise KeysFileError(f"{path} is {error}") from None


def write_cluster(folder: Path, listen: str, hosts: Sequence[str], name: str = CLUSTER_CONF) -> None:
    """Write ``server/<name>``; other arguments: see :func:`giornata.wire.subjects.cluster_config`."""
    password = _password(folder / "server" / ROUTES_USER)
    _write(folder / "server" / name, cluster_config(listen, hosts, password))


def _password(path: Path) -> str:
    """The password in the file, or a new one."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    password = secrets.token_hex(PASSWORD_BYTES)
    _write(path, password + "\n")
    return password


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all, readable by its owner alone; it keeps its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600)
    draft.write_text(text, encoding="utf-8")
    if path.exists() and os.geteuid() == 0:
        os.chown(draft, path.stat().st_uid, path.stat().st_gid)
    draft.replace(path)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--cluster", is_flag=True, help="There are several servers; their names follow.")
@click.option(
    "--keys",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File of API keys that `giornata keys` writes; its applications may log in.",
)
@click.option("--reload", metavar="URL", help="Servers that run already, and take the new users at once.")
@click.argument("hosts", metavar="[HOST]...", nargs=-1)
def main(
    folder: Path,
    hosts: tuple[str, ...],
    keys: Path | None,
    reload: str | None,
    *,
    cluster: bool,
) -> None:
    """Command line of the generator."""
    if cluster != bool(hosts):
        raise click.UsageError(
            "--cluster takes the name of every server, and names of servers need --cluster."
        )
    try:
        write_users(folder, read_keys(keys).passwords if keys else None)
        if hosts:
            write_cluster(folder, f"0.0.0.0:{CLUSTER_PORT}", [f"{host}:{CLUSTER_PORT}" for host in hosts])
        if reload:
            n = asyncio.run(reload_servers(reload, password_file(folder, RELOADER)))
            click.echo(f"NATS servers that have taken the users: {n}.", err=True)
    except (GiornataError, KeysFileError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
