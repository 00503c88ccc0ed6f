"""The configuration of NATS servers: users, with the rights of :mod:`giornata.wire.permissions`, and routes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from giornata.wire import subjects
from giornata.wire.permissions import RELOADER, NatsPermissions, NatsRole, rights

ROUTES_USER: Final = "routes"
"""The user with which the servers of a cluster let each other in."""
CLUSTER_PORT: Final = 6222

_RELOADS: Final = NatsPermissions(
    ("$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.*.RELOAD"), (f"{subjects.INBOX}_{RELOADER}.>",)
)


def users_config(
    passwords: Mapping[str, str],
    reloader: str,
    *,
    anonymous: NatsRole | None = None,
) -> str:
    """The users, their passwords and rights in a NATS server's configuration.

    Args:
        passwords: by user; a password may be its bcrypt hash.
        reloader: password of the user RELOADER.
        anonymous: whom clients without a password are; None refuses them.
    """
    lines = ",\n    ".join(_login(user, password, rights(user)) for user, password in passwords.items())
    text = (
        f"authorization {{\n  users: [\n    {lines}\n  ]\n}}\n"
        f'accounts {{ "$SYS": {{ users: [{_login(RELOADER, reloader, _RELOADS)}] }} }}\n'
    )
    return text if anonymous is None else text + _no_auth(anonymous)


def has_anonymous(config: str) -> bool:
    """Whether a configuration of :func:`users_config` lets clients in without a password."""
    return config.endswith(_no_auth(NatsRole.APPLICATION))


def _login(user: str, password: str, granted: NatsPermissions) -> str:
    allowed = {name: {"allow": listed} for name, listed in granted._asdict().items()}
    return json.dumps({"user": user, "password": password, "permissions": allowed})


def _no_auth(user: NatsRole) -> str:
    return f"no_auth_user: {json.dumps(user)}\n"


def cluster_config(listen: str, hosts: Sequence[str], password: str) -> str:
    """The part of the configuration that joins servers to a cluster; it holds the servers' password.

    Args:
        listen: address and port for the other servers.
        hosts: ``host:port`` of every server's `listen`; a server's own among them does no harm.
        password: the same for all servers; letters and digits only, since it stands in an address.
    """
    routes = [f"nats://{ROUTES_USER}:{password}@{host}" for host in hosts]
    return (
        "cluster {\n"
        '  name: "giornata"\n'
        f"  listen: {json.dumps(listen)}\n"
        f"  authorization {{ user: {json.dumps(ROUTES_USER)}, password: {json.dumps(password)} }}\n"
        f"  routes: {json.dumps(routes)}\n"
        "}\n"
    )
