"""The rights of NATS users to publish and subscribe, and the servers' configuration of them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from giornata.wire import subjects
from giornata.wire.messages import EventKind

# What each user of the NATS servers may publish and subscribe. Pure.
#
# Every service has a user, and so has every application; observers and operators have one each. A user's
# inboxes have a prefix of their own, so that no user reads another's answers. A service may publish answers
# below the prefixes of its askers only.


API: Final = "$JS.API"
RELOADER: Final = "reloader"
"""Has the servers read their configuration again; the one user of their system account."""
APPLICATIONS: Final = "app"
"""First part of the name of every application's own user; the second is the application's name."""


class NatsRole(StrEnum):
    """A user of the NATS servers. A service's user has the service's name."""

    GATEWAY = "gateway"
    ROUTER = "router"
    DENOISER = "denoiser"
    PREPOST = "prepost"
    CONTROLNET = "controlnet"
    LORA_STORE = "lora-store"
    APPLICATION = "application"
    """Asks for edits where no password is needed: servers of one machine. A known application has a user of its own."""
    PROFILER = "profiler"
    """Compares pictures of every tenant's LoRAs, and tells the LoRA store how late each may join."""
    OBSERVER = "observer"
    """Hears telemetry and asks micro services for their state: the launcher, an operator."""
    OPERATOR = "operator"
    """Reads and removes jobs in quarantine; their records hold prompts."""


class NatsPermissions(NamedTuple):
    """Subjects, with wildcards; every other subject is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def application_user(name: str) -> str:
    """The user of the application `name`. ValueError where the name cannot be part of a subject."""
    return f"{APPLICATIONS}.{subjects.token(name)}"


def user_in(url: str) -> str:
    """The user that logs in at the addresses `url`: an application's own, or the one that all others share."""
    user = urlsplit(url.partition(",")[0].strip()).username or ""
    return user if user.startswith(f"{APPLICATIONS}.") else NatsRole.APPLICATION


def inbox(user: str) -> str:
    """Prefix of the inboxes of `user`. Without a password it is the default of clients in every language."""
    return subjects.INBOX if user == NatsRole.APPLICATION else f"{subjects.INBOX}_{user}"


def rights(user: str) -> NatsPermissions:
    """Return what `user` needs, and nothing else; every application needs the same beside its inbox."""
    known = NatsRole.APPLICATION if user.startswith(f"{APPLICATIONS}.") else NatsRole(user)
    publish, subscribe = _NEEDS[known]
    return NatsPermissions(publish, (f"{inbox(user)}.>", *subscribe))


def _answers(*askers: NatsRole) -> tuple[str, ...]:
    return tuple(f"{inbox(asker)}.>" for asker in askers)


def _micro(service: NatsRole) -> tuple[str, ...]:
    """Subjects on which a micro service tells its state (ADR-32 of NATS)."""
    name = f"giornata-{service}"
    verbs = ("PING", "INFO", "STATS")
    return tuple(f"$SRV.{verb}{rest}" for verb in verbs for rest in ("", f".{name}", f".{name}.*"))


def _keeps(bucket: str) -> tuple[str, ...]:
    """The rights to open a bucket, and to read and write its keys."""
    stream = subjects.bucket_stream(bucket)
    return f"{API}.STREAM.INFO.{stream}", f"{API}.STREAM.MSG.GET.{stream}", f"$KV.{bucket}.>"


