"""Giornata from another application, over NATS: submit an edit, watch it, wait for it, cancel it.

Example::

    async with giornata.client.connect("nats://127.0.0.1:4222") as client:
        edit = await client.edit(image=photo, mask=mask, prompt="a red scarf")
        async for progress in edit:
            print(progress)
        result = await edit
        pathlib.Path("edited.png").write_bytes(result.pictures[0].data)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from nats.aio.msg import Msg
from nats.micro.request import ERROR_CODE_HEADER
from pydantic import ValidationError

from giornata import bus, codec, subjects
from giornata.blobs import BlobStore, RedisBlobs
from giornata.bus import Bus
from giornata.deadlines import Deadline
from giornata.errors import (
    DeadlineExceeded,
    ErrorBody,
    GiornataError,
    PayloadTooLarge,
    ServiceUnavailable,
    from_body,
)
from giornata.events import EVENT_TYPES, DoneEvent, EventKind, StateEvent, StepEvent
from giornata.jobs import BlobRef, Priority
from giornata.messages import Accepted, CancelMessage, EditMessage, EditReply
from giornata.requests import EditParameters, OutputFormat, request_error

INLINE_BYTES: Final = 6 << 20
"""Image and mask up to this size travel in the message; larger ones need a blob store."""
GRACE_S: Final = 5.0
"""How much longer than the edit's own time an answer is waited for."""
EVENT_HEADER: Final = "Giornata-Event"
"""Header of a progress message: the event's kind."""
NO_RESPONDERS: Final = "503"

Progress = StateEvent | StepEvent | DoneEvent
"""What an edit tells while it runs; the last one is a DoneEvent."""


@dataclass(frozen=True)
class EditedPicture:
    """One finished picture."""

    index: int
    seed: int
    data: bytes
    """Encoded in the edit's output_format."""


@dataclass(frozen=True)
class EditResult:
    """A finished edit."""

    job_id: str
    width: int
    """Of the pictures, in pixels."""
    height: int
    output_format: OutputFormat
    pictures: tuple[EditedPicture, ...]
    errors: tuple[str, ...]
    """Sentences about the pictures that failed, when others succeeded."""


class Edit:
    """An accepted edit. Await it for its result, iterate over it for its progress; both may be done, in any order."""

    def __init__(self, client: Client, deadline: Deadline) -> None:
        self._client = client
        self._deadline = deadline
        loop = asyncio.get_running_loop()
        self._job_id: asyncio.Future[str] = loop.create_future()
        self._reply: asyncio.Future[EditReply] = loop.create_future()
        self._progress: asyncio.Queue[Progress | None] = asyncio.Queue()

    @property
    def job_id(self) -> str:
        """The job's id, the same as at the REST door."""
        return self._job_id.result()

    async def result(self) -> EditResult:
        """The finished pictures.

        Raises:
            GiornataError: why there are none.
        """
        reply = await self._within(self._reply)
        pictures = [
            EditedPicture(
                picture.index, picture.seed, await self._client.picture_bytes(picture.data, picture.ref)
            )
            for picture in reply.pictures
        ]
        return EditResult(
            job_id=reply.job_id,
            width=reply.width,
            height=reply.height,
            output_format=reply.output_format,
            pictures=tuple(pictures),
            errors=reply.errors,
        )

    def __await__(self) -> Generator[Any, None, EditResult]:
        return self.result().__await__()

    async def __aiter__(self) -> AsyncIterator[Progress]:
        """States and steps until the edit has ended. For one reader: what it has read is not told again."""
        while (progress := await self._progress.get()) is not None:
            yield progress

    async def cancel(self) -> None:
        """End the edit at its next step; its result is then :class:`~giornata.errors.JobCancelled`."""
        await self._client.cancel(self.job_id)

    async def accepted(self) -> None:
        """Return once the gateway has accepted the edit; raise why it has not."""
        either: set[asyncio.Future[Any]] = {self._job_id, self._reply}
        await asyncio.wait(either, timeout=self._left_s(), return_when=asyncio.FIRST_COMPLETED)
        if not self._job_id.done():
            reply = await self._within(self._reply)
            self._job_id.set_result(reply.job_id)

    def receive_progress(self, message: Msg) -> None:
        """Take in one progress message."""
        kind = (message.headers or {}).get(EVENT_HEADER)
        if kind is None or kind not in set(EventKind):
            return  # of a newer gateway
        event = codec.decode(EVENT_TYPES[EventKind(kind)], message.data)
        if not isinstance(event, StateEvent | StepEvent | DoneEvent):
            return
        if not self._job_id.done():
            self._job_id.set_result(event.job_id)
        self._progress.put_nowait(event)

    def receive_reply(self, message: Msg) -> None:
        """Take in the answer; it is the last message."""
        headers = message.headers or {}
        if not self._reply.done():
            try:
                if headers.get("Status") == NO_RESPONDERS:
                    raise ServiceUnavailable("No gateway answers.", retry_after_s=1)
                if ERROR_CODE_HEADER in headers:
                    raise from_body(codec.decode(ErrorBody, message.data))
                self._reply.set_result(codec.decode(EditReply, message.data))
            except GiornataError as error:
                self._reply.set_exception(error)
                self._reply.exception()  # seen: a caller who only watches progress need not await the result
        self._progress.put_nowait(None)

    def _left_s(self) -> float:
        return self._deadline.remaining_s() + GRACE_S

    async def _within(self, reply: asyncio.Future[EditReply]) -> EditReply:
        try:
            async with asyncio.timeout(self._left_s()):
                return await asyncio.shield(reply)
        except TimeoutError as error:
            raise DeadlineExceeded from error


