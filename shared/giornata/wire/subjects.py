"""Every subject, as one function each; patterns are the constants. What JetStream keeps, and who may do what there.

The second token is the permission boundary; static tokens come before dynamic ones; ids are ``[A-Za-z0-9_-]``, so
that a user's text never becomes a subject.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from giornata.wire.jobs import Priority
from giornata.wire.messages import EventKind

EDIT = "giornata.edit"
"""Whole edit by request-reply (gateway, queue group)."""
EDIT_PROBE = "giornata.edit.probe"
"""Edit with the LoRAs of any tenant, which the message names (gateway, queue group): the profiler compares pictures."""
GENERATE = "giornata.generate"
"""Whole generation by request-reply (gateway, queue group)."""
MASK = "giornata.mask"
"""Mask from words by request-reply (gateway, queue group)."""
EDIT_CANCEL = "giornata.edit.cancel"
"""Cancel an edit or a generation that came through the NATS door (gateway, queue group)."""
SUBMIT = "giornata.router.submit"
"""Accept a job (the active router). The reply means that the job is durable."""
TEMPLATE = "giornata.router.template"
"""Have a template recorded (the active router). The reply means that a worker was asked to."""
FORECAST = "giornata.router.forecast"
"""Forecast a job that has not ended (the active router)."""
FLEET = "giornata.router.fleet"
"""Report the instances of the fleet, page by page (the active router)."""
SUMMARY = "giornata.fleet"
"""Broadcast of the active router to the gateways: what an edit can be done with now."""
TEMPLATE_REMOVED = "giornata.template.removed"
"""Broadcast to the denoisers: forget what was recorded of a template."""
ALL_EVENTS = "giornata.event.>"
ALL_TELEMETRY = "giornata.telemetry.>"
TELEMETRY = "giornata.telemetry.*.*"
"""The right to hear telemetry, and what is heard."""
ALL_CANCELS = "giornata.cancel.*"
ALL_JOBS = "giornata.jobs.*"
TRIAL_JOB = "giornata.jobs.trial"
"""Gateways write there to see whether the work queue takes messages; no consumer takes any of them."""
_ADDRESSED = "at"
ALL_PREPOST_AT = f"giornata.prepost.{_ADDRESSED}.*.*"
"""One instance of prepost."""
ALL_LORA = "giornata.lora.*"
ALL_LORA_TIERS = ("giornata.lora.bring.*", "giornata.lora.tier.*")
"""What the LoRA store of one machine is asked about its host tier."""
ALL_MASK = "giornata.prepost.mask.*"
"""Make a mask from words (prepost of any model that serves them)."""
ALL_ADAPTER = "giornata.prepost.adapter.*"
"""Have the canonical file of a LoRA made (prepost of its model)."""
WorkerVerb = Literal["run", "cancel", "record", "prefetch"]
ALL_WORKERS = tuple(f"giornata.worker.*.{verb}" for verb in get_args(WorkerVerb))
ControlVerb = Literal["open", "close"]
ALL_CONTROLNET = tuple(f"giornata.controlnet.*.{verb}" for verb in get_args(ControlVerb))
INBOX = "_INBOX"
"""Prefix of an application's inboxes; a service's inboxes begin with it, an underscore and the service's name."""

LoraVerb = Literal["begin", "piece", "finish", "keep", "drop", "read", "remove", "profiled", "pin"]
"""What the LoRA store is asked: to take a file in pieces, to make a LoRA of it or keep it alone, to give it back, to
forget it, to note how late it may join, to pin it to every host."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,96}\Z")


def kind_of(subject: str) -> str:
    """Return what is asked on a subject, without the ids of instances and models: ``prepost encode``."""
    first, *others = subject.split(".")[1:]
    if first in {"worker", "controlnet"}:
        others = others[1:2]
    elif others[:1] == [_ADDRESSED]:
        others = others[2:]
    return " ".join((first, *others[:1]))


def is_inbox(subject: str) -> bool:
    """Whether an answer may go there. An answer to any other subject would lend the asker the answerer's rights."""
    return subject.startswith((f"{INBOX}.", f"{INBOX}_"))


def token(value: str) -> str:
    """`value` if it may be one token of a subject; ValueError otherwise."""
    if not _ID.match(value):
        raise ValueError(f"an id must match [A-Za-z0-9_-]{{1,96}}, received {value[:100]!r}")
    return value


def prepost(verb: str, model: str) -> str:
    """Micro endpoint of any prepost that has `model`; verbs: adapter, mask.

    A dot in the model's name (FLUX.1) becomes an underscore; the digest in a job tells such models apart.
    """
    return f"giornata.prepost.{token(verb)}.{token(model.replace('.', '_'))}"


