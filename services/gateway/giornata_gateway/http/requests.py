"""The reading of an HTTP request: its headers, its body within limits of size and time, and what it asks for."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, Final, cast
from urllib.parse import urlsplit

import aiohttp
from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.http_exceptions import BadHttpMessage

from giornata.deadlines import Deadline
from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.codec import JsonLimits
from giornata.wire.codec import read_json as read_value
from giornata.wire.errors import BadRequest, InvalidField, PayloadTooLarge, RequestTimeout
from giornata.wire.jobs import Priority
from giornata.wire.models import Task
from giornata.wire.requests import REFERENCE, EditParameters, asked, check_count
from giornata_gateway.admission import ByteReservation
from giornata_gateway.config import GatewayConfig, hosts_in, networks_in
from giornata_gateway.http.responses import GATEWAY, JSON, TENANT, ignore
from giornata_gateway.jobs.preparation import HEADER, EditOrder, read_key
from giornata_gateway.jobs.submission import AdmittedJob
from giornata_gateway.rules.forms import (
    FILES,
    EditFields,
    EditForm,
    F,
    GenerationJobForm,
    JobForm,
    NamedSource,
    PictureSource,
    RequestBody,
    WrittenPictures,
    check_filled,
    check_source,
    decoded,
    in_order,
    once_each,
    picture,
    read_form,
)
from giornata_gateway.webhooks import check_url, guarded_session, names_of, told


class ReceiveTimeout:
    """Moves a time limit with what has come, up to where it is set."""

    def __init__(self, config: GatewayConfig, limit: asyncio.Timeout) -> None:
        self._config, self._limit = config, limit
        self._latest_s = limit.when() or math.inf
        self._first_s = asyncio.get_running_loop().time() + config.head_s
        self.total_bytes = 0
        """What has come."""
        self.come(0)

    def come(self, size_bytes: int) -> None:
        """Allow the time that what has come takes at the slowest pace."""
        self.total_bytes += size_bytes
        paced_s = self._first_s + self.total_bytes / self._config.receive_bytes_per_s
        self._limit.reschedule(min(self._latest_s, paced_s))

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Time that is not the client's: it waits for another service meanwhile."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._limit.reschedule(None if math.isinf(self._latest_s) else self._latest_s)
        yield
        self._first_s += loop.time() - began_s
        self.come(0)


BUFFER_BYTES: Final = 128 << 10
"""What a connection holds before its request is read. A request that never comes counts too."""
NAME_CHARACTERS: Final = 64
"""No field has a longer name."""
JSON_FIELDS: Final = 8
"""The texts of a JSON body, its pictures aside, are no larger than so many fields of a form may be."""
PICTURES: Final = frozenset({REFERENCE, *CONTROL_IMAGES})
"""Fields of a JSON body that hold pictures."""
JSON_BYTES: Final = 1 << 20
"""Size of a JSON body without pictures."""
PART_LINES: Final = 8
"""Lines of a multipart body, by part, beside what the parts hold: its boundary, its headers, and what ends them."""
JSON_COPIES: Final = 3
"""A JSON body is held as it came, as text, and as its pictures."""
MALFORMED: Final = (ValueError, AssertionError, RuntimeError, BadHttpMessage, web.RequestPayloadError)
"""What aiohttp raises where a multipart body is not well-formed."""
CHUNK_BYTES: Final = 64 << 10
FORM: Final = "multipart/form-data"
LATE: Final = "The body of the request was not received in time."


class _CountedLines:
    """A body of which few lines are read; what parts hold is not read by lines."""

    def __init__(self, content: StreamReader, lines: int) -> None:
        self._content, self._left = content, lines

    async def readline(self, **options: Any) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many lines before, between or in the heads of parts")
        return await self._content.readline(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)


@contextmanager
def well_formed() -> Iterator[None]:
    """Read of a multipart body while inside; BadRequest where it is not one."""
    try:
        yield
    except MALFORMED as error:
        raise malformed(str(error)) from error


class FormReader:
    """A multipart form that is read part by part, within limits of time, number and size."""

    def __init__(self, request: web.Request, pace: ReceiveTimeout, grow: Callable[[int], None]) -> None:
        """`grow` is told of every piece of a part that is kept before the next one is read."""
        self.config, self.pace, self._grow = request.app[GATEWAY].config, pace, grow
        self.most_bytes = math.inf
        """Of the whole form."""
        self._parts = 0
        lines = _CountedLines(request.content, PART_LINES * (1 + self.config.max_parts))
        with well_formed():
            self._reader = MultipartReader(request.headers, cast("StreamReader", lines))

    async def part(self) -> tuple[str, BodyPartReader] | None:
        """The next part and its name; None at the end."""
        with well_formed():
            part = await self._reader.next()
        if part is None:
            return None
        self._parts += 1
        if self._parts > self.config.max_parts:
            raise PayloadTooLarge(
                "The request has too many parts.", accepted=f"{self.config.max_parts} parts"
            )
        if not isinstance(part, BodyPartReader) or not part.name:
            raise malformed("a part without a name")
        if len(part.name) > NAME_CHARACTERS:
            raise malformed(f"a part whose name has {len(part.name)} characters")
        return part.name, part

    async def chunk(self, part: BodyPartReader) -> bytes:
        """The next piece of a part; empty at its end."""
        with well_formed():
            chunk = await part.read_chunk(CHUNK_BYTES)
        self.pace.come(len(chunk))
        return bytes(chunk)

    async def whole(self, part: BodyPartReader, limit: int, name: str) -> bytes:
        """All of a part; PayloadTooLarge where it or the form has more bytes than allowed."""
        data = bytearray()
        while chunk := await self.chunk(part):
            self._grow(len(chunk))
            data += chunk
            if len(data) > limit:
                raise too_large(f"The part {name}", limit, name)
            if self.pace.total_bytes > self.most_bytes:
                raise too_large("The request", self.config.max_request_bytes)
        return bytes(data)

    async def text(self, part: BodyPartReader, name: str) -> str:
        """A field that is no file; InvalidField where it is not UTF-8."""
        data = await self.whole(part, self.config.max_field_bytes, name)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise InvalidField("A field is not UTF-8.", field=name, received=f"{len(data)} bytes") from error


@asynccontextmanager
async def receiving(
    request: web.Request, kind: str, body: str, longest_s: float
) -> AsyncIterator[ReceiveTimeout]:
    """Receive a body of a content type, `kind`, while inside, for at most `longest_s`; `body` is what it is not else.

    Raises:
        BadRequest: it is of another kind, or compressed.
        RequestTimeout: the client is too slow in sending it.
    """
    if request.content_type != kind:
        sent = request.headers.get("Content-Type", "no Content-Type")
        raise BadRequest(f"The body is not {body}.", received=sent, accepted=kind)
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise BadRequest("The body is compressed.", received=encoding, accepted="no Content-Encoding")
    config = request.app[GATEWAY].config
    try:
        async with asyncio.timeout(longest_s) as limit:
            yield ReceiveTimeout(config, limit)
    except TimeoutError as error:
        accepted = f"{longest_s:g} s, and at least {config.receive_bytes_per_s} bytes a second"
        raise RequestTimeout(LATE, accepted=accepted) from error


async def read_upload(request: web.Request, grow: ByteReservation) -> RequestBody:
    """Fields and pictures of a form; `grow` is told of every piece before the next one is read.

    Raises:
        TooManyRequests: `grow` says so.
        RequestTimeout: the client is too slow in sending it.
        BadRequest: it is not multipart/form-data, not well-formed, or ends early.
        PayloadTooLarge: names the limit that it exceeds.
        InvalidField: a file is given twice, or under a name that holds none.
    """
    config = request.app[GATEWAY].config
    fields: list[tuple[str, str]] = []
    files: dict[str, bytes] = {}
    references: list[bytes] = []
    async with grow.receiving(), receiving(request, FORM, "a form with files", config.receive_s) as pace:
        if (request.content_length or 0) > config.max_request_bytes:
            raise too_large("The request", config.max_request_bytes)
        grow(BUFFER_BYTES)
        form = FormReader(request, pace, grow)
        form.most_bytes = config.max_request_bytes
        while (found := await form.part()) is not None:
            name, part = found
            file = FILES.get(name)
            if file is not None:
                await _take_file(form, part, file, files, references)
            elif part.filename is None:
                fields.append((name, await form.text(part, name)))
            else:
                accepted = f"files: image, mask, {REFERENCE}, {', '.join(CONTROL_IMAGES)}"
                why = "This field takes no file."
                raise InvalidField(why, field=name, received="a file", accepted=accepted)
    return RequestBody(
        tuple(fields), files.get("image"), files.get("mask"), tuple(references), in_order(files)
    )


async def _take_file(
    form: FormReader, part: BodyPartReader, file: str, files: dict[str, bytes], references: list[bytes]
) -> None:
    if file == "image" and file in files:
        file = REFERENCE
    data = await form.whole(part, form.config.max_file_bytes, file)
    if not data and not part.filename:
        return  # how a form writes that there is none
    check_filled(data, file)
    if file == REFERENCE:
        references.append(data)
        check_count(len(references))
    elif file in files:
        raise InvalidField(
            f"A request takes one {file}.", field=file, received="several", accepted="one file"
        )
    else:
        files[file] = data


async def read_json(
    request: web.Request, grow: ByteReservation, pictures: Collection[str] = PICTURES
) -> dict[str, object]:
    """The fields of a JSON object, but for those that are null: OpenAI's clients may send null for a default.

    `pictures` are the fields that may be large.

    Raises:
        TooManyRequests, RequestTimeout, PayloadTooLarge: as :func:`read_upload`.
        BadRequest: it is not application/json, or no JSON object.
        InvalidField: a field is given twice.
    """
    config = request.app[GATEWAY].config
    limit_bytes = config.max_request_bytes if pictures else min(JSON_BYTES, config.max_request_bytes)
    data, limits = bytearray(), JsonLimits()
    try:
        async with grow.receiving(), receiving(request, JSON, "a JSON object", config.receive_s) as pace:
            grow(BUFFER_BYTES)
            async for chunk in request.content.iter_any():
                pace.come(len(chunk))
                grow(JSON_COPIES * len(chunk))
                if len(data) + len(chunk) > limit_bytes:
                    raise too_large("The request", limit_bytes)
                limits.take(chunk)
                data += chunk
    except web.RequestPayloadError as error:
        raise BadRequest("The body ends early.", received=str(error), accepted="a JSON object") from error
    try:
        told = await asyncio.to_thread(lambda: read_value(data.decode(), once_each))
    except (ValueError, RecursionError) as error:
        raise BadRequest(
            "The body is not JSON.", received=str(error)[:200], accepted="a JSON object"
        ) from error
    if not isinstance(told, dict):
        raise BadRequest("The body is not a JSON object.", received=type(told).__name__, accepted="an object")
    longest = max(map(len, told), default=0)
    if longest > NAME_CHARACTERS:
        received, accepted = f"{longest} characters", f"at most {NAME_CHARACTERS}"
        raise BadRequest("No field has so long a name.", received=received, accepted=accepted)
    written = sum(
        len(value) for name, value in told.items() if name not in pictures and isinstance(value, str)
    )
    if written > (limit := JSON_FIELDS * config.max_field_bytes):
        raise too_large("The request without its pictures", limit)
    return {name: value for name, value in told.items() if value is not None}


def too_large(what: str, limit: int, field: str | None = None) -> PayloadTooLarge:
    """The error of what has more than `limit` bytes."""
    return PayloadTooLarge(f"{what} is too large.", field=field, accepted=f"at most {limit} bytes")


def malformed(received: str) -> BadRequest:
    """The error of a body that is no multipart form."""
    return BadRequest(
        "The multipart body is malformed or ends early.", received=received, accepted="multipart/form-data"
    )


FETCHED_AT_ONCE: Final = 4
"""Pictures of one request."""
FETCH_S: Final = 30.0
"""Until all pictures of a request are there, each within :data:`~giornata_gateway.webhooks.ATTEMPT_S`."""


def check_sources(config: GatewayConfig, sources: Sequence[NamedSource]) -> bool:
    """Return whether some picture has to be fetched; InvalidField where one has no URL, or one that is not allowed."""
    hosts, networks = hosts_in(config.image_hosts), networks_in(config.webhook_networks)
    accepted = ", or a URL at ".join(["image_url with a data URL", *filter(None, [", ".join(sorted(hosts))])])
    for field, source in sources:
        url, received = source.image_url or "", source.file_id or source.image_url or "no image_url"
        if source.file_id is not None:
            why = "There are no files of OpenAI's Files API here."
            raise InvalidField(why, field=field, received=received, accepted=accepted)
        if _is_data(source):
            continue
        if hosts.isdisjoint(names_of(url)):
            why = "No picture is fetched from there."
            raise InvalidField(why, field=field, received=received, accepted=accepted)
        check_url(url, networks, field, "A picture cannot be fetched from there.")
    return not all(_is_data(source) for _, source in sources)


async def read_sources(
    config: GatewayConfig, grow: ByteReservation, sources: Sequence[NamedSource]
) -> list[bytes]:
    """The files of pictures that are allowed, in their order; `grow` counts the bytes of those that are fetched.

    Raises:
        InvalidField: a picture does not come whole, or not all come in time.
        PayloadTooLarge: one is larger than a file of a form may be.
    """
    slots = asyncio.Semaphore(FETCHED_AT_ONCE)

    async def read(field: str, source: PictureSource) -> bytes:
        url = source.image_url or ""
        if _is_data(source):
            return await asyncio.to_thread(picture, url, field)
        async with slots:
            return await _fetched(config, grow, url, field)

    try:
        async with grow.receiving(), asyncio.timeout(FETCH_S), asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(read(*source)) for source in sources]
    except TimeoutError as error:
        why, received = f"The pictures could not be fetched in {FETCH_S:g} s.", f"{len(sources)} pictures"
        raise InvalidField(why, field=sources[0][0], received=received) from error
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return [one.result() for one in reading]


async def _fetched(config: GatewayConfig, grow: ByteReservation, url: str, field: str) -> bytes:
    networks, data = networks_in(config.webhook_networks), bytearray()
    try:
        async with (
            guarded_session(networks, plain=urlsplit(url).scheme == "http") as http,
            http.get(url, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise _not_fetched(f"status {answer.status}", url, field)
            async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                if len(data) + len(chunk) > config.max_file_bytes:
                    raise too_large(f"The picture at {url}", config.max_file_bytes, field)
                grow(len(chunk))
                data += chunk
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise _not_fetched(told(error), url, field) from error
    check_filled(data, field)
    return bytes(data)


def _is_data(source: PictureSource) -> bool:
    return (source.image_url or "").startswith("data:")


def _not_fetched(why: str, url: str, field: str) -> InvalidField:
    return InvalidField(f"A picture could not be fetched: {why}.", field=field, received=url)


WRITTEN_PICTURES: Final = PICTURES | WrittenPictures.model_fields.keys()
LAST_SEQUENCE: Final = 10**18 - 1
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""The header of W3C's Trace Context."""


