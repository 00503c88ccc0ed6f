"""Pictures that JSON edits name by URL: how many are fetched at once, for how long, and for whom."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from giornata.api_keys import TenantLimits
from giornata.shares import SharedPool
from giornata.wire.errors import InvalidField, PayloadTooLarge, TooManyRequests
from giornata_gateway.admission import ByteReservation, Tenant
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http import requests
from giornata_gateway.http.requests import FETCHED_AT_ONCE, check_sources, read_sources
from giornata_gateway.rules.forms import NamedSource, PictureSource
from tests.fakes.key_files import write_keys
from tests.integration.gateway_fakes import Stage, open_stage
from tests.patience import HUNG_S

ALICE = {"Authorization": "Bearer sk-alice-123"}
NETWORKS = "127.0.0.0/8,::1/128"


class PictureServer:
    """A server of pictures: each answers with its name once `open` is set; `large` with many bytes, `none` with 404."""

    def __init__(self) -> None:
        self.open, self.crowded = asyncio.Event(), asyncio.Event()
        self.asked = self.now = self.most = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked, self.now = self.asked + 1, self.now + 1
        self.most = max(self.most, self.now)
        if self.now == FETCHED_AT_ONCE:
            self.crowded.set()
        try:
            await self.open.wait()
        finally:
            self.now -= 1
        match request.match_info["name"]:
            case "none":
                raise web.HTTPNotFound
            case "large":
                return web.Response(body=bytes(4096))
            case name:
                return web.Response(body=name.encode())

    def sources(self, *names: str) -> list[NamedSource]:
        return [("images", PictureSource(image_url=f"{self.url}/{name}")) for name in names]


@pytest_asyncio.fixture(loop_scope="module")
async def shelf() -> AsyncIterator[PictureServer]:
    shelf, app = PictureServer(), web.Application()
    app.router.add_get("/{name}", shelf.answer)
    async with TestServer(app) as server:
        shelf.url = f"http://127.0.0.1:{server.port}"
        yield shelf
        shelf.open.set()


def configured(shelf: PictureServer) -> dict[str, Any]:
    return {"image_hosts": shelf.url.removeprefix("http://"), "webhook_networks": NETWORKS}


async def read(shelf: PictureServer, *names: str, capacity: int = 1 << 20) -> list[bytes]:
    grow = ByteReservation(SharedPool(capacity), Tenant("alice"))
    config, sources = GatewayConfig(**configured(shelf), max_file_bytes=1024), shelf.sources(*names)
    assert check_sources(config, sources)
    return await read_sources(config, grow, sources)


async def test_pictures_are_fetched_side_by_side_and_few_at_once(shelf: PictureServer) -> None:
    names = [f"picture-{number}" for number in range(17)]
    reading = asyncio.create_task(read(shelf, *names))
    await asyncio.wait_for(shelf.crowded.wait(), HUNG_S)
    shelf.open.set()
    assert await reading == [name.encode() for name in names]
    assert (shelf.asked, shelf.most) == (17, FETCHED_AT_ONCE)


async def test_one_time_limit_is_for_all_pictures_of_a_request(
    shelf: PictureServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "FETCH_S", 0.25)
    with pytest.raises(InvalidField, match=r"could not be fetched in 0\.25 s") as caught:
        await read(shelf, *map(str, range(17)))
    assert (caught.value.field, caught.value.received) == ("images", "17 pictures")
    assert shelf.asked <= FETCHED_AT_ONCE


@pytest.mark.parametrize(
    ("name", "capacity", "refusal"),
    [("none", 1 << 20, InvalidField), ("large", 1 << 20, PayloadTooLarge), ("good", 3, TooManyRequests)],
)
async def test_the_first_picture_that_fails_ends_the_others(
    shelf: PictureServer, name: str, capacity: int, refusal: type[Exception]
) -> None:
    shelf.open.set()
    with pytest.raises(refusal):
        await read(shelf, name, capacity=capacity)
    with pytest.raises(refusal):
        await read(shelf, *["one"] * (capacity > 3), name, capacity=capacity)


@asynccontextmanager
async def limited(nats_url: str, redis_url: str, folder: Path, shelf: PictureServer) -> AsyncIterator[Stage]:
    """A gateway at which alice may ask for two pictures a minute."""
    alice = f"alice-{secrets.token_hex(4)}"  # with idempotency keys that no other test has
    keys = write_keys(folder, {"sk-alice-123": alice}, {alice: TenantLimits(per_minute=2)})
    async with open_stage(nats_url, redis_url, folder, api_keys_file=keys, **configured(shelf)) as stage:
        yield stage


async def edit(stage: Stage, shelf: PictureServer, name: str, key: str | None, n: int = 1) -> int:
    headers = ALICE | ({"Idempotency-Key": key} if key else {})
    body = {"prompt": "a scarf", "n": n, "images": [{"image_url": f"{shelf.url}/{name}"}]}
    return (await stage.post("/v1/images/edits", json=body, headers=headers)).status


@pytest.mark.parametrize("keys", [(None, None, None), ("first", "second", "third"), ("same", "same", "same")])
async def test_pictures_are_fetched_for_no_more_than_a_tenant_may_ask_for(
    nats_url: str, redis_url: str, tmp_path: Path, shelf: PictureServer, keys: tuple[str | None, ...]
) -> None:
    shelf.open.set()
    async with limited(nats_url, redis_url, tmp_path, shelf) as stage:
        assert [await edit(stage, shelf, "none", key) for key in keys] == [400, 400, 429]
        assert shelf.asked == 2


async def test_a_repetition_of_a_job_in_progress_fetches_no_more_either(
    nats_url: str, redis_url: str, tmp_path: Path, shelf: PictureServer
) -> None:
    shelf.open.set()
    async with limited(nats_url, redis_url, tmp_path, shelf) as stage:
        stage.router.hold = asyncio.Event()
        first = asyncio.create_task(edit(stage, shelf, "a", "same"))
        await asyncio.wait_for(stage.router.held.wait(), HUNG_S)
        again = asyncio.create_task(edit(stage, shelf, "a", "same"))
        assert await edit(stage, shelf, "a", "same", n=2) == 429, "whichever of both comes first"
        stage.router.go_on()
        assert {await first, await again} == {200}
        assert len(stage.router.jobs) == 1
        assert shelf.asked == 2


async def test_an_edit_with_pictures_by_url_counts_once(
    nats_url: str, redis_url: str, tmp_path: Path, shelf: PictureServer
) -> None:
    shelf.open.set()
    async with limited(nats_url, redis_url, tmp_path, shelf) as stage:
        assert [await edit(stage, shelf, "a", None) for _ in range(3)] == [200, 200, 429]
        assert shelf.asked == 2
