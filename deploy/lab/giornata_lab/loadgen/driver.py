"""Open loop against any server of ``POST /v1/images/edits``: the files of requests, and requests as they are due."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor, pi
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from giornata_lab.loadgen.outcomes import NOT_SENT, RequestOutcome, ServerAnswer
from giornata_lab.loadgen.workload import MaskShape, WorkloadRequest
from giornata_tools.lora_profiler.probes import png, upright_size

Mask = NDArray[np.bool_]
"""(height, width); True is repainted."""
Distances = NDArray[np.floating[Any]]
"""(height, width), or what broadcasts to it: how far pixels are from a mask's centre."""

PICTURE_WAVES: Final = 6
"""How many waves a generated picture is made of."""
RIM_WAVES: Final = (2, 3, 5)
"""How many waves run around a blob's rim."""
RIM_DEPTH: Final = 0.12
"""Height of a wave as a share of the radius."""
MARGIN: Final = 2
"""Pixels around a patch's box: where it is small, the pixels nearest to its centre may lie beside it."""


@dataclass(frozen=True)
class TemplatePicture:
    """A picture that requests edit."""

    file: bytes
    width: int
    height: int


@dataclass(frozen=True)
class WorkloadImages:
    """Files by what they depend on."""

    templates: Mapping[int, TemplatePicture]
    masks: Mapping[WorkloadRequest, bytes]


def given(files: Sequence[bytes]) -> dict[int, TemplatePicture]:
    """Templates of encoded pictures, in order.

    Raises:
        ValueError: one of them is no picture; says the number.
    """
    found = {}
    for number, file in enumerate(files):
        try:
            found[number] = TemplatePicture(file, *upright_size(file))
        except ValueError as error:
            raise ValueError(f"picture {number}: {error}") from error
    return found


def made(
    requests: Sequence[WorkloadRequest], width: int, height: int, seed: int
) -> dict[int, TemplatePicture]:
    """The templates that `requests` edit, generated."""
    numbers = sorted({request.template for request in requests})
    return {
        number: TemplatePicture(generated(width, height, seed + number), width, height) for number in numbers
    }


def material(requests: Sequence[WorkloadRequest], templates: Mapping[int, TemplatePicture]) -> WorkloadImages:
    """Everything that `requests` are made of; `templates` has all that they edit."""
    masks = {}
    for request in requests:
        picture = templates[request.template]
        marked = mask(picture.width, picture.height, request.mask_ratio, request.shape, request.seed)
        masks[request] = mask_file(marked)
    return WorkloadImages(templates, masks)


def generated(width: int, height: int, seed: int) -> bytes:
    """A PNG of `width` x `height` pixels: soft waves of colour, others for every `seed`."""
    chance = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    planes = np.zeros((height, width, 3))
    for colour in range(3):
        for _ in range(PICTURE_WAVES):
            across, down, phase = chance.uniform(-4, 4), chance.uniform(-4, 4), chance.uniform(0, 2 * np.pi)
            planes[..., colour] += np.cos(2 * np.pi * (across * x + down * y) + phase)
    pixels = 127.5 + planes * (127.5 / PICTURE_WAVES)
    return png(Image.fromarray(pixels.round().astype(np.uint8)), compress_level=1)