async def receive(request: web.Request, kind: type[F], held: ExitStack) -> tuple[F, AdmittedJob]:
    """The form of a request, and what it asks for, admitted; on return the pictures are stored and not in memory.

    A repetition whose pictures are fetched counts as the tenant's: what they are tells that it is one.

    `held` keeps the job's places until it is closed.
    """
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    key = read_key(request.headers.getall(HEADER, ()), HEADER)
    # a repetition may be answered for nothing, which only its body tells
    with gateway.receiving(tenant, counted=key is None) as grow:
        form, upload = await _read(request, kind, grow)
        order, stay = order_in(request, form.parameters(), form.task, upload), None
        if isinstance(form, EditFields):
            order = replace(order, template_id=form.template_id)
        if isinstance(form, (JobForm, GenerationJobForm)):
            deadline = Deadline.after_ms(gateway.config.job_budget_s * 1000)
            order = replace(order, priority=form.priority, deadline=deadline)
        ignore(request, form.ignored)
        if upload.sources:
            if check_sources(
                gateway.config, upload.sources
            ):  # no more is fetched than the tenant may ask for
                order = await order.identified(key)
                stay = gateway.stay_of(order, held, always=True)
            pictures = await read_sources(gateway.config, grow, upload.sources)
            mask = pictures.pop(0) if upload.sources[0][0] == "mask" else None
            image = pictures.pop(0) if pictures else None
            order = replace(order, image=image, mask=mask, references=(*pictures, *order.references))
        return form, await gateway.admit(order, key, held, stay)


