"""A LoRA's file on its way through the gateway, which never holds more than a few pieces of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final, TypeVar

from aiohttp import BodyPartReader, web

from giornata.lora_transfer import LoraUpload, sending
from giornata.wire.errors import BadRequest, InvalidField, PayloadTooLarge, RequestTimeout
from giornata.wire.loras import LoraRecord
from giornata.wire.requests import asked
from giornata_gateway.http.errors import GATEWAY, TENANT
from giornata_gateway.http.pace import ReceiveTimeout
from giornata_gateway.http.uploads import (
    LATE,
    MALFORMED,
    NAME_CHARACTERS,
    check_plain,
    malformed,
    multipart,
    too_large,
)
from giornata_gateway.intake.rules.forms import LoraForm, once_each

FILE: Final = "file"
"""Name of the part with the file."""
CHUNK_BYTES: Final = 64 << 10
MAX_NAME: Final = 200

T = TypeVar("T")


@dataclass
class _LoraUploadParts:
    """What has come of a form."""

    fields: list[tuple[str, str]] = field(default_factory=list)
    upload: LoraUpload | None = None
    filename: str | None = None


async def receive_lora(request: web.Request) -> LoraRecord:
    """Send the file of a request on to the LoRA store, piece by piece; the LoRA that it becomes.

    Raises:
        RequestTimeout: the client is too slow in sending it.
        BadRequest: it is not multipart/form-data, not well-formed, or ends early.
        InvalidField, UnknownField: a field is at fault, or the file is missing or given twice.
        ModelNotFound: no running worker serves the model.
        LoraUnreadable, LoraNotSupported, LoraTooLarge, LoraStoreFull: what the LoRA store says of the file.
    """
    gateway, tenant = request.app[GATEWAY], request[TENANT].name
    config = gateway.config
    if request.content_type != "multipart/form-data":
        sent = request.headers.get("Content-Type", "no Content-Type")
        raise BadRequest("The body is not a form with a file.", received=sent, accepted="multipart/form-data")
    check_plain(request)
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(config.lora_receive_s) as limit:
                parts = await _read(request, ReceiveTimeout(config, limit), stack)
        except TimeoutError as error:
            accepted = (
                f"{config.lora_receive_s:g} s, and at least {config.receive_bytes_per_s} bytes a second"
            )
            raise RequestTimeout(LATE, accepted=accepted) from error
        form = asked(LoraForm, once_each(parts.fields))
        if parts.upload is None:
            raise InvalidField("The file is missing.", field=FILE, accepted="one file of safetensors")
        model = gateway.loras.model(form.model)
        return await parts.upload.finish(tenant, model, form.name or _stem(parts.filename))


async def _read(request: web.Request, pace: ReceiveTimeout, stack: AsyncExitStack) -> _LoraUploadParts:
    """The fields, and the upload, which `stack` drops where something fails."""
    config, parts = request.app[GATEWAY].config, _LoraUploadParts()
    try:
        reader = multipart(request)
    except MALFORMED as error:
        raise malformed(str(error)) from error
    while (part := await _well_formed(reader.next())) is not None:
        if not isinstance(part, BodyPartReader) or not part.name or len(part.name) > NAME_CHARACTERS:
            raise malformed("a part without a name, or with too long a one")
        if len(parts.fields) >= config.max_parts:
            raise PayloadTooLarge("The request has too many parts.", accepted=f"{config.max_parts} parts")
        if part.name == FILE:
            await _forward(request, part, parts, pace, stack)
        else:
            parts.fields.append((part.name, await _text(part, config.max_field_bytes, pace)))
    return parts


async def _forward(
    request: web.Request,
    part: BodyPartReader,
    parts: _LoraUploadParts,
    pace: ReceiveTimeout,
    stack: AsyncExitStack,
) -> None:
    if parts.upload is not None:
        raise InvalidField("A LoRA is exactly one file.", field=FILE, received="several", accepted="one file")
    sent = sending(request.app[GATEWAY].bus, request[TENANT].name)
    with pace.elsewhere():
        parts.upload, parts.filename = await stack.enter_async_context(sent), part.filename
    while chunk := await _well_formed(part.read_chunk(CHUNK_BYTES)):
        pace.come(len(chunk))
        with pace.elsewhere():
            await parts.upload.write(chunk)


async def _text(part: BodyPartReader, limit: int, pace: ReceiveTimeout) -> str:
    data = bytearray()
    while chunk := await _well_formed(part.read_chunk(CHUNK_BYTES)):
        pace.come(len(chunk))
        data += chunk
        if len(data) > limit:
            raise too_large(f"The part {part.name}", limit, part.name)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidField("A field is not UTF-8.", field=part.name, received=f"{len(data)} bytes") from error


async def _well_formed(reading: Awaitable[T]) -> T:
    try:
        return await reading
    except MALFORMED as error:
        raise malformed(str(error)) from error


def _stem(filename: str | None) -> str | None:
    """A name for a file whose sender gives none, of its printable characters."""
    stem = PurePosixPath((filename or "").replace("\\", "/")).stem
    return "".join(character for character in stem if character.isprintable())[:MAX_NAME] or None
