"""Every subject, as one function each; patterns are the constants.

The second token is the permission boundary; static tokens come before dynamic ones; ids are ``[A-Za-z0-9_-]``, so
that a user's text never becomes a subject.
"""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

from giornata.wire.jobs import Priority

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
ALL_PREPOST = "giornata.prepost.*.*"
"""Any prepost of a model."""
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
WorkerVerb = Literal["run", "cancel", "record", "prefetch", "load"]
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
    """Micro endpoint of any prepost that has `model`; verbs: inspect, encode, finish, template, adapter, mask.

    A dot in the model's name (FLUX.1) becomes an underscore; the digest in a job tells such models apart.
    """
    return f"giornata.prepost.{token(verb)}.{token(model.replace('.', '_'))}"


def prepost_at(instance: str, verb: str) -> str:
    """Micro endpoint of one prepost instance, for the router, which knows who has room; verbs as of :func:`prepost`."""
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