async def _read(request: web.Request, kind: type[F], grow: ByteReservation) -> tuple[F, RequestBody]:
    """The form of a request, and its pictures; of an edit in JSON some are still where it says."""
    accept, edits = request.headers.get("Accept", ""), kind is EditForm
    if issubclass(kind, EditFields) and not (edits and request.content_type == JSON):
        upload = await read_upload(request, grow)
        if not any(name == "template_id" for name, _ in upload.fields):
            check_source(upload.image, None)
        posted = read_form(kind, upload.fields, accept)
        check_source(upload.image, posted.template_id)
        return posted, upload
    fields = await read_json(request, grow, WRITTEN_PICTURES if edits else PICTURES)
    given = asked(WrittenPictures, _taken(fields, WrittenPictures.model_fields if edits else ()))
    references, controls = fields.pop(REFERENCE, []), _taken(fields, CONTROL_IMAGES)
    form = read_form(kind, fields.items(), accept)
    more, controlled = await asyncio.to_thread(_pictures, references, controls)
    if isinstance(form, EditFields):
        check_source(given.images or None, form.template_id)
    check_count(len(given.images[1:]) + len(more))
    sources = [("mask", given.mask)] if given.mask else []
    sources += [("images", source) for source in given.images]
    return form, RequestBody((), None, None, more, controlled, tuple(sources))


