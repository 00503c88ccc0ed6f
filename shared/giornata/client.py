"""Giornata from another application, over NATS: submit edits and generations, watch and cancel them, ask for masks.

Example::

    async with giornata.client.connect("nats://127.0.0.1:4222") as client:
        edit = await client.edit(image=photo, mask=mask, prompt="a red star")
        async for progress in edit:
            print(progress)
        result = await edit
        pathlib.Path("edited.png").write_bytes(result.pictures[0].data)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, TypeVar

from nats.aio.client import NO_RESPONDERS_STATUS
from nats.aio.msg import Msg

from giornata.blobs import BlobStore, open_blobs
from giornata.bus import bus
from giornata.deadlines import Deadline
from giornata.tracing import TRACEPARENT
from giornata.wire import codec, messages, subjects
from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    NotPermitted,
    PayloadTooLarge,
    ServiceUnavailable,
)
from giornata.wire.jobs import BlobRef, Priority
from giornata.wire.messages import (
    EVENT_TYPES,
    DoneEvent,
    EventKind,
    MaskedRegion,
    MaskMessage,
    MaskMessageReply,
    MaskParameters,
    MaskPicture,
    PreviewEvent,
    StateEvent,
    StepEvent,
)
from giornata.wire.requests import (
    EditParameters,
    GenerationParameters,
    asked,
    named_control_images,
    named_references,
)

__all__ = ["Client", "Edit", "EditResult", "EditedPicture", "MaskResult", "Progress", "RegionMask", "connect"]

GRACE_S: Final = 5.0
"""How much longer than the edit's own time a client waits for the answer."""
T = TypeVar("T")

Progress = StateEvent | StepEvent | PreviewEvent | DoneEvent
"""Events of a running edit; the last is a DoneEvent. Previews come if `partial_images` asks for them."""


class EditedPicture(messages.Picture):
    """One finished picture, in the edit's output_format."""

    data: bytes


class EditResult(messages.EditReply):
    """A finished edit."""

    pictures: tuple[EditedPicture, ...]


class Edit:
    """An accepted edit or generation. Await it for its result, iterate over its progress, or both in any order."""

    def __init__(self, client: Client, deadline: Deadline) -> None:
        self._client, self.deadline = client, deadline
        """How long the client waits for the answer."""
        loop = asyncio.get_running_loop()
        self._job_id: asyncio.Future[str] = loop.create_future()
        self._reply: asyncio.Future[messages.EditReply] = loop.create_future()
        self._progress: asyncio.Queue[Progress | None] = asyncio.Queue()

    @property
    def job_id(self) -> str:
        """The job's id, the same as at the REST door."""
        return self._job_id.result()

    async def result(self) -> EditResult:
        """The finished pictures; raise why there are none, DeadlineExceeded if no answer has come in time."""
        reply = await self._in_time(asyncio.shield(self._reply))
        pictures = [dict(p) | {"data": await self._client.picture_bytes(p)} for p in reply.pictures]
        return EditResult.model_validate(dict(reply) | {"pictures": pictures})

    def __await__(self) -> Generator[Any, None, EditResult]:
        return self.result().__await__()

    async def __aiter__(self) -> AsyncIterator[Progress]:
        """States and steps until the edit has ended; DeadlineExceeded if the gateway has fallen silent.

        For one reader: each event is told once.
        """
        while (progress := await self._in_time(self._progress.get())) is not None:
            yield progress
        self._progress.put_nowait(None)  # a later reader finds the end, too

    async def cancel(self) -> None:
        """End the edit at its next step; its result is then :class:`~giornata.wire.errors.JobCancelled`."""
        await self._client.cancel(self.job_id)

    async def accepted(self) -> None:
        """Return once the gateway has accepted the edit; raise why it has not."""
        either: set[asyncio.Future[Any]] = {self._job_id, self._reply}
        await asyncio.wait(either, timeout=self.deadline.remaining_s(), return_when=asyncio.FIRST_COMPLETED)
        if not self._job_id.done():
            reply = await self._in_time(asyncio.shield(self._reply))
            self._job_id.set_result(reply.job_id)

    def receive_progress(self, message: Msg) -> None:
        """Take in one progress message."""
        kind = (message.headers or {}).get(messages.EVENT_HEADER)
        if kind is None or kind not in set(EventKind):
            return  # a newer gateway's
        event = codec.decode(EVENT_TYPES[EventKind(kind)], message.data)
        if not isinstance(event, Progress):
            return
        if not self._job_id.done():
            self._job_id.set_result(event.job_id)
        self._progress.put_nowait(event)

    def receive_reply(self, message: Msg) -> None:
        """Take in the answer; it is the last message."""
        try:
            if (message.headers or {}).get("Status") == NO_RESPONDERS_STATUS:
                raise ServiceUnavailable("No gateway answers.", retry_after_s=1)
            self._reply.set_result(bus.answer_in(message, messages.EditReply))
        except GiornataError as error:
            self._reply.set_exception(error)
            self._reply.exception()  # seen: a caller who only watches progress need not await the result
        self._progress.put_nowait(None)

    async def _in_time(self, awaited: Awaitable[T]) -> T:
        """Return what has come already, or comes before the deadline."""
        try:
            async with asyncio.timeout(self.deadline.remaining_s()):
                return await awaited
        except TimeoutError as error:
            raise DeadlineExceeded from error


