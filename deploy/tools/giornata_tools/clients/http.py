"""The HTTP client: an edit or a generation over server-sent events, uploads, and what the gateway answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from pydantic import Base64Bytes, BaseModel, Field, TypeAdapter, ValidationError

from giornata.logs import escape_controls
from giornata.wire.errors import ErrorBody
from giornata.wire.requests import REFERENCE, named_control_images
from giornata_tools.clients.edits import (
    EditCall,
    EditOutcome,
    EditProgress,
    EditStopped,
    PaintedPicture,
    PictureFailure,
    Preview,
    RequestRefused,
    ServerUnreachable,
    Tell,
    without_password,
)

# What the gateway answers, read from its JSON. Pure; fields that it added since are ignored.


class PartialImage(Preview):
    """Data of ``image_edit.partial_image``; events of a generation have the same data."""

    format: str = Field(alias="output_format")
    image: Base64Bytes = Field(alias="b64_json")


class CompletedData(PaintedPicture):
    """Data of ``image_edit.completed``."""

    job_id: str
    size: str
    data: Base64Bytes = Field(alias="b64_json")


class AnsweredError(ErrorBody):
    """An error as an answer tells it, under the names of HTTP."""

    field: str | None = Field(None, alias="param")


class FailedEvent(BaseModel):
    """Body of a refusal, and data of ``error``."""

    error: AnsweredError
    index: int | None = None
    """Index of the picture that failed, where others may have succeeded."""

    def body(self, retry_after: str = "") -> ErrorBody:
        """The error as it travels elsewhere; `retry_after` is the header of that name, in seconds."""
        again_s = float(retry_after) if retry_after.isdecimal() else None
        return self.error.model_copy(update={"retry_after_s": again_s})


Event = EditProgress | PartialImage | CompletedData | FailedEvent

EVENTS: dict[str, type[Event]] = {
    f"{task}.{name}": kind
    for task in ("image_edit", "image_generation")
    for name, kind in (
        ("progress", EditProgress),
        ("partial_image", PartialImage),
        ("completed", CompletedData),
    )
} | {"error": FailedEvent}
"""Events by type; unknown types of a newer gateway are passed over."""


def read_event(kind: str, data: str) -> Event | None:
    """An event of an edit's stream, or None for one that this version does not know.

    Raises:
        pydantic.ValidationError: it lacks something.
    """
    known = EVENTS.get(kind)
    return None if known is None else known.model_validate_json(data)


# Server-sent events from bytes as they come: section 9.2 of the HTML standard.


@dataclass(frozen=True)
class ServerEvent:
    """One event."""

    kind: str
    data: str


class EventReader:
    """Feed it chunks cut anywhere; lines may end with LF or CRLF. A picture in a line is joined once, not per chunk."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._kind = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """The events that `chunk` completes."""
        first, *others = chunk.split(b"\n")
        self._pending.append(first)
        for other in others:
            event = self._take(b"".join(self._pending).removesuffix(b"\r").decode())
            self._pending = [other]
            if event is not None:
                yield event

    def _take(self, line: str) -> ServerEvent | None:
        if not line:
            event = ServerEvent(self._kind or "message", "\n".join(self._data)) if self._data else None
            self._kind, self._data = "", []
            return event
        name, _, value = line.partition(":")  # a comment's name is empty
        if name == "event":
            self._kind = value.removeprefix(" ")
        elif name == "data":
            self._data.append(value.removeprefix(" "))
        return None


async def events(content: aiohttp.StreamReader) -> AsyncIterator[ServerEvent]:
    """The events of an answer's body."""
    reader = EventReader()
    async for chunk in content.iter_any():
        for event in reader.feed(chunk):
            yield event


# The REST door: an edit or a generation over server-sent events, its cancelling, and what else the gateway
# tells.


STREAM: Final = {"stream": True, "progress": True}
"""Has every step told."""
SILENCE_S: Final = 60.0
"""A gateway that says nothing for so long is gone: it comments on a quiet stream every 15 s."""
CONNECT_S: Final = 10.0
CANCEL_S: Final = 10.0

