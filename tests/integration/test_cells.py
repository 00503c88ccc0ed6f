"""Two cells on one NATS: real routers and a real gateway, with workers that compute nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from giornata.blobs import RedisBlobs
from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.bus.bus import Bus
from giornata.config import new_instance
from giornata.nats_users import password_file
from giornata.records import Records
from giornata.wire import stores
from giornata.wire.cells import MAIN
from giornata.wire.jobs import Job, JobState
from giornata.wire.permissions import User
from giornata.wire.queues import CostFit
from giornata_gateway import service
from giornata_gateway.cells import choice
from giornata_gateway.config import GatewayConfig
from tests.configs import configured
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.fleet import FakePrepost
from tests.integration.gateway_fakes import listening_port
from tests.integration.nats_server import NatsServer
from tests.integration.router.bench import COSTS, running_router
from tests.patience import HUNG_S

OTHER = "b"

PLACES = 8
SLOW = CostFit(weights=(1000.0, 0.0, 0.0, 0.0, 0.0, 0.0), r2=1.0, residual_ms=0.0, samples=1, outliers=0)
"""A step of a second, as a denoiser tells it."""


@dataclass
class Deployment:
    """A gateway, and cells that can be added; every service has its own rights in NATS."""

    server: NatsServer
    users: Path
    stack: AsyncExitStack
    url: str = ""
    http: aiohttp.ClientSession = field(init=False)
    denoisers: dict[str, FakeDenoiser] = field(default_factory=dict)
    routers: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def bus(self, user: User, name: str) -> Bus:
        password = password_file(self.users, user)
        opened = buses.connect(self.server.url, name, user=user, password_file=password)
        return await self.stack.enter_async_context(opened)

    async def add(self, cell: str, *, queue_limit: int = 100) -> None:
        """Start a cell: a router, a prepost, a denoiser."""
        router, worker = await self.bus(User.ROUTER, f"setup-{cell}"), await self.bus(User.DENOISER, cell)
        size = stores.STORE_BYTES // 3
        await streams.ensure(router.jetstream, replicas=1, events_ttl_s=60, store_bytes=size, cell=cell)
        records = await Records.open(worker.jetstream, cell)
        denoiser = self.denoisers[cell] = FakeDenoiser(
            worker,
            records,
            f"denoiser-{cell}",
            cell=cell,
            capacity=PLACES,
            costs=COSTS.model_copy(update={"compute": SLOW}),
        )
        prepost = FakePrepost(await self.bus(User.PREPOST, f"prepost-{cell}"), f"prepost-{cell}", cell=cell)
        self.routers[cell] = await self.stack.enter_async_context(
            running_router(
                self.server.url,
                f"router-{cell}",
                password_file=password_file(self.users, User.ROUTER),
                cell=cell,
                queue_limit=queue_limit,
                store_bytes=size,
            )
        )
        await self.stack.enter_async_context(prepost.run())
        await self.stack.enter_async_context(denoiser.run())

    async def hears(self, *cells: str) -> None:
        """Return when the gateway tells of these cells' workers."""
        async with asyncio.timeout(HUNG_S):
            while True:
                fleet = await self.get("/v1/fleet")
                found = {one["cell"] for one in fleet["instances"] if one["service"] == "denoiser"}
                if found == set(cells) and fleet["predicted_wait_s"] is not None:
                    return
                await asyncio.sleep(0.1)

    async def get(self, path: str) -> dict[str, Any]:
        async with self.http.get(path) as answer:
            told = await answer.json()
            assert answer.status == 200, told
            return dict(told)

    async def submit(self, key: str | None = None) -> tuple[int, dict[str, Any]]:
        """Submit an edit that is not waited for."""
        form = aiohttp.FormData({"prompt": "a red star"})
        form.add_field("image", b"picture", filename="image.png", content_type="image/png")
        headers = {"Idempotency-Key": key} if key else {}
        async with self.http.post("/v1/jobs", data=form, headers=headers) as answer:
            return answer.status, await answer.json()

    async def accepted(self, key: str | None = None) -> str:
        """Submit an edit; its job."""
        status, told = await self.submit(key)
        assert status in {200, 202}, told
        return str(told["id"])

    async def ended(self, job_id: str) -> str:
        """The state in which a job ended."""
        async with asyncio.timeout(HUNG_S):
            while True:
                told = await self.get(f"/v1/jobs/{job_id}")
                if JobState(told["state"]).terminal:
                    return str(told["state"])
                await asyncio.sleep(0.05)

    def jobs(self, cell: str) -> list[Job]:
        """The jobs that a cell's denoiser was asked to compute."""
        return [request.job for request in self.denoisers[cell].requests]


@pytest.fixture
async def deployment(
    guarded_nats: tuple[NatsServer, Path], redis_url: str, tmp_path: Path
) -> AsyncIterator[Deployment]:
    server, users = guarded_nats
    async with AsyncExitStack() as stack:
        made = Deployment(server, users, stack)
        await open_gateway(made, redis_url, tmp_path)
        yield made


