"""Reads a multipart request part by part, within limits: nothing larger than allowed is ever held."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from giornata.wire.errors import BadRequest, DeadlineExceeded, InvalidField, PayloadTooLarge
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http.errors import GATEWAY
from giornata_gateway.intake.memory import Grow
from giornata_gateway.intake.rules.forms import FILES, Upload, check_filled

BUFFER_BYTES: Final = 128 << 10
"""What a connection holds before its request is read. A request that never comes counts too."""
NAME_CHARACTERS: Final = 64
"""No field has a longer name."""
MALFORMED: Final = (
    ValueError,
    AssertionError,
    RuntimeError,
    BadHttpMessage,
    LineTooLong,
    web.RequestPayloadError,
)
"""What aiohttp raises where a multipart body is not well-formed."""


async def read_upload(request: web.Request, grow: Grow) -> Upload:
    """Fields and pictures of a request; `grow` is told of every piece before the next one is read.

    Raises:
        TooManyRequests: `grow` says so.
        DeadlineExceeded: the client is too slow in sending it.
        BadRequest: it is not multipart/form-data, not well-formed, or ends early.
        PayloadTooLarge: names the limit that it exceeds.
        InvalidField: a file is given twice, or under a name that holds none.
    """
    config = request.app[GATEWAY].config
    if request.content_type != "multipart/form-data":
        sent = request.headers.get("Content-Type", "no Content-Type")
        raise BadRequest("The body is not a form with files.", received=sent, accepted="multipart/form-data")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise BadRequest("The body is compressed.", received=encoding, accepted="no Content-Encoding")
    if (request.content_length or 0) > config.max_request_bytes:
        raise _too_large("The request", config.max_request_bytes)
    grow(BUFFER_BYTES)
    try:
        async with asyncio.timeout(config.receive_s):
            return await _Reading(config, grow).read(await request.multipart())
    except TimeoutError as error:
        raise DeadlineExceeded("The request was not received in time.") from error
    except MALFORMED as error:
        raise _malformed(str(error)) from error


class _Reading:
    """One request being read."""

    def __init__(self, config: GatewayConfig, grow: Grow) -> None:
        self._config = config
        self._grow = grow
        self._total = 0
        self._fields: list[tuple[str, str]] = []
        self._files: dict[str, bytes] = {}

    async def read(self, reader: MultipartReader) -> Upload:
        parts = 0
        while (part := await reader.next()) is not None:
            parts += 1
            if parts > self._config.max_parts:
                raise PayloadTooLarge(
                    "The request has too many parts.", accepted=f"{self._config.max_parts} parts"
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
            data = await self._bytes(part, self._config.max_field_bytes, name)
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
        data = await self._bytes(part, self._config.max_file_bytes, file)
        check_filled(data, file)
        self._files[file] = data

    async def _bytes(self, part: BodyPartReader, limit: int, name: str) -> bytes:
        data = bytearray()
        while chunk := await part.read_chunk(65536):
            self._grow(len(chunk))
            data += chunk
            self._total += len(chunk)
            if len(data) > limit:
                raise _too_large(f"The part {name}", limit, name)
            if self._total > self._config.max_request_bytes:
                raise _too_large("The request", self._config.max_request_bytes)
        return bytes(data)


def _too_large(what: str, limit: int, field: str | None = None) -> PayloadTooLarge:
    return PayloadTooLarge(f"{what} is too large.", field=field, accepted=f"at most {limit} bytes")


def _malformed(received: str) -> BadRequest:
    return BadRequest(
        "The multipart body is malformed or ends early.", received=received, accepted="multipart/form-data"
    )
