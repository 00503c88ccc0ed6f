"""Bodies of HTTP requests, read within limits of size and time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
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
from giornata_gateway.http.responses import GATEWAY, JSON
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