class Client:
    """A connection to Giornata. Make it with :func:`connect`."""

    def __init__(self, bus: Bus, blobs: BlobStore | None, api_key: str | None, tenant: str) -> None:
        self._bus = bus
        self._blobs = blobs
        self._api_key = api_key
        self._tenant = tenant
        self._edits: dict[str, Edit] = {}
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
        image: bytes,
        prompt: str,
        mask: bytes | None = None,
        timeout_s: float = 120.0,
        priority: Priority = Priority.INTERACTIVE,
        **parameters: Any,
    ) -> Edit:
        """Submit an edit and return once it is accepted.

        Args:
            image: PNG, JPEG or WebP.
            prompt: what belongs into the masked region.
            mask: which region that is; see `mask_mode`.
            timeout_s: time allowed for the whole edit.
            priority: batch edits let interactive ones pass.
            parameters: other fields of :class:`giornata.requests.EditParameters`.

        Raises:
            GiornataError: why it was not accepted.
        """
        deadline = Deadline.after_ms(timeout_s * 1000)
        token = secrets.token_hex(8)
        stored_image, stored_mask = await self._claim_checks(image, mask, int(timeout_s) + 60)
        message = EditMessage(
            parameters=_validated({"prompt": prompt, **parameters}),
            image=stored_image,
            mask=stored_mask,
            remaining_ms=int(timeout_s * 1000),
            priority=priority,
            progress=f"{self._inbox}.{token}.progress",
            api_key=self._api_key,
        )
        data = codec.encode(message, limit_bytes=self._bus.client.max_payload)
        edit = Edit(self, deadline)
        self._edits[token] = edit
        try:
            await self._bus.client.publish(subjects.EDIT, data, reply=f"{self._inbox}.{token}.reply")
            await edit.accepted()
        except BaseException:
            self._edits.pop(token, None)
            raise
        return edit

    async def cancel(self, job_id: str) -> None:
        """Cancel a job of this tenant, whoever submitted it."""
        message = CancelMessage(job_id=job_id, api_key=self._api_key)
        await self._bus.call(subjects.EDIT_CANCEL, message, Accepted, Deadline.after_ms(message.remaining_ms))

    async def picture_bytes(self, data: bytes | None, ref: BlobRef | None) -> bytes:
        """A picture of a reply, fetched from the blob store where it was too large to travel inside."""
        if data is not None:
            return data
        if ref is None or self._blobs is None:
            raise PayloadTooLarge(
                "A picture is too large to travel over NATS.", accepted="connect with redis_url"
            )
        return await self._blobs.get(ref)

    async def _claim_checks(
        self, image: bytes, mask: bytes | None, ttl_s: int
    ) -> tuple[bytes | BlobRef, bytes | BlobRef | None]:
        size = len(image) + len(mask or b"")
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
        return await self._blobs.put(f"{folder}/image", image, ttl_s), stored_mask

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


@asynccontextmanager
async def connect(
    url: str,
    *,
    redis_url: str | None = None,
    api_key: str | None = None,
    tenant: str = "default",
    name: str = "client",
) -> AsyncIterator[Client]:
    """A client, connected while inside.

    Args:
        url: NATS server(s), comma-separated.
        redis_url: blob store of the deployment; needed for pictures above 6 MiB.
        api_key: where the gateways ask for one.
        tenant: that the key stands for; names the place of uploads in the blob store.
        name: of this application, in the server's list of connections.

    Raises:
        ServiceUnavailable: no server answers.
    """
    async with AsyncExitStack() as stack:
        connected = await stack.enter_async_context(bus.connect(url, name))
        blobs = await stack.enter_async_context(RedisBlobs.open(redis_url)) if redis_url else None
        client = Client(connected, blobs, api_key, tenant)
        await stack.enter_async_context(client.listening())
        yield client


def _validated(fields: dict[str, Any]) -> EditParameters:
    try:
        return EditParameters.model_validate(fields)
    except ValidationError as error:
        raise request_error(error) from error
