"""From an order to a job whose pictures lie in the blob store. Nothing of a refused order stays there.

The same tenant and idempotency key lead to the same job, and only for the same edit.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Final, NamedTuple

import structlog

from giornata import tracing
from giornata.blobs import BlobStore, refer
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, retry_soon
from giornata.tracing import TraceSpanKind, span
from giornata.wire import resolution, subjects
from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import IdempotencyKeyReused, InvalidField, MasksNotServed, ServiceUnavailable
from giornata.wire.jobs import BlobRef, Job, Priority
from giornata.wire.messages import MASK, MaskParameters, MaskReply, MaskRequest, region_name
from giornata.wire.models import Task
from giornata.wire.requests import (
    EACH_REGIONS,
    MASK_PROMPT,
    MAX_REGIONS,
    REFERENCE,
    EditParameters,
    SegmentationFields,
    evaluations_of,
    named_control_images,
    named_references,
)
from giornata.wire.resolution import cfg_scale, resolve
from giornata_gateway.admission import Tenant
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet import FleetListener
from giornata_gateway.jobs.resources import Loras, check_images, control_use
from giornata_gateway.views.catalog import mask_card

HEADER: Final = "Idempotency-Key"
"""Header of HTTP requests (draft-ietf-httpapi-idempotency-key-header-07)."""
REPEATED: Final = "Idempotent-Replayed"
"""Header of an answer about an earlier request's job."""
MAX_CHARACTERS: Final = 255

_PARTS: Final = ("its fields", "its image or template", "its mask", "its references", "its control images")


def read_key(values: Sequence[str], header: str) -> str | None:
    """The key in a request's headers of that name; None without one, InvalidField where it cannot be used."""
    if not values:
        return None
    [key, *others] = values
    printable = key.isascii() and key.isprintable()
    if others or not printable or not key.strip() or len(key) > MAX_CHARACTERS:
        shown = f"{len(values)} headers" if others else f"{len(key)} characters" if printable else repr(key)
        raise InvalidField(
            "The idempotency key cannot be used.",
            field=header,
            received=shown,
            accepted=f"one key of 1 to {MAX_CHARACTERS} printable ASCII characters, best a random UUID",
        )
    return key


def job_id_of(tenant: str, key: str) -> str:
    """The job of a tenant's key, the same at every gateway; other tenants' keys lead elsewhere."""
    digest = hashlib.sha256(f"{tenant}\0{key}".encode()).digest()  # a tenant's name holds no zero byte
    return f"job_{base64.urlsafe_b64encode(digest[:24]).decode()}"


def fingerprint(parameters: EditParameters, pictures: Mapping[str, str], template_id: str | None) -> str:
    """Return what a request asks for, as digests: fields, image or template, mask, references and control images.

    `parameters` are as the request gives them, before any default of the model: a field that is left out counts as its
    default. `pictures` are sha-256 by name. How the answer travels is not part of it.
    """
    controls = [pictures[name] for name in CONTROL_IMAGES if name in pictures]
    others = {"image", "mask", *CONTROL_IMAGES}
    references = [digest for name, digest in pictures.items() if name not in others]
    lists = (references, controls) if controls else (references,) if references else ()
    parts = (
        parameters.model_dump(mode="json", exclude_defaults=True),
        [pictures.get("image"), template_id],
        pictures.get("mask"),
        *lists,
    )
    texts = (json.dumps(part, sort_keys=True, separators=(",", ":")) for part in parts)
    return ".".join(hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts)


def check_same(job: Job, asked: str) -> None:
    """Check that the job under a key is the edit that is asked for now; IdempotencyKeyReused says what differs."""
    known = (job.fingerprint or "").split(".")
    given = asked.split(".")
    if known == given:
        return
    differing = [part for part, one, other in zip_longest(_PARTS, known, given) if one != other]
    raise IdempotencyKeyReused(
        received=f"an edit that differs in {' and '.join(differing or _PARTS)} from {job.job_id}",
        accepted="the same edit again, or a new key",
    )


log = structlog.get_logger(__name__)


