"""A connection to Giornata over NATS: submits edits and sorts their answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from nats.aio.msg import Msg
from pydantic import ValidationError

from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.client.edit import Edit
from giornata.deadlines import Deadline
from giornata.wire import codec, subjects
from giornata.wire.errors import PayloadTooLarge
from giornata.wire.jobs import BlobRef, Priority
from giornata.wire.messages import (
    IDEMPOTENCY_HEADER,
    INLINE_BYTES,
    Accepted,
    CancelMessage,
    EditMessage,
    Picture,
)
from giornata.wire.requests import EditParameters, request_error

GRACE_S: Final = 5.0
"""How much longer than the edit's own time a client waits for the answer."""


class Client:
    """A connection to Giornata. Make it with :func:`giornata.client.connect`."""

    def __init__(self, bus: Bus, blobs: BlobStore | None, api_key: str | None, tenant: str) -> None:
        self._bus = bus
        self._blobs = blobs
        self._api_key = api_key
        self._tenant = tenant
        self._edits: dict[str, Edit] = {}
        """Edits by token, until their answer or their deadline."""
        self._inbox = bus.client.new_inbox()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Receive answers while inside."""
        subscription = await self._bus.client.subscribe(f"{self._inbox}.*.*", cb=self._receive)
        try:
            yield
        finally:
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    async def edit(
        self,
        *,
        prompt: str,
        image: bytes | None = None,
        template_id: str | None = None,
        mask: bytes | None = None,
        timeout_s: float = 120.0,
        priority: Priority = Priority.INTERACTIVE,
        idempotency_key: str | None = None,
        **parameters: Any,
    ) -> Edit:
        """Submit an edit and return once it is accepted.

        Args:
            prompt: what belongs into the masked region.
            image: PNG, JPEG or WebP.
            template_id: a registered template, instead of an image.
            mask: the region to edit; see `mask_mode`.
            timeout_s: time allowed for the whole edit.
            priority: batch edits let interactive ones pass.
            idempotency_key: an edit that is submitted again with its key is the same job; another edit with the key is
                refused. Best a random UUID.
            parameters: other fields of :class:`giornata.wire.requests.EditParameters`.

        Raises:
            GiornataError: why it was not accepted.
        """
        deadline = Deadline.after_ms(timeout_s * 1000)
        wanted = _validated({"prompt": prompt, **parameters})
        stored_image, stored_mask = await self._claim_checks(image, mask, int(timeout_s) + 60)
        token = secrets.token_hex(8)
        message = EditMessage(
            parameters=wanted,
            image=stored_image,
            template_id=template_id,
            mask=stored_mask,
            remaining_ms=deadline.remaining_ms(),
            priority=priority,
            progress=f"{self._inbox}.{token}.progress",
            api_key=self._api_key,
        )
        data = codec.encode(message, limit_bytes=self._bus.client.max_payload)
        edit = Edit(Deadline(deadline.at_s + GRACE_S), self.picture_bytes, self.cancel)
        self._edits[token] = edit
        asyncio.get_running_loop().call_later(edit.left_s, self._edits.pop, token, None)
        try:
            await self._submit(data, token, idempotency_key)
            await edit.accepted()
        except BaseException:
            self._edits.pop(token, None)
            raise
        return edit

    async def _submit(self, data: bytes, token: str, idempotency_key: str | None) -> None:
        headers = None if idempotency_key is None else {IDEMPOTENCY_HEADER: idempotency_key}
        reply = f"{self._inbox}.{token}.reply"
        await self._bus.client.publish(subjects.EDIT, data, reply=reply, headers=headers)

    async def cancel(self, job_id: str) -> None:
        """Cancel a job of this tenant, submitted by any of its clients."""
        message = CancelMessage(job_id=job_id, api_key=self._api_key)
        await self._bus.call(subjects.EDIT_CANCEL, message, Accepted, Deadline.after_ms(message.remaining_ms))

    async def picture_bytes(self, picture: Picture) -> bytes:
        """A picture of a reply, fetched from the blob store where it was too large to travel inside."""
        if picture.data is not None:
            return picture.data
        if picture.ref is None or self._blobs is None:
            raise PayloadTooLarge(
                "A picture is too large to travel over NATS.", accepted="connect with redis_url"
            )
        return await self._blobs.get(picture.ref)

    async def _claim_checks(
        self, image: bytes | None, mask: bytes | None, ttl_s: int
    ) -> tuple[bytes | BlobRef | None, bytes | BlobRef | None]:
        size = len(image or b"") + len(mask or b"")
        if size <= min(INLINE_BYTES, self._bus.client.max_payload * 3 // 4):
            return image, mask
        if self._blobs is None:
            raise PayloadTooLarge(
                "Image and mask are too large to travel over NATS.",
                field="image",
                received=f"{size} bytes",
                accepted=f"{INLINE_BYTES} bytes, or connect with redis_url",
            )
        folder = f"{self._tenant}/upload_{secrets.token_urlsafe(18)}"
        stored_mask = None if mask is None else await self._blobs.put(f"{folder}/mask", mask, ttl_s)
        stored_image = None if image is None else await self._blobs.put(f"{folder}/image", image, ttl_s)
        return stored_image, stored_mask

    async def _receive(self, message: Msg) -> None:
        token, kind = message.subject.rsplit(".", 2)[1:]
        edit = self._edits.get(token)
        if edit is None:
            return
        if kind == "reply":
            self._edits.pop(token, None)
            edit.receive_reply(message)
        else:
            edit.receive_progress(message)


def _validated(fields: dict[str, Any]) -> EditParameters:
    try:
        return EditParameters.model_validate(fields)
    except ValidationError as error:
        raise request_error(error) from error
