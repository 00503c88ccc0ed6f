"""Masks from words: asked of a prepost before a job exists, so that its mask is a blob as any other."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from giornata import retries
from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.tracing import TraceSpanKind, span
from giornata.wire import subjects
from giornata.wire.errors import InvalidField, MasksNotServed, ServiceUnavailable
from giornata.wire.jobs import BlobRef
from giornata.wire.masks import MASK, MaskParameters, MaskReply, MaskRequest, region_name
from giornata.wire.requests import MASK_PROMPT, MAX_REGIONS, SegmentationFields
from giornata_gateway.config import GatewayConfig
from giornata_gateway.fleet import FleetListener
from giornata_gateway.jobs.request_blobs import check_stored, forget, stored
from giornata_gateway.views.catalog import mask_card

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
        ttl_s: int,
        deadline: Deadline,
        each: bool = False,
    ) -> MaskReply:
        """The mask of what `asked` names in a stored picture, kept below `folder` for `ttl_s`.

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
                ttl_s=ttl_s,
                each=each,
                remaining_ms=soon.remaining_ms(),
            )
            with span("mask", TraceSpanKind.ASKS):
                return await self.bus.call(subject, request, MaskReply, soon)

        reply: MaskReply = await retries.soon(ServiceUnavailable, self.config.submit_window_s)(ask)
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
        ttl_s = self.config.result_ttl_s + int(deadline.remaining_s()) + 1
        names = ["image", MASK, *map(region_name, range(asked.max_regions or MAX_REGIONS))]
        handed: set[str] = set()
        try:
            ref = await stored(self.blobs, f"{folder}image", image, ttl_s)
            del image  # while the answer travels, nothing holds it
            reply = await self.made(
                asked.asked(), ref, subject=subject, folder=folder, ttl_s=ttl_s, deadline=deadline, each=True
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
