"""What reads a stranger's bytes, each as a function of bytes that returns, or raises what it has found.

An error that names what is wrong is no finding, as long as it is a client's (4xx) and can be told at both doors.
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Final, TypeVar, cast
from unittest.mock import Mock

from aiohttp import StreamReader, web
from aiohttp.test_utils import make_mocked_request
from pydantic import BaseModel
from yarl import URL

from giornata import api_keys
from giornata.api_keys import KeysFileError
from giornata.shares import SharedPool
from giornata.wire import codec
from giornata.wire.errors import BY_CODE, GiornataError, SchemaMismatch
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.messages import CancelMessage
from giornata.wire.templates import WebhookRecord
from giornata_gateway import webhooks
from giornata_gateway.admission import ByteReservation, Tenant
from giornata_gateway.config import GatewayConfig, networks_in
from giornata_gateway.fleet import choose_card
from giornata_gateway.gateway import Gateway
from giornata_gateway.http.a1111 import PICTURES, order_of
from giornata_gateway.http.requests import read_json, read_upload
from giornata_gateway.http.responses import GATEWAY
from giornata_gateway.http.responses import TENANT as WHO
from giornata_gateway.nats_door import (
    EditEnvelope,
    GenerateEnvelope,
    MaskEnvelope,
    check_envelope,
    check_pictures,
    check_time,
    read_mask,
    read_parameters,
)
from giornata_gateway.rules import a1111_forms as a1111
from giornata_gateway.rules.a1111_forms import ImageToImage, TextToImage
from giornata_gateway.rules.a1111_parameters import rename_field
from giornata_gateway.rules.forms import (
    EditForm,
    GenerationForm,
    read_form,
    read_mask_form,
    read_template_form,
)
from giornata_gateway.views.jobs import ErrorAnswer, error_detail
from giornata_lab.loadgen import traces
from giornata_lora_store.validation import LoraSizeLimits, inspect_file
from giornata_prepost.images.pictures import decode
from tests.fakes.fleet import CARD, SDXL

M = TypeVar("M", bound=BaseModel)
Target = Callable[[bytes], None]
CONFIG: Final = GatewayConfig()
MAX_PIXELS: Final = 1 << 18
HEADER_BYTES: Final = 4 << 20
TENANT: Final = Tenant("tenant")
FORM: Final = "multipart/form-data; boundary=b"
JSON: Final = "application/json"


@contextmanager
def refused() -> Iterator[None]:
    """A refusal within is what a stranger's bytes deserve; a fault of ours is raised."""
    try:
        yield
    except GiornataError as error:
        if error.status >= 500 or BY_CODE.get(error.code) is not type(error):
            raise
        codec.encode(error.body())
        ErrorAnswer(error=error_detail(error.body())).model_dump_json().encode()


async def _loras_of(tenant: str) -> list[LoraRecord]:
    name, ready = f"lora_{'0' * 32}", LoraState.READY
    return [LoraRecord(lora_id=name, tenant=tenant, created_s=0, state=ready, model=CARD.name, name="rims")]


CARDS: Final = {card.name: card for card in (CARD, SDXL)}
BEHIND: Final = SimpleNamespace(
    config=CONFIG,
    fleet=SimpleNamespace(
        cards=lambda: CARDS, choose=lambda name, task: choose_card(CARDS, name, (), task), missing=list
    ),
    loras=SimpleNamespace(of=_loras_of),
)
"""What the door asks of the gateway behind it: two models, one of which generates, and a LoRA."""


def _request(data: bytes, content_type: str) -> web.Request:
    """A request to a gateway of which there is no more than its door and :data:`BEHIND`."""
    loop = asyncio.get_running_loop()
    payload = StreamReader(Mock(_reading_paused=False), 1 << 16, loop=loop)
    payload.feed_data(data)
    payload.feed_eof()
    app = web.Application()
    app[GATEWAY] = cast("Gateway", BEHIND)
    request = make_mocked_request(
        "POST", "/v1/images/edits", {"Content-Type": content_type}, app=app, payload=payload
    )
    request[WHO] = TENANT
    return request


_grow: Final = ByteReservation(SharedPool(1 << 62), Tenant("fuzz"))
"""There is room."""


def form(data: bytes) -> None:
    """A multipart body, as an edit and as a template."""

    async def read() -> None:
        with refused():
            upload = await read_upload(_request(data, FORM), _grow)
            with refused():
                read_form(EditForm, upload.fields).parameters()
            read_template_form(upload)

    asyncio.run(read())


def json_body(data: bytes) -> None:
    """A JSON body, as a generation."""

    async def read() -> None:
        with refused():
            fields = await read_json(_request(data, JSON), _grow)
            read_form(GenerationForm, fields.items()).parameters()

    asyncio.run(read())


