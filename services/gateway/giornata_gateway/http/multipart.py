"""Reading a multipart request part by part, within limits: nothing larger than allowed is ever held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from giornata.wire.errors import BadRequest, InvalidField, PayloadTooLarge
from giornata_gateway.intake.memory import Grow
from giornata_gateway.intake.rules.forms import FILES, Upload

BUFFER_BYTES: Final = 128 << 10
"""What a connection holds before its request is read; so a request that never comes counts too."""
NAME_CHARACTERS: Final = 64
"""No field has a longer name."""


@dataclass(frozen=True)
class Limits:
    """What a request may weigh."""

    file_bytes: int
    request_bytes: int
    parts: int
    field_bytes: int


async def read_upload(request: web.Request, limits: Limits, grow: Grow) -> Upload:
    """Fields and pictures of a request.

    Args:
        request: not read yet.
        limits: what it may weigh.
        grow: is told of every piece before the next one is read.

    Raises:
        TooManyRequests: `grow` says so.
        BadRequest: it is not multipart/form-data, not well-formed, or ends early.
        PayloadTooLarge: names the limit that it exceeds.
        InvalidField: a file is given twice, or under a name that holds none.
    """
    if request.content_type != "multipart/form-data":
        sent = request.headers.get("Content-Type", "no Content-Type")
        raise BadRequest("The body is not a form with files.", received=sent, accepted="multipart/form-data")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise BadRequest("The body is compressed.", received=encoding, accepted="no Content-Encoding")
    if (request.content_length or 0) > limits.request_bytes:
        raise _too_large("The request", limits.request_bytes)
    grow(BUFFER_BYTES)
    try:
        return await _Reading(limits, grow).read(await request.multipart())
    except (
        ValueError,
        AssertionError,
        RuntimeError,
        BadHttpMessage,
        LineTooLong,
        web.RequestPayloadError,
    ) as error:
        raise _malformed(str(error)) from error


class _Reading:
    """One request being read."""

    def __init__(self, limits: Limits, grow: Grow) -> None:
        self._limits = limits
        self._grow = grow
        self._total = 0
        self._fields: list[tuple[str, str]] = []
        self._files: dict[str, bytes] = {}

    async def read(self, reader: MultipartReader) -> Upload:
        parts = 0
        while (part := await reader.next()) is not None:
            parts += 1
            if parts > self._limits.parts:
                raise PayloadTooLarge(
                    "The request has too many parts.", accepted=f"{self._limits.parts} parts"
                )
            if not isinstance(part, BodyPartReader) or not part.name:
                raise _malformed("a part without a name")
            if len(part.name) > NAME_CHARACTERS:
                raise _malformed(f"a part whose name has {len(part.name)} characters")
            await self._take(part, part.name)
        return Upload(tuple(self._fields), self._files.get("image"), self._files.get("mask"))

    async def _take(self, part: BodyPartReader, name: str) -> None:
        file = FILES.get(name)
        if file is None and part.filename is not None:
            raise InvalidField(
                "This field takes no file.", field=name, received="a file", accepted="files: image, mask"
            )
        if file is None:
            data = await self._bytes(part, self._limits.field_bytes, name)
            try:
                self._fields.append((name, data.decode()))
            except UnicodeDecodeError as error:
                raise InvalidField(
                    "A field is not UTF-8.", field=name, received=f"{len(data)} bytes"
                ) from error
            return
        if file in self._files:
            raise InvalidField(
                f"An edit takes exactly one {file}.", field=file, received="several", accepted="one file"
            )
        data = await self._bytes(part, self._limits.file_bytes, file)
        if not data:
            raise InvalidField(
                "The file is empty.", field=file, received="0 bytes", accepted="one PNG, JPEG or WebP file"
            )
        self._files[file] = data

    async def _bytes(self, part: BodyPartReader, limit: int, name: str) -> bytes:
        data = bytearray()
        while chunk := await part.read_chunk(65536):
            self._grow(len(chunk))
            data += chunk
            self._total += len(chunk)
            if len(data) > limit:
                raise _too_large(f"The part {name}", limit, name)
            if self._total > self._limits.request_bytes:
                raise _too_large("The request", self._limits.request_bytes)
        return bytes(data)


def _too_large(what: str, limit: int, field: str | None = None) -> PayloadTooLarge:
    return PayloadTooLarge(f"{what} is too large.", field=field, accepted=f"at most {limit} bytes")


def _malformed(received: str) -> BadRequest:
    return BadRequest(
        "The multipart body is malformed or ends early.", received=received, accepted="multipart/form-data"
    )
