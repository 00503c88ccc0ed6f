"""A job that was accepted over NATS: its progress, its result, its cancelling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, TypeVar

from nats.aio.client import NO_RESPONDERS_STATUS
from nats.aio.msg import Msg

from giornata.bus import bus
from giornata.deadlines import Deadline
from giornata.wire import codec, messages
from giornata.wire.errors import DeadlineExceeded, GiornataError, ServiceUnavailable
from giornata.wire.messages import EVENT_TYPES, DoneEvent, EventKind, PreviewEvent, StateEvent, StepEvent

T = TypeVar("T")
Cancel = Callable[[str], Awaitable[None]]
"""Cancels the job with an id."""
PictureBytes = Callable[[messages.Picture], Awaitable[bytes]]
"""The file of a picture in a reply."""

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

    def __init__(self, deadline: Deadline, cancel: Cancel, picture_bytes: PictureBytes) -> None:
        self._cancel, self._picture_bytes = cancel, picture_bytes
        self.deadline = deadline
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
        pictures = [dict(p) | {"data": await self._picture_bytes(p)} for p in reply.pictures]
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
        await self._cancel(self.job_id)

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