async def check_stored(blobs: BlobStore, name: str, picture: bytes | BlobRef) -> None:
    """Raise InvalidField where `picture`, which came under `name`, is a claim check that leads to no blob."""
    if isinstance(picture, BlobRef) and not await blobs.has(picture):
        raise InvalidField(
            "There is no such blob.", field=name, received=picture.key, accepted="a stored blob"
        )


def kept_s(config: GatewayConfig, deadline: Deadline) -> int:
    """Return how long a picture of a request is kept: as long as its results."""
    return config.result_ttl_s + int(deadline.remaining_s()) + 1


async def stored(blobs: BlobStore, key: str, picture: bytes | BlobRef, ttl_s: int) -> BlobRef:
    """Where `picture` lies: what came as a file is kept under `key` for `ttl_s`, another blob stays where it is."""
    if isinstance(picture, BlobRef):
        # nothing that its caller adds is kept, and pictures are known by one kind of hash
        return BlobRef(key=picture.key, size_bytes=picture.size_bytes, sha256=picture.sha256)
    return await blobs.put(key, picture, ttl_s)


async def forget(blobs: BlobStore, *refs: BlobRef) -> None:
    """Delete `refs`. It raises nothing: what fails is logged."""
    try:
        await blobs.delete(*refs)
    except Exception:  # the task's edge: logged; the blobs expire
        log.exception("forget_failed", keys=[ref.key for ref in refs])


ANSWER_S: Final = 60.0
"""How long one question waits: a prepost that dies with it does not say so."""


class StandaloneMask(NamedTuple):
    """A mask that is asked for by itself."""

    reply: MaskReply
    handed: set[str]
    """Keys of the masks that clients fetch from the blob store: they stay there as long as results do."""

    @property
    def pictures(self) -> list[BlobRef]:
        """The mask of all regions, and each region's own."""
        return [self.reply.mask, *(one.mask for one in self.reply.regions if one.mask is not None)]


@dataclass(frozen=True)
class SegmentationClient:
    """Has masks made, for edits and for themselves."""

    config: GatewayConfig
    bus: Bus
    blobs: BlobStore
    fleet: FleetListener
    tasks: asyncio.TaskGroup
    """Owns what outlives a request: forgetting the masks that it has read."""

    def subject(self, model: str | None) -> str:
        """Where a mask is asked for: at the prepost of `model` if that makes masks, else at the first one that does.

        MasksNotServed where none does.
        """
        served = self.fleet.masks()
        if mask_card(served, model) is None:
            raise MasksNotServed(
                field=MASK_PROMPT,
                received="words for a mask",
                accepted="a mask as a picture; operators serve masks from words by GIORNATA_MASK_MODEL",
            )
        asked = model if model in served else min(served)
        return subjects.prepost("mask", asked)

    async def made(
        self,
        asked: SegmentationFields,
        image: BlobRef,
        *,
        subject: str,
        folder: str,
        deadline: Deadline,
        each: bool,
    ) -> MaskReply:
        """The mask of what `asked` names in a stored picture, kept below `folder`; and of `each` region.

        Raises:
            NothingFound: the words name nothing in the picture.
            GiornataError: the picture is refused, or nothing answers.
        """

        async def ask() -> MaskReply:
            soon = deadline.at_most(ANSWER_S)
            request = MaskRequest(
                image=image,
                prompt=asked.mask_prompt or "",
                threshold=asked.mask_threshold,
                max_regions=asked.max_regions or MAX_REGIONS,
                folder=folder,
                ttl_s=kept_s(self.config, deadline),
                each=each,
                remaining_ms=soon.remaining_ms(),
            )
            with span("mask", TraceSpanKind.ASKS):
                return await self.bus.call(subject, request, MaskReply, soon)

        reply: MaskReply = await retry_soon(ServiceUnavailable, self.config.submit_window_s)(ask)
        return reply

    @asynccontextmanager
    async def shown(
        self, tenant: str, asked: MaskParameters, image: bytes | BlobRef, deadline: Deadline
    ) -> AsyncIterator[StandaloneMask]:
        """The regions of a picture, each with a mask of its own.

        Leaving forgets them, except those that are handed on, and a picture that came as a file.

        Raises:
            ModelNotFound: the model that is `asked` for is not served.
            InvalidField: a claim check leads to no blob.
            GiornataError: as :meth:`made`.
        """
        named = None if asked.model is None else self.fleet.choose(asked.model).name
        subject = self.subject(named)
        await check_stored(self.blobs, "image", image)
        folder = f"{tenant}/mask_{secrets.token_urlsafe(9)}/"
        names = ["image", MASK, *map(region_name, range(asked.max_regions or MAX_REGIONS))]
        handed: set[str] = set()
        try:
            ref = await stored(self.blobs, f"{folder}image", image, kept_s(self.config, deadline))
            del image  # while the answer travels, nothing holds it
            reply = await self.made(
                asked.asked(), ref, subject=subject, folder=folder, deadline=deadline, each=True
            )
            yield StandaloneMask(reply, handed)
        finally:  # a question without an answer may have left masks, too
            keys = {f"{folder}{name}" for name in names} - handed
            refs = [BlobRef(key=key, size_bytes=0, sha256="") for key in sorted(keys)]
            self.tasks.create_task(forget(self.blobs, *refs), name=f"forget-{folder}")


