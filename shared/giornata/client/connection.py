"""The connection to Giornata over NATS, by which edits and generations are submitted, and masks asked for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from nats.aio.msg import Msg

from giornata.blobs import BlobStore, open_blobs
from giornata.bus import bus
from giornata.client.edit import Edit
from giornata.client.mask import MaskResult, fetch_masks
from giornata.deadlines import Deadline
from giornata.observability.tracing import TRACEPARENT
from giornata.wire import codec, messages, resolution, subjects
from giornata.wire.adapters import CONTROL_IMAGES, check_control_images, named_control_images
from giornata.wire.errors import NotPermitted, PayloadTooLarge
from giornata.wire.jobs import BlobRef, Priority
from giornata.wire.masks import MaskMessage, MaskMessageReply, MaskParameters, MaskPicture
from giornata.wire.requests import EditParameters, GenerationParameters, asked, named_references

GRACE_S: Final = 5.0
"""How much longer than the edit's own time a client waits for the answer."""


@asynccontextmanager
async def connect(
    url: str,
    *,
    blobs_url: str | None = None,
    api_key: str | None = None,
    tenant: str = "default",
    name: str = "client",
) -> AsyncIterator[Client]:
    """A client, connected while inside.

    Raises ServiceUnavailable if no server answers or lets us in, NotPermitted if we could not hear answers.

    Args:
        url: NATS server(s), comma-separated, with user and password where there are any. Answers to the user app.NAME
            come to inboxes below _INBOX_app.NAME, which no other user hears.
        blobs_url: blob store of the deployment; needed for pictures above 6 MiB.
        api_key: if the gateways ask for one.
        tenant: the key's; names the place of uploads in the blob store.
        name: of this application, in the server's list of connections.
    """
    async with bus.connect(url, name) as connected, AsyncExitStack() as stack:
        blobs = await stack.enter_async_context(open_blobs(blobs_url)) if blobs_url else None
        client = Client(connected, blobs, api_key, tenant)
        await stack.enter_async_context(client.listening())
        yield client


