"""Any server of ``POST /v1/images/edits``, in OpenAI's form or in Giornata's."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Final

import aiohttp

from giornata_tools.loadgen.material import Material
from giornata_tools.loadgen.outcomes import CONNECTION_LOST, NOT_CONNECTED, TIMEOUT, ServerAnswer, judged
from giornata_tools.loadgen.workload import Request

PATH: Final = "/v1/images/edits"
CONNECT_S: Final = 10.0


class Api(StrEnum):
    """What the server understands."""

    GIORNATA = "giornata"
    """Steps and seed of each edit are sent too; servers of diffusers' pipelines understand them too."""
    OPENAI = "openai"
    """Only the fields of OpenAI's API; the server has its own number of steps."""


class ImagesApi:
    """A server. Make it with :func:`open_images_api`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        material: Material,
        fields: Mapping[str, str],
        api: Api,
    ) -> None:
        self._session = session
        self._url = url.removesuffix("/v1") + PATH
        self._material = material
        self._fields = fields
        self._api = api

    async def send(self, request: Request) -> ServerAnswer:
        """Ask for an edit and read the whole answer."""
        try:
            async with self._session.post(self._url, data=self._form(request)) as response:
                return judged(response.status, await response.read(), request.n)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return ServerAnswer(code=NOT_CONNECTED, message=str(error))
        except aiohttp.ClientError as error:
            return ServerAnswer(code=CONNECTION_LOST, message=str(error) or type(error).__name__)
        except TimeoutError:
            return ServerAnswer(code=TIMEOUT, message=f"no answer within {self._session.timeout.total:g} s")

    def _form(self, request: Request) -> aiohttp.FormData:
        form = aiohttp.FormData()
        image, mask = self._material.templates[request.template].file, self._material.masks[request]
        form.add_field("image", io.BytesIO(image), filename="image", content_type=media_type(image))
        form.add_field("mask", io.BytesIO(mask), filename="mask.png", content_type="image/png")
        for name, value in fields_of(request, self._api, self._fields).items():
            form.add_field(name, value)
        return form


@asynccontextmanager
async def open_images_api(
    url: str,
    material: Material,
    fields: Mapping[str, str],
    *,
    api: Api,
    api_key: str | None,
    timeout_s: float,
) -> AsyncIterator[ImagesApi]:
    """The server at `url` while inside; it is asked over as many connections as there are requests in flight.

    Args:
        url: of the server, with or without ``/v1``.
        material: files of the requests.
        fields: of every request, besides the ones that requests differ in; they go before those.
        api: what the server understands.
        api_key: sent as a bearer token.
        timeout_s: longest wait for an answer.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield ImagesApi(session, url, material, fields, api)


def fields_of(request: Request, api: Api, fields: Mapping[str, str]) -> dict[str, str]:
    """The form of a request, without its files: `fields` of the whole run go before what the request says."""
    own = {"n": str(request.n)}
    if api is Api.GIORNATA:
        own["seed"] = str(request.seed)
        if request.steps is not None:
            own["num_inference_steps"] = str(request.steps)
    return {**own, **fields}


def media_type(file: bytes) -> str:
    """The media type of a PNG, WebP or JPEG file, by its first bytes."""
    if file.startswith(b"\x89PNG"):
        return "image/png"
    return "image/webp" if file[8:12] == b"WEBP" else "image/jpeg"