def mask(width: int, height: int, ratio: float, shape: MaskShape, seed: int) -> Mask:
    """A connected patch of round(`ratio` x pixels) pixels, one at least: the ones nearest to its centre.

    It lies inside of the picture of `width` x `height` pixels where it fits, and fills what there is where it does not.
    Its place, and a blob's rim, are drawn from `seed`.
    """
    chance = np.random.default_rng(seed)
    count = min(max(1, round(ratio * width * height)), width * height)
    half = (
        count**0.5 / 2
        if shape is MaskShape.SQUARE
        else (count / pi) ** 0.5 * (1 + RIM_DEPTH * len(RIM_WAVES))
    )
    across, down = (_centre(side, half, chance) for side in (width, height))
    fits = 2 * half <= min(width, height)
    columns, rows = (
        _around(centre, half if fits else side, side) for centre, side in ((across, width), (down, height))
    )
    x = np.arange(columns.start, columns.stop, dtype=np.float32)[None] + np.float32(0.5 - across)
    y = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] + np.float32(0.5 - down)
    far = np.maximum(np.abs(x), np.abs(y)) if shape is MaskShape.SQUARE else _from_rim(x, y, chance)
    part = np.zeros(far.size, np.bool_)
    part[np.argpartition(far.ravel(), count - 1)[:count]] = True
    found = np.zeros((height, width), np.bool_)
    found[rows, columns] = part.reshape(far.shape)
    return found


def mask_file(marked: Mask) -> bytes:
    """`marked` as OpenAI's image API takes it: an RGBA PNG, transparent where the picture is repainted."""
    pixels = np.zeros((*marked.shape, 4), np.uint8)
    pixels[..., 3] = np.where(marked, np.uint8(0), np.uint8(255))
    return png(Image.fromarray(pixels), compress_level=1)


def _from_rim(x: Distances, y: Distances, chance: np.random.Generator) -> Distances:
    """Distance from (0, 0) over that of a rim, a circle with waves of random phases."""
    angle = np.arctan2(y, x)
    rim = np.ones_like(angle)
    for wave in RIM_WAVES:
        rim += np.float32(RIM_DEPTH) * np.sin(
            np.float32(wave) * angle + np.float32(chance.uniform(0, 2 * pi))
        )
    far: Distances = np.hypot(x, y) / rim
    return far


def _centre(side: int, half: float, chance: np.random.Generator) -> float:
    """Return where on a side the patch's centre lies."""
    room = side - 2 * half
    return float(half + room * chance.random()) if room > 0 else side / 2


def _around(centre: float, half: float, side: int) -> slice:
    """The pixels of a side that a patch may touch."""
    return slice(max(0, floor(centre - half) - MARGIN), min(side, ceil(centre + half) + MARGIN))


CONNECT_S: Final = 10.0
CODE: Final = re.compile(r"[A-Za-z][\w.-]{0,63}")
SAID: Final = 500
"""Characters of a server's message that are kept."""


class ApiDialect(StrEnum):
    """What the server understands."""

    GIORNATA = "giornata"
    """Steps and seed of each edit are sent too; servers of diffusers' pipelines understand them too."""
    OPENAI = "openai"
    """Only the fields of OpenAI's API; the server has its own number of steps."""


@dataclass(frozen=True)
class ImagesApi:
    """A server. Make it with :func:`open_images_api`."""

    session: aiohttp.ClientSession
    url: str
    """Address of the server's edits."""
    material: WorkloadImages
    fields: Mapping[str, str]
    """Fields of every form, which go before those of a request."""
    api: ApiDialect

    async def send(self, request: WorkloadRequest) -> ServerAnswer:
        """Ask for an edit and read the whole answer."""
        try:
            async with self.session.post(self.url, data=self._form(request)) as response:
                return judged(response.status, await response.read(), request.n)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return ServerAnswer(code="not_connected", message=str(error))
        except aiohttp.ClientError as error:
            return ServerAnswer(code="connection_lost", message=str(error) or type(error).__name__)
        except TimeoutError:
            return ServerAnswer(code="timeout", message=f"no answer within {self.session.timeout.total:g} s")

    def _form(self, request: WorkloadRequest) -> aiohttp.FormData:
        form = aiohttp.FormData()
        image, mask = self.material.templates[request.template].file, self.material.masks[request]
        form.add_field("image", io.BytesIO(image), filename="image", content_type=_media_type(image))
        form.add_field("mask", io.BytesIO(mask), filename="mask.png", content_type="image/png")
        own: dict[str, object] = {"n": request.n}
        if self.api is ApiDialect.GIORNATA:
            own["seed"] = request.seed
            if request.steps is not None:
                own["num_inference_steps"] = request.steps
            if request.adapters:
                own["loras"] = json.dumps([{"id": name} for name in request.adapters])
        for name, value in {**own, **self.fields}.items():
            form.add_field(name, str(value))
        return form