def prepost_at(instance: str, verb: str) -> str:
    """Micro endpoint of one prepost, for the router, which knows who has room: inspect, encode, finish, template."""
    return f"giornata.prepost.{_ADDRESSED}.{token(instance)}.{token(verb)}"


def controlnet(name: str, verb: ControlVerb) -> str:
    """Micro endpoint of one ControlNet instance, which has the rows that are open there."""
    return f"giornata.controlnet.{token(name)}.{verb}"


def lora(verb: LoraVerb) -> str:
    """Micro endpoint of any LoRA store instance; all of them share one folder."""
    return f"giornata.lora.{verb}"


def bring(tier: str) -> str:
    """Micro endpoint of the LoRA store that fills the host tier of this name."""
    return f"giornata.lora.bring.{token(tier)}"


def tier(instance: str) -> str:
    """Micro endpoint of one LoRA store: a snapshot of its host tier."""
    return f"giornata.lora.tier.{token(instance)}"


def cancel(job: str) -> str:
    """Broadcast that a job is cancelled; the record is the truth."""
    return f"giornata.cancel.{token(job)}"


def worker(name: str, verb: WorkerVerb) -> str:
    """For one denoiser: rows to run or to cancel, a template to record or to prefetch, LoRAs to load by plan."""
    return f"giornata.worker.{token(name)}.{verb}"


def event(gateway: str, job: str, kind: str) -> str:
    """An event of a job, for the gateway that accepted it and for replays."""
    return f"giornata.event.{token(gateway)}.{token(job)}.{token(kind)}"


def events_of_gateway(gateway: str, kind: str = "*") -> str:
    """Pattern: events of all jobs that a gateway accepted."""
    return f"giornata.event.{token(gateway)}.*.{kind}"


def events_of_job(job: str) -> str:
    """Pattern: events of one job of any gateway."""
    return f"giornata.event.*.{token(job)}.*"


def events_of_kind(kind: str) -> str:
    """Pattern: events of one kind of all jobs."""
    return f"giornata.event.*.*.{token(kind)}"


def steps_of_job(job: str) -> str:
    """Pattern: steps of one job of any gateway."""
    return f"giornata.event.*.{token(job)}.step"


def telemetry(service: str, instance: str) -> str:
    """State of one instance, 2-4 times a second, latest wins."""
    return f"giornata.telemetry.{token(service)}.{token(instance)}"


def telemetry_of(service: str) -> str:
    """Pattern: state of every instance of a service."""
    return f"giornata.telemetry.{token(service)}.>"


def jobs(priority: str) -> str:
    """Work queue of accepted jobs of one priority (JetStream)."""
    return f"giornata.jobs.{token(priority)}"


# Names of the streams and key-value buckets in JetStream. `giornata.bus.streams` makes them.


JOBS: Final = "GIORNATA_JOBS"
"""Work queue of accepted jobs. A message lives until its job has ended."""
EVENTS: Final = "GIORNATA_EVENTS"
"""Events of all jobs, captured from core publishes, for replay."""
RECORDS: Final = "giornata-jobs"
TEMPLATES: Final = "giornata-templates"
LORAS: Final = "giornata-loras"
QUARANTINE: Final = "giornata-quarantine"
"""Key-value buckets of job records, registered templates, LoRAs, and jobs given up as their workers were lost."""
WANTED: Final = "giornata-wanted"
"""Key-value bucket of what each host tier of LoRAs should hold, by host; routers alone write it."""
WEBHOOKS: Final = "giornata-webhooks"
"""Key-value bucket of webhooks until their receivers have taken them; those that were given up stay for a week."""
LEASES: Final = "giornata-leases"
"""Key-value bucket of the lease that makes one router active; its revisions are the routers' epochs."""


def bucket_stream(bucket: str) -> str:
    """The stream that holds a key-value bucket."""
    return f"KV_{bucket}"


SHARED_STREAMS: Final = (EVENTS, *map(bucket_stream, (TEMPLATES, LORAS, WANTED, WEBHOOKS)))
"""Streams that gateways and LoRA stores may be the first to make."""
STREAMS: Final = (*SHARED_STREAMS, *map(bucket_stream, (RECORDS, QUARANTINE, LEASES)))
"""Streams that a deployment needs beside its work queue; denoisers and routers may be the first to make them."""


