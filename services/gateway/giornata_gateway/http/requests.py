"""What an HTTP request says: its query, its headers, its body, and the edit that it asks for.

A multipart body is read part by part, within limits: nothing larger than allowed is ever held.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Final

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import BadHttpMessage

from giornata.deadlines import Deadline
from giornata.wire.errors import BadRequest, InvalidField, PayloadTooLarge, RequestTimeout
from giornata.wire.jobs import Priority
from giornata_gateway.config import GatewayConfig
from giornata_gateway.gateway import Admitted
from giornata_gateway.http.errors import GATEWAY, TENANT
from giornata_gateway.intake.limits import Grow
from giornata_gateway.intake.rules.forms import FILES, F, Upload, check_filled, check_source, read_form
from giornata_gateway.intake.rules.idempotency import HEADER, read_key
from giornata_gateway.jobs.preparation import EditOrder

BUFFER_BYTES: Final = 128 << 10
"""What a connection holds before its request is read. A request that never comes counts too."""
NAME_CHARACTERS: Final = 64
"""No field has a longer name."""
MALFORMED: Final = (ValueError, AssertionError, RuntimeError, BadHttpMessage, web.RequestPayloadError)
"""What aiohttp raises where a multipart body is not well-formed."""
LAST_SEQUENCE: Final = 10**18 - 1
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


async def receive(
    request: web.Request, kind: type[F], priority: Priority, held: ExitStack
) -> tuple[F, Admitted]:
    """The form of a request, and its edit, admitted; on return the pictures are stored and not in memory.

    `held` keeps the job's places until it is closed.
    """
    gateway, tenant = request.app[GATEWAY], request[TENANT]
    key = read_key(request.headers.getall(HEADER, ()), HEADER)
    gateway.places.check()
    if key is None:  # a repetition may be answered for nothing, which only its body tells
        gateway.quotas.check(tenant)
    with gateway.uploads.growing() as grow:
        upload = await read_upload(request, grow)
        if not any(name == "template_id" for name, _ in upload.fields):
            check_source(upload.image, None)
        form = read_form(kind, upload.fields, request.headers.get("Accept", ""))
        check_source(upload.image, form.template_id)
        awaited = priority is Priority.INTERACTIVE
        budget_s = gateway.config.budget_s if awaited else gateway.config.job_budget_s
        traceparent = request.headers.get("traceparent", "")
        order = EditOrder(
            parameters=form.parameters(),
            image=upload.image,
            mask=upload.mask,
            tenant=tenant,
            priority=priority,
            deadline=Deadline.after_ms(budget_s * 1000),
            template_id=form.template_id,
            traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else None,
        )
        return form, await gateway.admit(order, key, held)


def base_url(request: web.Request) -> str:
    """How the client reaches this gateway; empty, so that links are relative, where its Host header is no host."""
    configured = request.app[GATEWAY].config.public_url
    try:
        return configured or str(request.url.origin())
    except ValueError:
        return ""


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


async def read_upload(request: web.Request, grow: Grow) -> Upload:
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
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise BadRequest("The body is compressed.", received=encoding, accepted="no Content-Encoding")
    if (request.content_length or 0) > config.max_request_bytes:
        raise _too_large("The request", config.max_request_bytes)
    grow(BUFFER_BYTES)
    try:
        async with asyncio.timeout(config.receive_s) as limit:
            return await _Reading(config, grow, limit).read(await request.multipart())
    except TimeoutError as error:
        accepted = f"{config.receive_s:g} s, and at least {config.receive_bytes_per_s} bytes a second"
        raise RequestTimeout(
            "The body of the request was not received in time.", accepted=accepted
        ) from error
    except MALFORMED as error:
        raise _malformed(str(error)) from error


class _Reading:
    """One request being read; `limit` moves with what has come, up to where it is set."""

    def __init__(self, config: GatewayConfig, grow: Grow, limit: asyncio.Timeout) -> None:
        self._config, self._grow, self._limit = config, grow, limit
        self._latest_s = limit.when() or math.inf
        self._first_s = asyncio.get_running_loop().time() + config.head_s
        self._total = 0
        self._go_on()
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
            self._go_on()
            if len(data) > limit:
                raise _too_large(f"The part {name}", limit, name)
            if self._total > self._config.max_request_bytes:
                raise _too_large("The request", self._config.max_request_bytes)
        return bytes(data)

    def _go_on(self) -> None:
        """Allow the time that what has come takes at the slowest pace."""
        paced_s = self._first_s + self._total / self._config.receive_bytes_per_s
        self._limit.reschedule(min(self._latest_s, paced_s))


def _too_large(what: str, limit: int, field: str | None = None) -> PayloadTooLarge:
    return PayloadTooLarge(f"{what} is too large.", field=field, accepted=f"at most {limit} bytes")


def _malformed(received: str) -> BadRequest:
    return BadRequest(
        "The multipart body is malformed or ends early.", received=received, accepted="multipart/form-data"
    )