_OBJECT: Final[TypeAdapter[dict[str, Any]]] = TypeAdapter(dict[str, Any])


def _object(data: str | bytes) -> dict[str, Any]:
    """The JSON object in an answer; a terminal obeys none of its texts."""
    told = _OBJECT.validate_json(data)
    return {name: _visible(value) for name, value in told.items()}


def _visible(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _visible(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_visible(inner) for inner in value]
    return escape_controls(value, "\n") if isinstance(value, str) else value


class HttpClient:
    """A gateway. Make it with :func:`open_http`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._job_id: str | None = None

    async def edit(self, order: EditCall, tell: Tell) -> EditOutcome:
        """Carry out `order` by a route below ``/v1/images``; see :class:`giornata_tools.clients.edits.EditClient`."""
        try:
            with _told_as_refused(self._url):
                return await self._streamed(order, tell)
        except asyncio.CancelledError:
            raise EditStopped(await self._cancelled()) from None

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON object of ``GET path``; a status of the gateway's own, such as 503, is no error here.

        Raises:
            Refused: no gateway answers there.
        """
        with _told_as_refused(self._url):
            async with self._session.get(self._url + path) as answer:
                return answer.status, _object(await answer.read())

    async def read(self, path: str) -> dict[str, Any]:
        """JSON object of ``GET path``.

        Raises:
            Refused: the gateway refuses, or does not answer.
        """
        return await self._asked("GET", path)

    async def send_picture(self, path: str, image: bytes, fields: Mapping[str, str]) -> dict[str, Any]:
        """JSON object of ``POST path`` with a form of `fields` and an image; raises as :meth:`read`."""
        form = aiohttp.FormData(fields)
        form.add_field("image", image, filename="image", content_type="application/octet-stream")
        return await self._asked("POST", path, form)

    async def send_file(self, path: str, file: Path, fields: Mapping[str, str]) -> dict[str, Any]:
        """JSON object of ``POST path`` with a form of `fields` and the `file`, which is read as it is sent.

        It raises as :meth:`read`.
        """
        form = aiohttp.FormData(fields, default_to_multipart=True)
        with file.open("rb") as data:
            form.add_field("file", data, filename=file.name)
            return await self._asked("POST", path, form)

    async def delete(self, path: str) -> dict[str, Any]:
        """JSON object of ``DELETE path``; raises as :meth:`read`."""
        return await self._asked("DELETE", path)

    async def put(self, path: str) -> dict[str, Any]:
        """JSON object of ``PUT path`` without a body; raises as :meth:`read`."""
        return await self._asked("PUT", path)

    async def _asked(self, method: str, path: str, form: aiohttp.FormData | None = None) -> dict[str, Any]:
        with _told_as_refused(self._url):
            async with self._session.request(method, self._url + path, data=form) as answer:
                await _check(answer)
                return _object(await answer.read())

    async def follow(self, path: str) -> AsyncIterator[dict[str, Any]]:
        """Data of the events of ``GET path``, until the gateway ends the stream.

        Raises:
            Refused: the gateway refuses, or stops answering.
        """
        headers = {"Accept": "text/event-stream"}
        with _told_as_refused(self._url):
            async with self._session.get(self._url + path, headers=headers) as answer:
                await _check(answer)
                async for event in events(answer.content):
                    yield _object(event.data)

    def _posted(self, order: EditCall) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        images = f"{self._url}/v1/images"
        if order.image is None:
            asked = {**order.parameters, **STREAM}
            if order.references:
                asked[REFERENCE] = [_written(picture) for picture in order.references]
            asked |= named_control_images([_written(picture) for picture in order.control_images])
            return self._session.post(f"{images}/generations", json=asked)
        return self._session.post(f"{images}/edits", data=_form(order, order.image))

    async def _streamed(self, order: EditCall, tell: Tell) -> EditOutcome:
        pictures: list[PaintedPicture] = []
        failures: list[PictureFailure] = []
        size = ""
        async with self._posted(order) as answer:
            await _check(answer)
            async for frame in events(answer.content):
                match read_event(frame.kind, frame.data):
                    case EditProgress() as progress:
                        self._job_id = progress.job_id
                        tell(progress)
                    case PartialImage() as partial:
                        tell(partial)
                    case CompletedData() as completed:
                        size = completed.size
                        pictures.append(completed)
                    case FailedEvent(index=None) as failed:
                        raise RequestRefused(failed.body())
                    case FailedEvent(index=index) as failed:
                        failures.append(
                            PictureFailure(escape_controls(failed.error.message), failed.error.code, index)
                        )
        if not pictures or self._job_id is None:
            raise RequestRefused(
                ErrorBody(code="failed", message="The gateway ended the stream without a picture.")
            )
        return EditOutcome(self._job_id, size, tuple(pictures), tuple(failures))

    async def _cancelled(self) -> str:
        """Cancel the job, if there is one, and tell what became of it. Closing the stream has already asked for it."""
        if self._job_id is None:
            return "Stopped before the edit was accepted."
        job = f"job {self._job_id}"
        try:
            with _told_as_refused(self._url):
                async with asyncio.timeout(CANCEL_S):
                    state = (await self.delete(f"/v1/jobs/{self._job_id}")).get("state")
        except RequestRefused:
            return f"Stopped waiting. The gateway has not confirmed that {job} is cancelled."
        if state in {"completed", "failed"}:
            return f"Stopped waiting; {job} had already ended: {state}."
        return f"Cancelled {job}."


@asynccontextmanager
async def open_http(url: str, api_key: str | None) -> AsyncIterator[HttpClient]:
    """The gateway at `url` while inside; nothing is connected before it is asked something."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        yield HttpClient(session, url)


@contextmanager
def _told_as_refused(url: str) -> Iterator[None]:
    """A connection that fails, and an answer that is not a gateway's, become :class:`RequestRefused`."""
    place = without_password(url)
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        message = f"No gateway answers at {place}. Start one with `giornata up`, or name one with --url."
        raise ServerUnreachable(ErrorBody(code="service_unavailable", message=message)) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        message = f"The gateway at {place} stopped answering: {str(error) or type(error).__name__}."
        raise RequestRefused(ErrorBody(code="service_unavailable", message=message)) from error
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in detail["loc"])
        message = f"What answers at {place} is not a gateway of this version: {where or 'its body'}: {detail['msg']}."
        raise RequestRefused(ErrorBody(code="schema_mismatch", message=message)) from error