STORE_BYTES: Final = 7 << 30
"""Room that the streams on disk reserve together by default; deployed NATS servers have a file store of 8 GiB."""
LEAST_STORE_BYTES: Final = 16 << 20
LEASE_BYTES: Final = 1 << 20
EVENTS_BYTES: Final = 256 << 20
"""In memory. Beyond it the oldest events go. Previews have a share per job: see `PreviewEvent`."""
_SHARES: Final = {
    bucket_stream(RECORDS): 24,
    JOBS: 2,
    bucket_stream(TEMPLATES): 1,
    bucket_stream(LORAS): 1,
    bucket_stream(WANTED): 1,
    bucket_stream(WEBHOOKS): 1,
    bucket_stream(QUARANTINE): 1,
}
"""Parts of the store, of :data:`_PARTS`."""
_PARTS: Final = 32
"""One is free: earlier versions have left a bucket there, `giornata-prompts`, whose entries end with their time."""


def limits(store_bytes: int) -> dict[str, int]:
    """Most bytes of every stream, where those on disk may take `store_bytes` together.

    A server keeps this room free for each stream, so that a full one stops no other: above all not the lease.
    """
    part = (store_bytes - LEASE_BYTES) // _PARTS
    shares = {stream: part * share for stream, share in _SHARES.items()}
    return {**shares, bucket_stream(LEASES): LEASE_BYTES, EVENTS: EVENTS_BYTES}


def wanted_key(tier: str) -> str:
    """The key of what the router wants of a host tier."""
    return f"{tier}.main"


def queue_consumer_name(priority: Priority, epoch: tuple[int, int]) -> str:
    """Name of the consumer with which the leader of an epoch takes the jobs of one priority."""
    created_us, revision = epoch
    return f"router-{priority}-{created_us}-{revision}"


def queue_consumer_epoch(name: str, priority: Priority) -> tuple[int, int] | None:
    """The epoch in a consumer's name; (0, 0) where it was made before epochs were, None for another priority's."""
    first, _, told = name.partition(f"router-{priority}")
    if first:
        return None
    if not told:
        return 0, 0
    found = _EPOCH.fullmatch(told)
    return (int(found[1]), int(found[2])) if found else None


_EPOCH: Final = re.compile(r"-(\d+)-(\d+)")


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
    return f"{APPLICATIONS}.{token(name)}"


def user_in(url: str) -> str:
    """The user that logs in at the addresses `url`: an application's own, or the one that all others share."""
    user = urlsplit(url.partition(",")[0].strip()).username or ""
    return user if user.startswith(f"{APPLICATIONS}.") else NatsRole.APPLICATION


def inbox(user: str) -> str:
    """Prefix of the inboxes of `user`. Without a password it is the default of clients in every language."""
    return INBOX if user == NatsRole.APPLICATION else f"{INBOX}_{user}"


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
    stream = bucket_stream(bucket)
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
    stream = bucket_stream(bucket)
    return f"{API}.STREAM.INFO.{stream}", f"{API}.STREAM.MSG.GET.{stream}", *_follows(stream)


def _lora(*verbs: LoraVerb) -> tuple[str, ...]:
    return tuple(map(lora, verbs))


def _stateless(service: NatsRole, endpoints: Sequence[str], *askers: NatsRole) -> NatsPermissions:
    """A micro service that keeps nothing in JetStream; its health check hears its own telemetry."""
    told = telemetry_of(service)
    return NatsPermissions(
        (told, *_answers(*askers, NatsRole.OBSERVER)), (*endpoints, told, *_micro(service))
    )


def _and(granted: NatsPermissions, *publish: str) -> NatsPermissions:
    """`granted`, and these subjects to publish."""
    return granted._replace(publish=(*granted.publish, *publish))


