"""An edit that was submitted over NATS: its progress and its result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

from nats.aio.msg import Msg
from nats.micro.request import ERROR_CODE_HEADER

from giornata.deadlines import Deadline
from giornata.wire import codec
from giornata.wire.errors import DeadlineExceeded, ErrorBody, GiornataError, ServiceUnavailable, from_body
from giornata.wire.events import EVENT_TYPES, DoneEvent, EventKind, PreviewEvent, StateEvent, StepEvent
from giornata.wire.messages import EVENT_HEADER, EditReply, Picture
from giornata.wire.requests import OutputFormat

NO_RESPONDERS: Final = "503"

Progress = StateEvent | StepEvent | PreviewEvent | DoneEvent
"""Events of a running edit; the last is a DoneEvent. Previews come if `partial_images` asks for them."""
Fetch = Callable[[Picture], Awaitable[bytes]]
"""Returns the bytes of a picture, inline or from the blob store."""
Cancel = Callable[[str], Awaitable[None]]
"""Ends the job with this id."""


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
    """The pictures' width, in pixels."""
    height: int
    output_format: OutputFormat
    pictures: tuple[EditedPicture, ...]
    errors: tuple[str, ...]
    """Sentences about the pictures that failed, when others succeeded."""


class Edit:
    """An accepted edit. Await it for its result, iterate over it for its progress, or both in any order."""

    def __init__(self, deadline: Deadline, fetch: Fetch, cancel: Cancel) -> None:
        self._deadline = deadline
        self._fetch = fetch
        self._cancel = cancel
        loop = asyncio.get_running_loop()
        self._job_id: asyncio.Future[str] = loop.create_future()
        self._reply: asyncio.Future[EditReply] = loop.create_future()
        self._progress: asyncio.Queue[Progress | None] = asyncio.Queue()

    @property
    def job_id(self) -> str:
        """The job's id, the same as at the REST door."""
        return self._job_id.result()

    @property
    def left_s(self) -> float:
        """How long the client still waits for the answer."""
        return self._deadline.remaining_s()

    async def result(self) -> EditResult:
        """The finished pictures.

        Raises:
            DeadlineExceeded: no answer has come in time.
            GiornataError: why there are none.
        """
        reply = await self._within(self._reply)
        pictures = [EditedPicture(p.index, p.seed, await self._fetch(p)) for p in reply.pictures]
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
        """States and steps until the edit has ended. For one reader: each event is told once.

        Raises:
            DeadlineExceeded: the gateway has fallen silent.
        """
        while (progress := await self._next()) is not None:
            yield progress
        self._progress.put_nowait(None)  # a later reader finds the end, too

    async def cancel(self) -> None:
        """End the edit at its next step; its result is then :class:`~giornata.wire.errors.JobCancelled`."""
        await self._cancel(self.job_id)

    async def accepted(self) -> None:
        """Return once the gateway has accepted the edit; raise why it has not."""
        either: set[asyncio.Future[Any]] = {self._job_id, self._reply}
        await asyncio.wait(either, timeout=self.left_s, return_when=asyncio.FIRST_COMPLETED)
        if not self._job_id.done():
            reply = await self._within(self._reply)
            self._job_id.set_result(reply.job_id)

    def receive_progress(self, message: Msg) -> None:
        """Take in one progress message."""
        kind = (message.headers or {}).get(EVENT_HEADER)
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

    async def _next(self) -> Progress | None:
        if not self._progress.empty():
            return self._progress.get_nowait()
        try:
            async with asyncio.timeout(self.left_s):
                return await self._progress.get()
        except TimeoutError as error:
            raise DeadlineExceeded from error

    async def _within(self, reply: asyncio.Future[EditReply]) -> EditReply:
        if reply.done():
            return reply.result()
        try:
            async with asyncio.timeout(self.left_s):
                return await asyncio.shield(reply)
        except TimeoutError as error:
            raise DeadlineExceeded from error