def check_mask(mask: object | None, template_id: str | None, asked: SegmentationFields) -> None:
    """Raise InvalidField where an edit brings a mask and words for one, or asks for crops of a template."""
    if template_id is not None and asked.auto_edit:
        raise InvalidField(
            "A template is edited as a whole, and auto_edit paints crops.",
            field="auto_edit",
            received="true, with template_id",
            accepted="leave one of both out",
        )
    if mask is not None and asked.mask_prompt is not None:
        raise InvalidField(
            "An edit has a mask, or words for one.",
            field=MASK_PROMPT,
            received="both",
            accepted="one of mask and mask_prompt",
        )


SEED_BITS: Final = 32
"""Of a drawn seed. JavaScript keeps whole numbers of up to 53 bits."""


@dataclass(frozen=True)
class EditOrder:
    """An edit or a generation that a tenant asks for, authenticated and well-formed."""

    parameters: EditParameters
    image: bytes | BlobRef | None
    """None of a generation, and until the picture of `template_id` takes its place."""
    mask: bytes | BlobRef | None
    tenant: Tenant
    priority: Priority
    deadline: Deadline
    traceparent: str | None = None
    template_id: str | None = None
    """The registered template that is edited."""
    job_id: str = field(default_factory=lambda: f"job_{secrets.token_urlsafe(18)}")
    """The job that it becomes. An idempotency key leads to a certain one."""
    fingerprint: str | None = None
    """What it asks for, where it has an idempotency key."""
    task: Task = Task.EDIT
    references: tuple[bytes | BlobRef, ...] = ()
    """Other pictures that the model looks at."""
    control_images: tuple[bytes | BlobRef, ...] = ()
    """What ControlNets see, as the parameters count them."""

    @property
    def most_rows(self) -> int:
        """Rows that it may become: a picture's regions that are edited one by one count as pictures do."""
        asked = self.parameters
        return (asked.max_regions or EACH_REGIONS) if asked.auto_edit else asked.n

    @property
    def pictures(self) -> dict[str, bytes | BlobRef]:
        """Return what came with the request, by the name that it is stored under."""
        named = {"image": self.image, "mask": self.mask} | named_references(self.references)
        named |= named_control_images(self.control_images)
        return {name: data for name, data in named.items() if data is not None}

    async def identified(self, key: str | None) -> EditOrder:
        """The order of the job that the idempotency key `key` leads to; None changes nothing."""
        if key is None:
            return self
        digests = {  # a claim check brings its own, which every reader of the blob checks
            name: data.sha256 if isinstance(data, BlobRef) else (await refer("", data)).sha256
            for name, data in self.pictures.items()
        }
        asked = fingerprint(self.parameters, digests, self.template_id)
        return replace(self, job_id=job_id_of(self.tenant.name, key), fingerprint=asked)