def _taken(fields: dict[str, object], names: Iterable[str]) -> dict[str, object]:
    """Take the fields of these names out of `fields`."""
    return {name: fields.pop(name) for name in names if name in fields}


def _pictures(
    references: object, controls: Mapping[str, object]
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """References and control images of a JSON body."""
    return decoded(references), in_order({name: picture(text, name) for name, text in controls.items()})


def order_in(request: web.Request, parameters: EditParameters, task: Task, upload: RequestBody) -> EditOrder:
    """What a request asks for whose client waits for the answer."""
    traceparent = request.headers.get("traceparent", "")
    return EditOrder(
        parameters=parameters,
        image=upload.image,
        mask=upload.mask,
        references=upload.references,
        control_images=upload.control_images,
        tenant=request[TENANT],
        priority=Priority.INTERACTIVE,
        deadline=Deadline.after_ms(request.app[GATEWAY].config.budget_s * 1000),
        task=task,
        traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else None,
    )


def number_of(values: Mapping[str, str], name: str, default: int, most: int, least: int = 0) -> int:
    """A whole number of a query or of headers; InvalidField where it is none, or beyond the limits."""
    text = values.get(name, str(default))
    digits = max(9, len(str(most)))  # Python reads no more than a few thousand
    if len(text) > digits or not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise InvalidField(
            "The number is not accepted.", field=name, received=text, accepted=f"{least} to {most}"
        )
    return int(text)


def last_event_id(headers: Mapping[str, str]) -> int:
    """Sequence number in the ``Last-Event-ID`` header; 0 without one. It raises as :func:`number_of`."""
    return number_of(headers, "Last-Event-ID", 0, LAST_SEQUENCE) if headers.get("Last-Event-ID") else 0


def check_query(query: Iterable[str], *accepted: str) -> None:
    """BadRequest where a query names something else than is accepted."""
    unknown = set(query) - set(accepted)
    if unknown:
        raise BadRequest(
            "Unknown query parameter.", received=", ".join(sorted(unknown)), accepted=", ".join(accepted)
        )
