r"""``python -m giornata.nats_users FOLDER``: passwords for the users of NATS, and the servers' configuration.

Below FOLDER lies a folder for each reader, so that a container is given its own and no other:

\b
* ``<service>/password`` - what ``GIORNATA_NATS_PASSWORD_FILE`` of a service names;
* ``clients/application``, ``clients/observer``, ``clients/operator`` - passwords for applications and operators;
* ``server/users.conf`` - who may do what, and ``server/cluster.conf`` where there are several servers: for ``include``
  in nats-server's configuration.

Existing passwords stay, so that running services keep theirs; rights follow this version. Only the owner may read any
of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from giornata.wire.permissions import CLUSTER_PORT, ROUTES_USER, User, cluster_config, users_config
from giornata.wire.workers import ServiceName

USERS_CONF: Final = Path("server", "users.conf")
CLUSTER_CONF: Final = "cluster.conf"
PASSWORD_BYTES: Final = 32
"""A password of 256 random bits needs no stretching; its hexadecimal digits may stand in an address."""


def password_file(folder: Path, user: User) -> Path:
    """Where the password of `user` lies."""
    return folder / user / "password" if user.value in set(ServiceName) else folder / "clients" / user


def write_users(folder: Path, *, anonymous: User | None = None) -> None:
    """Write a password for every user that has none yet, and ``server/users.conf``; the folder is made.

    Clients without a password are `anonymous`; None refuses them.
    """
    passwords = {user: _password(password_file(folder, user)) for user in User}
    _write(folder / USERS_CONF, users_config(passwords, anonymous=anonymous))


def write_cluster(folder: Path, listen: str, hosts: Sequence[str], name: str = CLUSTER_CONF) -> None:
    """Write ``server/<name>``; other arguments: see :func:`giornata.wire.permissions.cluster_config`."""
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
    """Write a file whole or not at all, readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600)
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--cluster", is_flag=True, help="There are several servers; their names follow.")
@click.argument("hosts", metavar="[HOST]...", nargs=-1)
def main(folder: Path, hosts: tuple[str, ...], *, cluster: bool) -> None:
    """Command line of the generator."""
    if cluster != bool(hosts):
        raise click.UsageError(
            "--cluster takes the name of every server, and names of servers need --cluster."
        )
    write_users(folder)
    if hosts:
        write_cluster(folder, f"0.0.0.0:{CLUSTER_PORT}", [f"{host}:{CLUSTER_PORT}" for host in hosts])


if __name__ == "__main__":
    main()