def a1111_body(data: bytes) -> None:
    """A body of A1111's API, as txt2img, as img2img and as options: LoRAs in prompts, scripts and pictures too."""

    async def read_as(kind: type[TextToImage]) -> None:
        with refused():
            form, _ = a1111.read(kind, await read_json(_request(data, JSON), _grow, PICTURES))
            try:
                order = await order_of(_request(b"", JSON), form)
            except GiornataError as error:
                rename_field(error)
                raise
            codec.encode(order.parameters, limit_bytes=1 << 30)

    async def read() -> None:
        await read_as(TextToImage)
        await read_as(ImageToImage)
        with refused():
            a1111.read_settings(await read_json(_request(data, JSON), _grow))

    asyncio.run(read())


def mask_form(data: bytes) -> None:
    """A multipart body, as a picture in which words name something."""

    async def read() -> None:
        with refused():
            upload = await read_upload(_request(data, FORM), _grow)
            read_mask_form(upload, "image/png").asked()
            codec.encode(read_mask_form(upload).asked())

    asyncio.run(read())


def webhook_url(data: bytes) -> None:
    """The URL of a webhook, which is kept in a record; the client that sends it sees the same host as the check."""
    url = data.decode(errors="surrogateescape")
    for networks in ((), networks_in("10.0.0.0/8,fd00::/8")):
        with refused():
            taken = webhooks.check_url(url, networks)
            codec.encode(WebhookRecord(job_id="job_x", tenant="t", url=taken, created_s=0))
            with suppress(ValueError):  # the sender tells of it as of any other failure
                host, plain = URL(taken).host or "", URL(taken).scheme == "http"
                if not webhooks.may_connect(ipaddress.ip_address(host), networks, plain=plain):
                    raise AssertionError(f"{taken!r} leads to {host}")


def envelope(data: bytes) -> None:
    """A message, as all that applications send."""
    with refused(), _unreadable():
        edit = _message(EditEnvelope, data)
        with refused():
            codec.encode(read_parameters(edit), limit_bytes=1 << 30)
        check_envelope(edit, TENANT, CONFIG.max_file_bytes)
    with refused(), _unreadable():
        asked = _message(GenerateEnvelope, data)
        read_parameters(asked)
        check_envelope(asked, TENANT, CONFIG.max_file_bytes)
    with refused(), _unreadable():
        words = _message(MaskEnvelope, data)
        with refused():
            codec.encode(read_mask(words))
        check_time(words.remaining_ms)
        check_pictures(words.brought, TENANT, CONFIG.max_file_bytes)
    with refused(), _unreadable():
        _message(CancelMessage, data)


def _message(kind: type[M], data: bytes) -> M:
    """A stranger's message as :mod:`giornata.bus.bus` reads it."""
    return codec.validated(kind, codec.fields_of(kind, data, limited=True))


@contextmanager
def _unreadable() -> Iterator[None]:
    """What :mod:`giornata.bus.bus` answers as a malformed message."""
    try:
        yield
    except SchemaMismatch as error:
        codec.encode(error.body())


def picture(data: bytes) -> None:
    """A picture."""
    with refused():
        found = decode(data, MAX_PIXELS)
        height, width, channels = found.pixels.shape
        if height * width > MAX_PIXELS or channels not in {3, 4}:
            raise AssertionError(f"decoded to {found.pixels.shape}")


def safetensors(data: bytes) -> None:
    """A LoRA's file, of which the header is read."""
    with tempfile.NamedTemporaryFile(dir=_memory()) as file, refused():
        file.write(data)
        file.flush()
        inspect_file(Path(file.name), LoraSizeLimits(256, 4096, HEADER_BYTES))


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 - a name of its own in there


def trace_file(data: bytes) -> None:
    """A trace, by its first byte as CSV or as JSON lines."""
    suffix = traces.SUFFIXES[data[0] % 2] if data else traces.SUFFIXES[0]
    try:
        text = io.TextIOWrapper(io.BytesIO(data[1:]), encoding="utf-8").read()
        traces.read_trace(text, suffix)
    except ValueError as error:
        str(error).encode()


def key_file(data: bytes) -> None:
    """A file of API keys; one that is read says the same when it is written."""
    try:
        found = api_keys.parse(data)
    except KeysFileError as error:
        str(error).encode()
        return
    if api_keys.parse(api_keys.render(found)) != found:
        raise AssertionError("written and read again it is another file")


TARGETS: Final[Mapping[str, Target]] = {
    "form": form,
    "json": json_body,
    "a1111": a1111_body,
    "mask": mask_form,
    "webhook": webhook_url,
    "envelope": envelope,
    "png": picture,
    "jpeg": picture,
    "webp": picture,
    "safetensors": safetensors,
    "trace": trace_file,
    "keys": key_file,
}
"""By the names of their corpora."""