@dataclass(frozen=True)
class JobPreparer:
    """Makes jobs of orders."""

    config: GatewayConfig
    blobs: BlobStore
    fleet: FleetListener
    loras: Loras
    masks: SegmentationClient
    tasks: asyncio.TaskGroup
    """Owns what outlives a request: forgetting the pictures of an order that failed."""

    async def prepare(self, order: EditOrder) -> Job:
        """Resolve the parameters, find the adapters, and store the pictures; submit the job at once."""
        check_mask(order.mask, order.template_id, order.parameters)
        cards, parameters = self.fleet.cards(), order.parameters
        card = self.fleet.choose(parameters.model, order.task)
        if order.task is Task.GENERATE:
            parameters = resolution.fitted(parameters, card)
        others = [other for other in cards.values() if order.task in other.tasks]
        resolution.check_taken({REFERENCE: len(order.references)}, card, order.task, others)
        check_images(parameters.controlnets, len(order.control_images), order.task)
        served = self.fleet.controlnets()
        controls = tuple(control_use(one, card, served, order.task) for one in parameters.controlnets)
        parameters = resolve(parameters, card, secrets.randbits(SEED_BITS), others)
        loras = await self.loras.used(order.tenant.name, parameters, card)
        prepost = self.masks.subject(card.name) if parameters.mask_prompt else None
        # Two requests with one idempotency key are one job, and each has an upload of its own, which it can forget.
        folder = f"{order.tenant.name}/{order.job_id}/{secrets.token_urlsafe(9)}"
        regions: tuple[BlobRef, ...] = ()
        try:
            kept = {
                name: await stored(self.blobs, f"{folder}/{name}", data, kept_s(self.config, order.deadline))
                for name, data in (order.pictures or {"room": b""}).items()  # results need room in any case
            }
            if prepost is not None:
                kept[MASK], regions = await self._mask(
                    order, parameters, kept["image"], f"{folder}/", prepost
                )
        except BaseException:  # a put that was cancelled may have arrived
            names = {MASK, *map(region_name, range(parameters.max_regions or 0)), *order.pictures}
            refs = [BlobRef(key=f"{folder}/{name}", size_bytes=0, sha256="") for name in names]
            self.tasks.create_task(forget(self.blobs, *refs), name=f"forget-{order.job_id}")
            raise
        return Job(
            job_id=order.job_id,
            tenant=order.tenant.name,
            gateway=self.config.instance,
            priority=order.priority,
            model=card.name,
            model_digest=card.digest,
            parameters=parameters,
            loras=loras,
            controls=controls,
            control_images=tuple(kept[name] for name in named_control_images(order.control_images)),
            image=kept.get("image"),
            mask=kept.get(MASK),
            regions=regions,
            references=tuple(kept[name] for name in named_references(order.references)),
            template_id=order.template_id,
            budget_ms=order.deadline.remaining_ms(),
            result_ttl_s=self.config.result_ttl_s,
            traceparent=tracing.traceparent() or order.traceparent,
            weight=order.tenant.weight,
            fingerprint=order.fingerprint,
            evaluations=evaluations_of(parameters, keeps_whole_steps=card.keeps_whole_steps),
            cfg_scale=cfg_scale(parameters, card),
        )

    async def forget(self, job: Job) -> None:
        """Delete the pictures that were stored for a job; claim checks of its caller stay. A failure is logged."""
        await forget(self.blobs, *(ref for ref in job.pictures if ref.key.startswith(job.upload_folder)))

    async def _mask(
        self, order: EditOrder, parameters: EditParameters, image: BlobRef, folder: str, prepost: str
    ) -> tuple[BlobRef, tuple[BlobRef, ...]]:
        """The mask that the order's words name in its picture, and those of regions to be edited one by one.

        `prepost` makes them.
        """
        each = parameters.auto_edit
        reply = await self.masks.made(
            parameters, image, subject=prepost, folder=folder, deadline=order.deadline, each=each
        )
        regions = tuple(one.mask for one in reply.regions if one.mask is not None)
        return reply.mask, regions if each else ()