class RegionMask(MaskedRegion):
    """One thing in the picture."""

    data: bytes


class MaskResult(MaskMessageReply):
    """The mask that some words name. `data` is the mask of all regions together, as an edit takes it."""

    data: bytes
    regions: tuple[RegionMask, ...]


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
            try:
                await self._bus.client.in_force(answers)
            except NotPermitted as error:
                raise NotPermitted(
                    "The NATS server does not let this user hear answers.",
                    received=answers,
                    accepted="user and password in the address, as `giornata keys add` has printed it",
                ) from error
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
        pictures = (
            {"image": image, "mask": mask} | named_references(reference) | named_control_images(control_image)
        )
        told = asked(EditParameters, {"prompt": prompt, **parameters})
        return await self._submitted(
            subjects.EDIT,
            messages.EditMessage,
            {"parameters": told, "template_id": template_id, "priority": priority},
            pictures=pictures,
            timeout_s=timeout_s,
            headers=_headers(idempotency_key, traceparent),
        )

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
        pictures = named_references(reference) | named_control_images(control_image)
        told = asked(GenerationParameters, {"prompt": prompt, **parameters})
        return await self._submitted(
            subjects.GENERATE,
            messages.GenerateMessage,
            {"parameters": told, "priority": priority},
            pictures=pictures,
            timeout_s=timeout_s,
            headers=_headers(idempotency_key, traceparent),
        )

    async def _submitted(
        self,
        subject: str,
        kind: type[messages.GenerateMessage],
        fields: Mapping[str, Any],
        *,
        pictures: Mapping[str, bytes | None],
        timeout_s: float,
        headers: dict[str, str] | None,
    ) -> Edit:
        """The job that a message with these fields and pictures becomes, once it is accepted."""
        deadline, token = Deadline.after_ms(timeout_s * 1000), secrets.token_hex(8)
        stored = await self._claim_checks(pictures, int(timeout_s) + 60)
        single = {name: stored.pop(name) for name in ("image", "mask") if name in stored}
        message = kind.model_validate(
            {
                **fields,
                **single,
                "reference": tuple(data for name, data in stored.items() if name not in CONTROL_IMAGES),
                "control_image": tuple(data for name, data in stored.items() if name in CONTROL_IMAGES),
                "remaining_ms": deadline.remaining_ms(),
                "api_key": self._api_key,
                "progress": f"{self._inbox}.{token}.progress",
            }
        )
        data = codec.encode(message, limit_bytes=self._bus.client.max_payload)
        edit = Edit(self, Deadline(deadline.at_s + GRACE_S))
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
            parameters: other fields of :class:`giornata.wire.messages.MaskParameters`.
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
        regions = [dict(one) | {"data": await self.picture_bytes(one)} for one in made.regions]
        whole = {"data": await self.picture_bytes(made), "regions": regions}
        return MaskResult.model_validate(dict(made) | whole)

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


def _headers(idempotency_key: str | None, traceparent: str | None) -> dict[str, str] | None:
    """Headers of a message; None where it needs none."""
    given = {messages.IDEMPOTENCY_HEADER: idempotency_key, TRACEPARENT: traceparent}
    return {name: value for name, value in given.items() if value is not None} or None
