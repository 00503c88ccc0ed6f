"""Open loop against any server of ``POST /v1/images/edits``: a request leaves when it is due."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import aiohttp

from giornata_lab.loadgen.outcomes import NOT_SENT, RequestOutcome, ServerAnswer
from giornata_lab.loadgen.pictures import WorkloadImages
from giornata_lab.loadgen.workload import WorkloadRequest

# Any server of ``POST /v1/images/edits``, in OpenAI's form or in Giornata's, and how its answers are
# judged.


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


# Open loop: a request leaves when it is due, answered or not the ones before.


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