def _form(order: EditCall, image: bytes) -> aiohttp.FormData:
    form = aiohttp.FormData()
    form.add_field("image", image, filename="image", content_type="application/octet-stream")
    if order.mask is not None:
        form.add_field("mask", order.mask, filename="mask", content_type="application/octet-stream")
    for picture in order.references:
        form.add_field(REFERENCE, picture, filename=REFERENCE, content_type="application/octet-stream")
    for name, picture in named_control_images(order.control_images).items():
        form.add_field(name, picture, filename=name, content_type="application/octet-stream")
    for name, value in {**order.parameters, **STREAM}.items():
        form.add_field(name, _as_text(value))
    return form


def _written(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def _as_text(value: object) -> str:
    """A field of a form: lists are JSON."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, list | tuple) else str(value)


async def _check(answer: aiohttp.ClientResponse) -> None:
    """Raises the refusal that an answer is, if it is one."""
    if not answer.ok:
        failed = FailedEvent.model_validate_json(await answer.read())
        raise RequestRefused(failed.body(answer.headers.get("Retry-After", "")))


# Uploads of LoRAs over the REST door.


WAITED_MS: Final = 60_000
"""How long the gateway holds a question for the end of a validation."""


async def uploaded(gateway: HttpClient, file: Path, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return what ``/v1/loras`` tells of `file` once it is ready or refused; `fields` may be `model` and `name`.

    Raises:
        Refused: the gateway refuses the file at once, or does not answer.
    """
    told = await gateway.send_file("/v1/loras", file, fields)
    while told["state"] == "validating":
        told = await gateway.read(f"/v1/loras/{told['id']}?wait_ms={WAITED_MS}")
    return told