class Client:
    """A connection to Giornata: submits edits and sorts their answers. Make it with :func:`connect`."""

    def __init__(self, connected: bus.Bus, blobs: BlobStore | None, api_key: str | None, tenant: str) -> None:
        self._bus = connected
        self._blobs = blobs
        self._api_key = api_key
        self._tenant = tenant
        self._edits: dict[str, Edit] = {}
        """Edits by token, until their answer or their deadline."""
        self._inbox = connected.client.new_inbox()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Receive answers while inside; NotPermitted where they could not be heard."""
        answers = f"{self._inbox}.*.*"
        subscription = await self._bus.client.subscribe(answers, cb=self._receive)
        try:
            await self._heard(answers)
            yield
        finally:
            if not self._bus.client.is_closed:
                await subscription.unsubscribe()

    async def _heard(self, answers: str) -> None:
        try:
            await self._bus.client.in_force(answers)
        except NotPermitted as error:
            raise NotPermitted(
                "The NATS server does not let this user hear answers.",
                received=answers,
                accepted="user and password in the address, as `giornata keys add` has printed it",
            ) from error

    async def edit(
        self,
        *,
        prompt: str,
        image: bytes | None = None,
        template_id: str | None = None,
        mask: bytes | None = None,
        reference: Sequence[bytes] = (),
        control_image: Sequence[bytes] = (),
        timeout_s: float = 120.0,
        priority: Priority = Priority.INTERACTIVE,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
        **parameters: Any,
    ) -> Edit:
        """Submit an edit and return once it is accepted; raise why it was not.

        Args:
            prompt: what belongs into the masked region.
            image: PNG, JPEG or WebP.
            template_id: a registered template, instead of an image.
            mask: the region to edit; see `mask_mode`.
            reference: other pictures that the model looks at.
            control_image: what ControlNets see; `image` of `controlnets` counts them from 0.
            timeout_s: time allowed for the whole edit.
            priority: batch edits let interactive ones pass.
            idempotency_key: an edit that is submitted again with its key is the same job; another edit with the key is
                refused. Best a random UUID.
            traceparent: the caller's span (W3C Trace Context), which the edit's trace goes on from.
            parameters: other fields of :class:`giornata.wire.requests.EditParameters`.
        """
        deadline = Deadline.after_ms(timeout_s * 1000)
        wanted = asked(EditParameters, {"prompt": prompt, **parameters})
        pictures = {"image": image, "mask": mask} | named_references(reference)
        stored = await self._claim_checks(pictures | _controls(control_image), int(timeout_s) + 60)
        message = messages.EditMessage(
            parameters=wanted,
            image=stored.pop("image", None),
            template_id=template_id,
            mask=stored.pop("mask", None),
            **_lists(stored),
            remaining_ms=deadline.remaining_ms(),
            priority=priority,
            api_key=self._api_key,
        )
        headers = _headers(idempotency_key, traceparent)
        return await self._submitted(subjects.EDIT, message, deadline, headers)

    async def generate(
        self,
        *,
        prompt: str,
        reference: Sequence[bytes] = (),
        control_image: Sequence[bytes] = (),
        timeout_s: float = 120.0,
        priority: Priority = Priority.INTERACTIVE,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
        **parameters: Any,
    ) -> Edit:
        """Ask for pictures from text and return once that is accepted; raise why it was not.

        Args:
            prompt: what the pictures show.
            reference: pictures that the model looks at.
            control_image: as of :meth:`edit`.
            timeout_s: as of :meth:`edit`, and so are `priority` and `idempotency_key`.
            priority: batch jobs let interactive ones pass.
            idempotency_key: a generation that is submitted again with its key is the same job.
            traceparent: as of :meth:`edit`.
            parameters: other fields of :class:`giornata.wire.requests.GenerationParameters`.
        """
        deadline = Deadline.after_ms(timeout_s * 1000)
        resolution.check_fields(parameters)
        pictures = named_references(reference) | _controls(control_image)
        stored = await self._claim_checks(pictures, int(timeout_s) + 60)
        message = messages.GenerateMessage(
            parameters=asked(GenerationParameters, {"prompt": prompt, **parameters}),
            **_lists(stored),
            remaining_ms=deadline.remaining_ms(),
            priority=priority,
            api_key=self._api_key,
        )
        headers = _headers(idempotency_key, traceparent)
        return await self._submitted(subjects.GENERATE, message, deadline, headers)

    async def _submitted(
        self,
        subject: str,
        message: messages.GenerateMessage,
        deadline: Deadline,
        headers: dict[str, str] | None,
    ) -> Edit:
        """The job that `message` becomes, once it is accepted."""
        token = secrets.token_hex(8)
        told = message.model_copy(update={"progress": f"{self._inbox}.{token}.progress"})
        data = codec.encode(told, limit_bytes=self._bus.client.max_payload)
        edit = Edit(Deadline(deadline.at_s + GRACE_S), self.cancel, self.picture_bytes)
        self._edits[token] = edit
        asyncio.get_running_loop().call_later(edit.deadline.remaining_s(), self._edits.pop, token, None)
        try:
            reply = f"{self._inbox}.{token}.reply"
            await self._bus.client.publish(subject, data, reply=reply, headers=headers)
            await edit.accepted()
        except BaseException:
            self._edits.pop(token, None)
            raise
        return edit

    async def mask(
        self, *, prompt: str, image: bytes, timeout_s: float = 60.0, **parameters: Any
    ) -> MaskResult:
        """Find what words name in a picture; raise NothingFound where that is nothing, or why there is no mask.

        Args:
            prompt: what the mask shows, in words: "the left shoe".
            image: PNG, JPEG or WebP.
            timeout_s: time allowed for the answer.
            parameters: other fields of :class:`giornata.wire.masks.MaskParameters`.
        """
        deadline = Deadline.after_ms(timeout_s * 1000)
        wanted = asked(MaskParameters, {"prompt": prompt, **parameters})
        stored = await self._claim_checks({"image": image}, int(timeout_s) + 60)
        message = MaskMessage(
            parameters=wanted,
            image=stored["image"],
            remaining_ms=deadline.remaining_ms(),
            api_key=self._api_key,
        )
        until, limit = Deadline(deadline.at_s + GRACE_S), self._bus.client.max_payload
        made = await self._bus.call(subjects.MASK, message, MaskMessageReply, until, limit_bytes=limit)
        return await fetch_masks(made, self.picture_bytes)

    async def cancel(self, job_id: str) -> None:
        """Cancel a job of this tenant, submitted by any of its clients."""
        message = messages.CancelMessage(job_id=job_id, api_key=self._api_key)
        await self._bus.call(
            subjects.EDIT_CANCEL, message, messages.JobAck, Deadline.after_ms(message.remaining_ms)
        )

    async def picture_bytes(self, picture: messages.Picture | MaskPicture) -> bytes:
        """A picture of a reply, fetched from the blob store where it was too large to travel inside."""
        if picture.data is not None:
            return picture.data
        if picture.ref is None or self._blobs is None:
            raise PayloadTooLarge(
                "A picture is too large to travel over NATS.", accepted="connect with blobs_url"
            )
        return await self._blobs.get(picture.ref)

    async def _claim_checks(
        self, pictures: Mapping[str, bytes | None], ttl_s: int
    ) -> dict[str, bytes | BlobRef]:
        """The pictures that there are, inline or as claim checks; PayloadTooLarge without a blob store for these."""
        given = {name: data for name, data in pictures.items() if data is not None}
        size = sum(map(len, given.values()))
        if size <= min(messages.INLINE_BYTES, self._bus.client.max_payload * 3 // 4):
            return dict(given)
        if self._blobs is None:
            raise PayloadTooLarge(
                "The pictures are too large to travel over NATS.",
                field=next(iter(given)),
                received=f"{size} bytes",
                accepted=f"{messages.INLINE_BYTES} bytes together, or connect with blobs_url",
            )
        folder = f"{self._tenant}/upload_{secrets.token_urlsafe(18)}"
        return {name: await self._blobs.put(f"{folder}/{name}", data, ttl_s) for name, data in given.items()}

    async def _receive(self, message: Msg) -> None:
        token, kind = message.subject.rsplit(".", 2)[1:]
        edit = self._edits.get(token)
        if edit is None:
            return
        if kind == "reply":
            del self._edits[token]
            edit.receive_reply(message)
        else:
            edit.receive_progress(message)


def _controls(images: Sequence[bytes]) -> dict[str, bytes]:
    """Control images by name.

    InvalidField where there are more than a request may bring.
    """
    check_control_images(len(images))
    return named_control_images(images)


def _lists(stored: Mapping[str, bytes | BlobRef]) -> dict[str, Any]:
    """The pictures of a message that come in lists."""
    controls = tuple(data for name, data in stored.items() if name in CONTROL_IMAGES)
    return {
        "reference": tuple(data for name, data in stored.items() if name not in CONTROL_IMAGES),
        "control_image": controls,
    }


def _headers(idempotency_key: str | None, traceparent: str | None) -> dict[str, str] | None:
    """Headers of a message; None where it needs none."""
    given = {messages.IDEMPOTENCY_HEADER: idempotency_key, TRACEPARENT: traceparent}
    return {name: value for name, value in given.items() if value is not None} or None