@asynccontextmanager
async def open_images_api(
    url: str,
    material: WorkloadImages,
    fields: Mapping[str, str],
    *,
    api: ApiDialect,
    api_key: str | None,
    timeout_s: float,
) -> AsyncIterator[ImagesApi]:
    """The server at `url`, with or without ``/v1``, while inside; it gets a connection for each request in flight.

    `api_key` is sent as a bearer token; `timeout_s` is the longest wait for an answer.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield ImagesApi(session, f"{url.removesuffix('/v1')}/v1/images/edits", material, fields, api)


def judged(status: int, body: bytes, n: int) -> ServerAnswer:
    """A server's answer to a request for `n` pictures: JSON of OpenAI's image API, with ``data`` or with ``error``."""
    try:
        told = json.loads(body)
    except ValueError:
        told = None
    said = body[:SAID].decode("utf-8", "replace")
    if not 200 <= status < 300:
        return _failed(0, _at(told, "error"), f"http_{status}", said)
    data = _at(told, "data")
    if not isinstance(data, list) or not data or not all(map(_is_picture, data)):
        return ServerAnswer(0, "not_an_image_answer", said)
    if len(data) >= n:
        return ServerAnswer(len(data))
    first = _at(told, "giornata", "errors", 0, "error")
    return _failed(len(data), first, "pictures_missing", f"{len(data)} of {n} pictures came")


def _failed(pictures: int, error: object, code: str, message: str) -> ServerAnswer:
    """An answer with the code and message of `error`, else with `code` and `message`; a code is a word."""
    own, why = _at(error, "code"), _at(error, "message")
    known = isinstance(own, str) and CODE.fullmatch(own)
    return ServerAnswer(pictures, own if known else code, str(why)[:SAID] if why else message)


def _at(told: Any, *path: str | int) -> Any:
    """Return what lies at `path` in JSON; None where there is nothing."""
    for key in path:
        try:
            told = told[key]
        except (TypeError, KeyError, IndexError):
            return None
    return told


def _is_picture(item: object) -> bool:
    return any(isinstance(_at(item, name), str) for name in ("b64_json", "url"))


def _media_type(file: bytes) -> str:
    """The media type of a PNG, WebP or JPEG file, by its first bytes."""
    if file.startswith(b"\x89PNG"):
        return "image/png"
    return "image/webp" if file[8:12] == b"WEBP" else "image/jpeg"


Send = Callable[[WorkloadRequest], Awaitable[ServerAnswer]]
"""Sends a request and waits for its answer; raises nothing but a cancellation."""
Record = Callable[[RequestOutcome], object]
"""Takes what became of a request."""


async def drive(requests: Sequence[WorkloadRequest], send: Send, record: Record, *, limit: int) -> None:
    """Send every request when it is due, in the order of their times; return when the last one has its answer.

    Outcomes are recorded in the order in which requests end. A request that is due while `limit` others have no answer
    is not sent, and recorded as an error. When cancelled, requests without an answer are given up and not recorded.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    in_flight = 0

    async def sent(request: WorkloadRequest, others: int) -> None:
        nonlocal in_flight
        sent_s = loop.time() - began
        try:
            answer = await send(request)
        finally:
            in_flight -= 1
        record(RequestOutcome(request, loop.time() - began, answer, sent_s, others))

    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, began + request.at_s - loop.time()))
            if in_flight >= limit:
                refused = ServerAnswer(code=NOT_SENT, message=f"{limit} requests had no answer yet")
                record(RequestOutcome(request, request.at_s, refused, in_flight=in_flight))
                continue
            in_flight += 1
            group.create_task(sent(request, in_flight))