def _of_streams(verbs: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{API}.STREAM.{verb}.{name}" for verb in verbs for name in names)


def _follows(stream: str) -> tuple[str, ...]:
    """The rights to read a stream in order, by ephemeral consumers with flow control."""
    return (
        f"{API}.CONSUMER.CREATE.{stream}",
        f"{API}.CONSUMER.CREATE.{stream}.>",
        f"{API}.CONSUMER.INFO.{stream}.*",
        f"$JS.FC.{stream}.>",
    )


def _reads(bucket: str) -> tuple[str, ...]:
    """The rights to open a bucket, to read its keys, and to follow one."""
    stream = subjects.bucket_stream(bucket)
    return f"{API}.STREAM.INFO.{stream}", f"{API}.STREAM.MSG.GET.{stream}", *_follows(stream)


def _lora(*verbs: subjects.LoraVerb) -> tuple[str, ...]:
    return tuple(map(subjects.lora, verbs))


def _stateless(service: NatsRole, endpoints: Sequence[str], *askers: NatsRole) -> NatsPermissions:
    """A micro service that keeps nothing in JetStream; its health check hears its own telemetry."""
    told = subjects.telemetry_of(service)
    return NatsPermissions(
        (told, *_answers(*askers, NatsRole.OBSERVER)), (*endpoints, told, *_micro(service))
    )


def _and(granted: NatsPermissions, *publish: str) -> NatsPermissions:
    """`granted`, and these subjects to publish."""
    return granted._replace(publish=(*granted.publish, *publish))


_SUMMARIES: Final = (subjects.SUMMARY, f"{subjects.SUMMARY}.*")
"""Gateways and profilers of the version before this one listen to both."""
_NEEDS: Final[Mapping[NatsRole, NatsPermissions]] = {
    NatsRole.GATEWAY: NatsPermissions(
        publish=(
            subjects.SUBMIT,
            subjects.FORECAST,
            subjects.FLEET,
            subjects.TEMPLATE,
            subjects.TEMPLATE_REMOVED,
            subjects.ALL_MASK,
            subjects.ALL_CANCELS,
            subjects.telemetry_of(NatsRole.GATEWAY),
            *_answers(NatsRole.APPLICATION, NatsRole.PROFILER, NatsRole.OBSERVER),
            f"{subjects.INBOX}_{APPLICATIONS}.>",
            *_lora("begin", "piece", "finish", "drop", "remove", "pin"),
            subjects.TRIAL_JOB,
            *_keeps(subjects.TEMPLATES),
            *_follows(subjects.bucket_stream(subjects.TEMPLATES)),
            *_reads(subjects.LORAS),
            *_keeps(subjects.WEBHOOKS),
            *_follows(subjects.bucket_stream(subjects.WEBHOOKS)),
            *_follows(subjects.EVENTS),
            f"{API}.STREAM.NAMES",  # gateways of the version before this one list streams
            f"{API}.STREAM.INFO.{subjects.EVENTS}",
            f"{API}.STREAM.MSG.GET.{subjects.EVENTS}",
            *_of_streams(("CREATE",), subjects.SHARED_STREAMS),
            *_keeps(subjects.RECORDS),
        ),
        subscribe=(
            subjects.EDIT,
            subjects.EDIT_PROBE,
            subjects.GENERATE,
            subjects.MASK,
            subjects.EDIT_CANCEL,
            subjects.events_of_kind(EventKind.DONE),
            subjects.events_of_kind(EventKind.STEP),
            *_SUMMARIES,
            subjects.telemetry_of(NatsRole.GATEWAY),
            *_micro(NatsRole.GATEWAY),
        ),
    ),
    NatsRole.ROUTER: NatsPermissions(
        publish=(
            subjects.ALL_PREPOST,
            subjects.ALL_PREPOST_AT,
            *subjects.ALL_WORKERS,
            subjects.ALL_JOBS,
            subjects.events_of_kind(EventKind.STATE),
            subjects.events_of_kind(EventKind.DONE),
            subjects.telemetry_of(NatsRole.ROUTER),
            subjects.SUMMARY,
            *_answers(NatsRole.GATEWAY),
            *_keeps(subjects.TEMPLATES)[1:],
            *_keeps(subjects.WANTED)[1:],
            *_reads(subjects.LORAS)[1:],
            subjects.ALL_LORA_TIERS[1],
            *_of_streams(("CREATE", "INFO", "UPDATE"), (*subjects.STREAMS, subjects.JOBS)),
            *_keeps(subjects.RECORDS)[1:],
            *_keeps(subjects.LEASES)[1:],
            *_keeps(subjects.QUARANTINE)[2:],
            f"{API}.CONSUMER.NAMES.{subjects.JOBS}",
            *(
                f"{API}.CONSUMER.{verb}.{subjects.JOBS}.*"
                for verb in ("DURABLE.CREATE", "DELETE", "INFO", "MSG.NEXT")
            ),
            f"$JS.ACK.{subjects.JOBS}.>",
        ),
        subscribe=(
            subjects.SUBMIT,
            subjects.FORECAST,
            subjects.FLEET,
            subjects.TEMPLATE,
            subjects.ALL_CANCELS,
            subjects.events_of_kind(EventKind.DENOISED),
            subjects.ALL_TELEMETRY,
        ),
    ),
    NatsRole.DENOISER: NatsPermissions(
        publish=(
            subjects.events_of_kind(EventKind.STEP),
            subjects.events_of_kind(EventKind.PREVIEW),
            subjects.events_of_kind(EventKind.DENOISED),
            subjects.telemetry_of(NatsRole.DENOISER),
            *_answers(NatsRole.ROUTER),
            *_keeps(subjects.TEMPLATES),
            *subjects.ALL_CONTROLNET,
            *_lora("read"),
            subjects.ALL_LORA_TIERS[0],
            *_of_streams(("CREATE",), subjects.STREAMS),
            *_keeps(subjects.RECORDS),
        ),
        subscribe=(
            *subjects.ALL_WORKERS,
            subjects.ALL_CANCELS,
            subjects.TEMPLATE_REMOVED,
            subjects.telemetry_of(NatsRole.DENOISER),
            subjects.telemetry_of(NatsRole.CONTROLNET),
        ),
    ),
    NatsRole.PREPOST: _and(
        _stateless(
            NatsRole.PREPOST,
            (subjects.ALL_PREPOST, subjects.ALL_PREPOST_AT),
            NatsRole.ROUTER,
            NatsRole.GATEWAY,
            NatsRole.LORA_STORE,
        ),
        *_lora("begin", "piece", "keep", "drop", "read"),
    ),
    NatsRole.CONTROLNET: _stateless(NatsRole.CONTROLNET, subjects.ALL_CONTROLNET, NatsRole.DENOISER),
    NatsRole.LORA_STORE: _and(
        _stateless(
            NatsRole.LORA_STORE,
            (subjects.ALL_LORA, *subjects.ALL_LORA_TIERS, subjects.telemetry_of(NatsRole.PREPOST)),
            NatsRole.GATEWAY,
            NatsRole.ROUTER,
            NatsRole.PREPOST,
            NatsRole.DENOISER,
            NatsRole.PROFILER,
        ),
        subjects.ALL_ADAPTER,
        *_keeps(subjects.LORAS),
        *_reads(subjects.WANTED),
        *_follows(subjects.bucket_stream(subjects.LORAS)),
        *_of_streams(("CREATE",), subjects.SHARED_STREAMS),
    ),
    NatsRole.APPLICATION: NatsPermissions(
        (subjects.EDIT, subjects.GENERATE, subjects.MASK, subjects.EDIT_CANCEL), ()
    ),
    NatsRole.PROFILER: NatsPermissions(
        (subjects.EDIT_PROBE, *_lora("profiled"), *_reads(subjects.LORAS)), _SUMMARIES
    ),
    NatsRole.OBSERVER: NatsPermissions(("$SRV.>",), (subjects.ALL_TELEMETRY,)),
    NatsRole.OPERATOR: NatsPermissions(
        (*_keeps(subjects.QUARANTINE), *_follows(subjects.bucket_stream(subjects.QUARANTINE))), ()
    ),
}


# The configuration of NATS servers: users, with the rights of `giornata.wire.permissions`, and routes.
# Pure.


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
    """Return whether a configuration of :func:`users_config` lets clients in without a password."""
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
