"""A gateway in this process between real servers, in front of a scripted router."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp

from giornata.blobs import BlobStore, RedisBlobs
from giornata.bus import bus, streams
from giornata.bus.bus import Bus
from giornata.config import new_instance
from giornata.records import JobRecordStore
from giornata.wire import subjects
from giornata.wire.jobs import JobRecord
from giornata.wire.models import ModelCard
from giornata.wire.workers import ServiceName, ServiceState
from giornata_gateway import service
from giornata_gateway.config import GatewayConfig
from tests.configs import configured
from tests.fakes.blobs import MemoryBlobs
from tests.integration.fake_router import FakeRouter
from tests.patience import HUNG_S

T = TypeVar("T")
MEMORY_BLOBS: Final = "redis://memory"
"""In the place of a blob store's address: the router and its gateways share a store in memory."""


class ListedBlobs(MemoryBlobs):
    """Tells what it holds."""

    @property
    def keys(self) -> set[str]:
        return set(self._blobs)


@dataclass(frozen=True)
class Answer:
    """An answer of the HTTP door, read whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    def expect(self, status: int) -> Answer:
        assert self.status == status, self.text
        return self

    @property
    def told(self) -> tuple[int, Any]:
        return self.status, self.json

    @property
    def code(self) -> tuple[int, str]:
        """Status and code of an error."""
        return self.status, self.error["code"]

    @property
    def fault(self) -> tuple[int, str]:
        """Status of an error, and the field at fault."""
        return self.status, self.error["param"]

    @property
    def refusal(self) -> tuple[int, str, str | None]:
        """Status and code of an error, and the field at fault."""
        return self.status, self.error["code"], self.error["param"]

    @property
    def content_type(self) -> str:
        return self.headers["Content-Type"].partition(";")[0]

    @property
    def replayed(self) -> bool:
        """Whether it is that of an earlier request under the same key."""
        return self.headers.get("Idempotent-Replayed") == "true"

    @property
    def ignored(self) -> list[str]:
        """The fields that it says have changed nothing."""
        told = self.headers.get("X-Giornata-Ignored", "")
        return told.split(", ") if told else []


def multipart(*files: tuple[str, bytes], **fields: str) -> aiohttp.FormData:
    """A form of files by their fields, and of texts."""
    form = aiohttp.FormData(default_to_multipart=True)
    for name, data in files:
        form.add_field(name, io.BytesIO(data), filename=f"{name}.png", content_type="image/png")
    for name, value in fields.items():
        form.add_field(name, value)
    return form


@dataclass
class Stage:
    """A running gateway and the router behind it."""

    url: str
    router: FakeRouter
    http: aiohttp.ClientSession
    config: GatewayConfig
    front: Bus
    """The gateway's own connection."""
    stop: asyncio.Event
    serving: asyncio.Task[None]

    def form(
        self,
        image: bytes | None = b"picture",
        mask: bytes | None = b"mask",
        /,
        *more: tuple[str, bytes],
        **fields: str,
    ) -> aiohttp.FormData:
        """The form of an edit, with files of other names, too."""
        files = [(name, data) for name, data in (("image", image), ("mask", mask)) if data is not None]
        return multipart(*files, *more, **{"prompt": "a red star"} | fields)

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        async with self.http.request(method, path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.ask("GET", path, **options)

    async def post(self, path: str, **options: Any) -> Answer:
        return await self.ask("POST", path, **options)

    async def edit(self, **fields: str) -> Answer:
        return await self.post("/v1/images/edits", data=self.form(**fields))

    async def begin(self, request: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a request, whose job waits at its first step until :meth:`FakeRouter.go_on`."""
        if self.router.hold is None:
            self.router.hold = asyncio.Event()
        self.router.held.clear()
        task = asyncio.create_task(request)
        await asyncio.wait_for(self.router.held.wait(), HUNG_S)
        return task

    async def serve(self, *cards: ModelCard) -> None:
        """Have the fleet serve these models; on return the gateway knows of it."""
        self.router.cards = cards
        await self.router.announce()

    async def record(self) -> JobRecord:
        """The record of the latest job."""
        return await self.router.records.get(list(self.router.jobs)[-1])


Opening = Callable[..., AbstractAsyncContextManager[Stage]]
"""Opens a gateway with options, between the servers of a test."""


@asynccontextmanager
async def open_stage(nats_url: str, redis_url: str, folder: Path, **options: Any) -> AsyncIterator[Stage]:
    """A gateway with `options`, listening, and a fake router that it has heard of."""
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(bus.connect(nats_url, "fakes"))
        blobs: BlobStore = ListedBlobs()
        if redis_url != MEMORY_BLOBS:
            blobs = await stack.enter_async_context(RedisBlobs.open(redis_url))
        await streams.ensure(behind.jetstream, replicas=1, events_ttl_s=3600)
        router = FakeRouter(behind, blobs, await JobRecordStore.open(behind.jetstream))
        await stack.enter_async_context(router.running())
        await stack.enter_async_context(_heartbeat(router))
        stage = await stack.enter_async_context(open_gateway(router, nats_url, redis_url, folder, **options))
        await router.announce()
        yield stage


@asynccontextmanager
async def open_gateway(
    router: FakeRouter, nats_url: str, redis_url: str, folder: Path, **options: Any
) -> AsyncIterator[Stage]:
    """A gateway with `options`, listening, in front of a router that runs already."""
    config = configured(
        GatewayConfig,
        nats_url=nats_url,
        blobs_url=redis_url,
        instance=new_instance("gateway"),
        port=0,
        port_file=_port_file(folder),
        telemetry_hz=20,
        **{"notice_s": 0.0} | options,
    )
    async with AsyncExitStack() as stack:
        front = await stack.enter_async_context(bus.connect(nats_url, config.instance))
        blobs = router.blobs
        if redis_url != MEMORY_BLOBS:
            blobs = await stack.enter_async_context(RedisBlobs.open(redis_url))
        up = asyncio.Event()
        own = subjects.telemetry(ServiceName.GATEWAY, config.instance)
        await stack.enter_async_context(router.bus.listen(own, ServiceState, lambda _: up.set()))
        stop = asyncio.Event()
        serving = asyncio.create_task(service.serve(config, front, blobs, stop))
        stack.push_async_callback(_stopped, stop, serving)
        await asyncio.wait(
            [serving, waiting := asyncio.ensure_future(up.wait())], return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()
        if serving.done():
            serving.result()
        url = f"http://127.0.0.1:{int((folder / 'port').read_text())}"
        http = await stack.enter_async_context(aiohttp.ClientSession(url))
        yield Stage(url, router, http, config, front, stop, serving)


@asynccontextmanager
async def _heartbeat(router: FakeRouter) -> AsyncIterator[None]:
    """The summary of the fleet, as a router sends it."""

    async def tell() -> None:
        while True:
            if router.bus.client.is_connected:
                await router.summarise()
            await asyncio.sleep(0.25)  # the rate of the summary

    task = asyncio.create_task(tell(), name="summary")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _port_file(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder / "port"


async def _stopped(stop: asyncio.Event, serving: asyncio.Task[None]) -> None:
    stop.set()
    await serving


async def leave(request: asyncio.Task[Any]) -> None:
    """As a client whose connection ends; on return nothing of its request is left here."""
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def listening_port(port_file: Path) -> int:
    """The port that a gateway has written there, once it listens."""
    async with asyncio.timeout(HUNG_S):
        while (port := _written(port_file)) is None:  # noqa: ASYNC110 - a file tells
            await asyncio.sleep(0.02)
    return port


def _written(port_file: Path) -> int | None:
    text = port_file.read_text() if port_file.exists() else ""
    return int(text) if text else None
