"""Bodies of HTTP requests, read within limits of size and time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.http_exceptions import BadHttpMessage

from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.codec import JsonLimits
from giornata.wire.codec import read_json as read_value
from giornata.wire.errors import BadRequest, InvalidField, PayloadTooLarge, RequestTimeout
from giornata.wire.requests import REFERENCE, check_count
from giornata_gateway.admission import ByteReservation
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http.responses import GATEWAY
from giornata_gateway.rules.adapters import in_order
from giornata_gateway.rules.forms import FILES, RequestBody, check_filled, once_each


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
LATE: Final = "The body of the request was not received in time."


async def read_upload(request: web.Request, grow: ByteReservation) -> RequestBody:
    """Fields and pictures of a request; `grow` is told of every piece before the next one is read.

    Raises:
        TooManyRequests: `grow` says so.
        RequestTimeout: the client is too slow in sending it.
        BadRequest: it is not multipart/form-data, not well-formed, or ends early.
        PayloadTooLarge: names the limit that it exceeds.
        InvalidField: a file is given twice, or under a name that holds none.
    """
    config = request.app[GATEWAY].config
    if request.content_type != "multipart/form-data":
        sent = request.headers.get("Content-Type", "no Content-Type")
        raise BadRequest("The body is not a form with files.", received=sent, accepted="multipart/form-data")
    check_plain(request)
    if (request.content_length or 0) > config.max_request_bytes:
        raise too_large("The request", config.max_request_bytes)
    try:
        async with grow.receiving(), asyncio.timeout(config.receive_s) as limit:
            grow(BUFFER_BYTES)
            return await _UploadReader(config, grow, limit).read(multipart(request))
    except TimeoutError as error:
        raise too_slow(config) from error
    except MALFORMED as error:
        raise malformed(str(error)) from error


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
    if request.content_type != "application/json":
        sent = request.headers.get("Content-Type", "no Content-Type")
        raise BadRequest("The body is not a JSON object.", received=sent, accepted="application/json")
    check_plain(request)
    data, limits = bytearray(), JsonLimits()
    try:
        async with grow.receiving(), asyncio.timeout(config.receive_s) as until:
            grow(BUFFER_BYTES)
            pace = ReceiveTimeout(config, until)
            async for chunk in request.content.iter_any():
                pace.come(len(chunk))
                grow(JSON_COPIES * len(chunk))
                if len(data) + len(chunk) > limit_bytes:
                    raise too_large("The request", limit_bytes)
                limits.take(chunk)
                data += chunk
    except TimeoutError as error:
        raise too_slow(config) from error
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


def too_slow(config: GatewayConfig) -> RequestTimeout:
    """The refusal of a body that comes too slowly."""
    accepted = f"{config.receive_s:g} s, and at least {config.receive_bytes_per_s} bytes a second"
    return RequestTimeout(LATE, accepted=accepted)


def check_plain(request: web.Request) -> None:
    """Raise BadRequest where the body of a request is compressed."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise BadRequest("The body is compressed.", received=encoding, accepted="no Content-Encoding")


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


def multipart(request: web.Request) -> MultipartReader:
    """The reader of a multipart body, which raises one of :data:`MALFORMED` where that has too many lines."""
    lines = PART_LINES * (1 + request.app[GATEWAY].config.max_parts)
    return MultipartReader(request.headers, cast("StreamReader", _CountedLines(request.content, lines)))


class _UploadReader:
    """One request being read."""

    def __init__(self, config: GatewayConfig, grow: ByteReservation, limit: asyncio.Timeout) -> None:
        self._config, self._grow, self._pace = config, grow, ReceiveTimeout(config, limit)
        self._fields: list[tuple[str, str]] = []
        self._files: dict[str, bytes] = {}
        self._references: list[bytes] = []

    async def read(self, reader: MultipartReader) -> RequestBody:
        parts = 0
        while (part := await reader.next()) is not None:
            parts += 1
            if parts > self._config.max_parts:
                raise PayloadTooLarge(
                    "The request has too many parts.", accepted=f"{self._config.max_parts} parts"
                )
            if not isinstance(part, BodyPartReader) or not part.name:
                raise malformed("a part without a name")
            if len(part.name) > NAME_CHARACTERS:
                raise malformed(f"a part whose name has {len(part.name)} characters")
            await self._take(part, part.name)
        pictures = self._files.get("image"), self._files.get("mask"), tuple(self._references)
        return RequestBody(tuple(self._fields), *pictures, in_order(self._files))

    async def _take(self, part: BodyPartReader, name: str) -> None:
        file = FILES.get(name)
        if file is None and part.filename is not None:
            raise InvalidField(
                "This field takes no file.",
                field=name,
                received="a file",
                accepted=f"files: image, mask, {REFERENCE}, {', '.join(CONTROL_IMAGES)}",
            )
        if file is None:
            data = await self._bytes(part, self._config.max_field_bytes, name)
            try:
                self._fields.append((name, data.decode()))
            except UnicodeDecodeError as error:
                raise InvalidField(
                    "A field is not UTF-8.", field=name, received=f"{len(data)} bytes"
                ) from error
            return
        further = file == "image" and file in self._files
        data = await self._bytes(part, self._config.max_file_bytes, REFERENCE if further else file)
        if not data and not part.filename:
            return  # how a form writes that there is none
        check_filled(data, REFERENCE if further else file)
        if further or file == REFERENCE:
            self._references.append(data)
            check_count(len(self._references))
        elif file in self._files:
            raise InvalidField(
                f"A request takes one {file}.", field=file, received="several", accepted="one file"
            )
        else:
            self._files[file] = data

    async def _bytes(self, part: BodyPartReader, limit: int, name: str) -> bytes:
        data = bytearray()
        while chunk := await part.read_chunk(65536):
            self._grow(len(chunk))
            data += chunk
            self._pace.come(len(chunk))
            if len(data) > limit:
                raise too_large(f"The part {name}", limit, name)
            if self._pace.total_bytes > self._config.max_request_bytes:
                raise too_large("The request", self._config.max_request_bytes)
        return bytes(data)


def too_large(what: str, limit: int, field: str | None = None) -> PayloadTooLarge:
    """The error of what has more than `limit` bytes."""
    return PayloadTooLarge(f"{what} is too large.", field=field, accepted=f"at most {limit} bytes")


def malformed(received: str) -> BadRequest:
    """The error of a body that is no multipart form."""
    return BadRequest(
        "The multipart body is malformed or ends early.", received=received, accepted="multipart/form-data"
    )