async def open_gateway(made: Deployment, redis_url: str, folder: Path) -> None:
    """Put one more gateway in front; it is asked from now on."""
    config = configured(
        GatewayConfig,
        nats_url=made.server.url,
        blobs_url=redis_url,
        instance=new_instance("gateway"),
        port=0,
        port_file=folder / new_instance("port"),
        submit_window_s=5,
    )
    front = await made.bus(User.GATEWAY, config.instance)
    blobs = await made.stack.enter_async_context(RedisBlobs.open(redis_url))
    await streams.ensure_shared(
        front.jetstream, replicas=1, events_ttl_s=60, store_bytes=stores.STORE_BYTES // 3
    )
    stop = asyncio.Event()
    tasks = await made.stack.enter_async_context(asyncio.TaskGroup())
    tasks.create_task(service.serve(config, front, blobs, stop))
    made.stack.callback(stop.set)
    assert config.port_file is not None
    http = aiohttp.ClientSession(f"http://127.0.0.1:{await listening_port(config.port_file)}")
    made.http = await made.stack.enter_async_context(http)


@pytest.fixture
async def both(deployment: Deployment) -> Deployment:
    """Two cells that the gateway knows."""
    await deployment.add(MAIN)
    await deployment.add(OTHER)
    await deployment.hears(MAIN, OTHER)
    return deployment


async def test_a_cell_is_added_and_edits_stay_where_they_are(deployment: Deployment) -> None:
    await deployment.add(MAIN)
    await deployment.hears(MAIN)
    first = await deployment.accepted("a key")
    assert await deployment.ended(first) == "completed"
    await deployment.add(OTHER)
    await deployment.hears(MAIN, OTHER)
    assert await deployment.accepted("a key") == first, "wherever its key leads now"
    jobs = [await deployment.accepted() for _ in range(3)]
    assert [await deployment.ended(job) for job in jobs] == ["completed"] * 3
    own = choice.of_tenant("default", [MAIN, OTHER])[0]
    assert {job.job_id for job in deployment.jobs(own)} - {first} == set(jobs), "an idle tenant has one cell"


async def test_edits_go_where_the_wait_is_shorter(both: Deployment) -> None:
    own, other = choice.of_tenant("default", [MAIN, OTHER])
    both.denoisers[own].going.clear()
    held = [await both.accepted() for _ in range(PLACES)]
    await both.denoisers[own].news.until(lambda: len(both.jobs(own)) == PLACES)
    queued: list[str] = []
    async with asyncio.timeout(HUNG_S):
        while not both.jobs(other):  # the router tells of its wait a moment later
            queued.append(await both.accepted())
            await asyncio.sleep(0.2)
    assert await both.ended(both.jobs(other)[0].job_id) == "completed", "while the first cell does nothing"
    both.denoisers[own].going.set()
    assert {await both.ended(job) for job in (*held, *queued)} == {"completed"}


async def test_what_one_cell_refuses_another_takes(deployment: Deployment) -> None:
    own, other = choice.of_tenant("default", [MAIN, OTHER])
    await deployment.add(own, queue_limit=1)
    await deployment.add(other, queue_limit=1)
    await deployment.hears(MAIN, OTHER)
    for denoiser in deployment.denoisers.values():
        denoiser.going.clear()
    jobs = [await deployment.accepted() for _ in range(2)]
    status, refused = await deployment.submit()
    assert (status, refused["error"]["code"]) == (429, "batch_queue_full")
    for denoiser in deployment.denoisers.values():
        denoiser.going.set()
    assert [await deployment.ended(job) for job in jobs] == ["completed"] * 2
    assert [len(deployment.jobs(cell)) for cell in (own, other)] == [1, 1]


async def test_every_gateway_finds_a_job_of_a_cell_without_a_router(
    both: Deployment, redis_url: str, tmp_path: Path
) -> None:
    keys = (f"key {number}" for number in range(50))
    jobs: dict[str, str] = {}
    cells: set[str] = set()
    while cells != {MAIN, OTHER}:  # an edit with a key goes where its key leads
        key = next(keys)
        jobs[key] = job = await both.accepted(key)
        assert await both.ended(job) == "completed"
        found = [cell for cell in (MAIN, OTHER) if job in {one.job_id for one in both.jobs(cell)}]
        assert len(found) == 1
        cells.add(found[0])
    for router in both.routers.values():
        router.cancel()
    await open_gateway(both, redis_url, tmp_path)
    for job in jobs.values():
        assert await both.ended(job) == "completed", "an edit that has ended needs no router"
    async with both.http.get("/v1/jobs/job_unknown") as answer:
        assert answer.status == 404


async def test_a_job_is_cancelled_and_followed_in_its_cell(both: Deployment) -> None:
    own, other = choice.of_tenant("default", [MAIN, OTHER])
    for denoiser in both.denoisers.values():
        denoiser.going.clear()
    job = await both.accepted()
    await both.denoisers[own].news.until(lambda: len(both.jobs(own)) == 1)
    async with both.http.get(f"/v1/jobs/{job}/events") as followed:
        async with both.http.delete(f"/v1/jobs/{job}") as answer:
            assert answer.status == 202
        told = (await asyncio.wait_for(followed.read(), HUNG_S)).decode()
    assert "job_cancelled" in told
    assert await both.ended(job) == "cancelled"
    assert both.jobs(other) == []