_NEEDS: Final[Mapping[NatsRole, NatsPermissions]] = {
    NatsRole.GATEWAY: NatsPermissions(
        publish=(
            SUBMIT,
            FORECAST,
            FLEET,
            TEMPLATE,
            TEMPLATE_REMOVED,
            ALL_MASK,
            ALL_CANCELS,
            telemetry_of(NatsRole.GATEWAY),
            *_answers(NatsRole.APPLICATION, NatsRole.PROFILER, NatsRole.OBSERVER),
            f"{INBOX}_{APPLICATIONS}.>",
            *_lora("begin", "piece", "finish", "drop", "remove", "pin"),
            TRIAL_JOB,
            *_keeps(TEMPLATES),
            *_follows(bucket_stream(TEMPLATES)),
            *_reads(LORAS),
            *_keeps(WEBHOOKS),
            *_follows(bucket_stream(WEBHOOKS)),
            *_follows(EVENTS),
            f"{API}.STREAM.INFO.{EVENTS}",
            f"{API}.STREAM.MSG.GET.{EVENTS}",
            *_of_streams(("CREATE",), SHARED_STREAMS),
            *_keeps(RECORDS),
        ),
        subscribe=(
            EDIT,
            EDIT_PROBE,
            GENERATE,
            MASK,
            EDIT_CANCEL,
            events_of_kind(EventKind.DONE),
            events_of_kind(EventKind.STEP),
            SUMMARY,
            telemetry_of(NatsRole.GATEWAY),
            *_micro(NatsRole.GATEWAY),
        ),
    ),
    NatsRole.ROUTER: NatsPermissions(
        publish=(
            ALL_PREPOST_AT,
            *ALL_WORKERS,
            ALL_JOBS,
            events_of_kind(EventKind.STATE),
            events_of_kind(EventKind.DONE),
            telemetry_of(NatsRole.ROUTER),
            SUMMARY,
            *_answers(NatsRole.GATEWAY),
            *_keeps(TEMPLATES)[1:],
            *_keeps(WANTED)[1:],
            *_reads(LORAS)[1:],
            ALL_LORA_TIERS[1],
            *_of_streams(("CREATE", "INFO", "UPDATE"), (*STREAMS, JOBS)),
            *_keeps(RECORDS)[1:],
            *_keeps(LEASES)[1:],
            *_keeps(QUARANTINE)[2:],
            f"{API}.CONSUMER.NAMES.{JOBS}",
            *(f"{API}.CONSUMER.{verb}.{JOBS}.*" for verb in ("DURABLE.CREATE", "DELETE", "INFO", "MSG.NEXT")),
            f"$JS.ACK.{JOBS}.>",
        ),
        subscribe=(
            SUBMIT,
            FORECAST,
            FLEET,
            TEMPLATE,
            ALL_CANCELS,
            events_of_kind(EventKind.DENOISED),
            ALL_TELEMETRY,
        ),
    ),
    NatsRole.DENOISER: NatsPermissions(
        publish=(
            events_of_kind(EventKind.STEP),
            events_of_kind(EventKind.PREVIEW),
            events_of_kind(EventKind.DENOISED),
            telemetry_of(NatsRole.DENOISER),
            *_answers(NatsRole.ROUTER),
            *_keeps(TEMPLATES),
            *ALL_CONTROLNET,
            *_lora("read"),
            ALL_LORA_TIERS[0],
            *_of_streams(("CREATE",), STREAMS),
            *_keeps(RECORDS),
        ),
        subscribe=(
            *ALL_WORKERS,
            ALL_CANCELS,
            TEMPLATE_REMOVED,
            telemetry_of(NatsRole.DENOISER),
            telemetry_of(NatsRole.CONTROLNET),
        ),
    ),
    NatsRole.PREPOST: _and(
        _stateless(
            NatsRole.PREPOST,
            (ALL_ADAPTER, ALL_MASK, ALL_PREPOST_AT),
            NatsRole.ROUTER,
            NatsRole.GATEWAY,
            NatsRole.LORA_STORE,
        ),
        *_lora("begin", "piece", "keep", "drop", "read"),
    ),
    NatsRole.CONTROLNET: _stateless(NatsRole.CONTROLNET, ALL_CONTROLNET, NatsRole.DENOISER),
    NatsRole.LORA_STORE: _and(
        _stateless(
            NatsRole.LORA_STORE,
            (ALL_LORA, *ALL_LORA_TIERS, telemetry_of(NatsRole.PREPOST)),
            NatsRole.GATEWAY,
            NatsRole.ROUTER,
            NatsRole.PREPOST,
            NatsRole.DENOISER,
            NatsRole.PROFILER,
        ),
        ALL_ADAPTER,
        *_keeps(LORAS),
        *_reads(WANTED),
        *_follows(bucket_stream(LORAS)),
        *_of_streams(("CREATE",), SHARED_STREAMS),
    ),
    NatsRole.APPLICATION: NatsPermissions((EDIT, GENERATE, MASK, EDIT_CANCEL), ()),
    NatsRole.PROFILER: NatsPermissions((EDIT_PROBE, *_lora("profiled"), *_reads(LORAS)), (SUMMARY,)),
    NatsRole.OBSERVER: NatsPermissions(("$SRV.>",), (ALL_TELEMETRY,)),
    NatsRole.OPERATOR: NatsPermissions((*_keeps(QUARANTINE), *_follows(bucket_stream(QUARANTINE))), ()),
}


# The configuration of NATS servers: users, with the rights of `rights`, and routes.
# Pure.


ROUTES_USER: Final = "routes"
"""The user with which the servers of a cluster let each other in."""
CLUSTER_PORT: Final = 6222

_RELOADS: Final = NatsPermissions(
    ("$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.*.RELOAD"), (f"{INBOX}_{RELOADER}.>",)
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
