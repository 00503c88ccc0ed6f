"""A gateway leaves: who has come is answered, who could come is told first, who only looks on is sent elsewhere.

A gateway comes: it takes edits over NATS once it knows of the fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest_asyncio

from giornata.bus.connection import barrier
from giornata.client import connect
from giornata.wire.subjects import TEMPLATES, bucket_stream
from tests.integration.gateway.repeating import second_gateway
from tests.integration.gateway.test_hostile import connection
from tests.integration.gateway.test_templates import get, register
from tests.integration.gateway_fakes import Stage, listening_port, open_gateway
from tests.patience import HUNG_S

BODY = (
    b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n'
    b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\nx\r\n--b--\r\n'
)
HEAD = (
    b"POST /v1/images/edits HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)


@pytest_asyncio.fixture(loop_scope="module")
async def other(stage: Stage, tmp_path: Path) -> AsyncIterator[Stage]:
    """A second gateway of the same fleet, which gives notice."""
    async with second_gateway(stage, tmp_path, notice_s=8) as opened:
        async with opened.http.get("/v1/fleet", headers={"Accept": "text/event-stream"}) as response:
            async for line in response.content:
                if stage.config.instance.encode() in line:
                    break
        yield opened


async def left(stage: Stage) -> None:
    """Return when no client can connect any more."""
    async with asyncio.timeout(HUNG_S):
        while True:
            try:
                async with stage.http.get("/healthz", headers={"Connection": "close"}):
                    await asyncio.sleep(0.05)  # the balancer's own
            except aiohttp.ClientConnectionError:
                return


async def test_requests_are_taken_while_others_do_not_know_yet(other: Stage) -> None:
    answer = await other.get("/readyz")
    assert (answer.status, answer.headers.get("Connection")) == (200, None)
    other.stop.set()
    answer = await other.get("/readyz")
    assert (answer.status, answer.headers["Connection"]) == (503, "close")
    assert answer.json["missing"] == ["gateway"]
    answer = await other.post("/v1/images/edits", data=other.form())
    assert (answer.status, answer.headers["Connection"]) == (200, "close")
    answer = await other.post("/v1/jobs", data=other.form())
    assert (answer.status, answer.headers["Connection"]) == (202, "close")
    await left(other)


async def test_who_has_come_is_answered_and_nobody_else_comes(stage: Stage) -> None:
    """There is no other gateway, so that no balancer waits for notice."""
    edit = await stage.begin(stage.edit())
    idle = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with (
        connection(stage, HEAD + BODY[:20]) as (reader, writer),
        connection(stage, idle) as (idle_reader, _),
    ):
        await idle_reader.readuntil(b"\r\n\r\n")
        stage.stop.set()
        await left(stage)
        await idle_reader.read()  # it is closed
        assert not edit.done()
        writer.write(BODY[20:])
        stage.router.go_on()
        assert (await edit).status == 200
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"\r\nConnection: close\r\n" in answer
        await stage.serving


async def test_edits_over_nats_are_finished_and_go_elsewhere(
    stage: Stage, nats_url: str, tmp_path: Path
) -> None:
    stage.router.hold = asyncio.Event()
    async with connect(nats_url) as client:
        edits = [await client.edit(image=b"i", prompt="x") for _ in range(3)]
        stage.stop.set()
        await left(stage)
        async with second_gateway(stage, tmp_path):
            edits.append(await client.edit(image=b"i", prompt="x"))
            stage.router.go_on()
            assert [len((await edit).pictures) for edit in edits] == [1] * 4
            assert len({job.gateway for job in stage.router.jobs.values()}) == 2


async def test_who_waits_for_a_template_is_told_how_far_it_is(stage: Stage) -> None:
    told = (await register(stage)).json
    nats = stage.router.bus.client
    watched = await nats.subscribe(f"$JS.API.CONSUMER.CREATE.{bucket_stream(TEMPLATES)}")
    await barrier(nats)
    waiting = asyncio.create_task(get(stage, f"/{told['id']}?wait_ms=60000"))
    await watched.next_msg(HUNG_S)  # the request has come, and its record is watched
    stage.stop.set()
    async with asyncio.timeout(HUNG_S):
        answer = (await waiting).expect(200)
        await stage.serving
    assert answer.json["state"] == "recording"


async def test_a_gateway_that_knows_of_no_fleet_leaves_edits_over_nats_to_others(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    stage.router.leads = False
    folder = tmp_path / "next"
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        opened = open_gateway(stage.router, nats_url, redis_url, folder, submit_window_s=60)
        opening = tasks.create_task(stack.enter_async_context(opened))
        await listening_port(folder / "port")
        async with connect(nats_url) as client:
            for _ in range(12):  # NATS deals them out by chance
                await (await client.edit(image=b"i", prompt="x"))
        assert {job.gateway for job in stage.router.jobs.values()} == {stage.config.instance}
        assert not opening.done()
        stage.router.leads = True
        await asyncio.wait_for(opening, HUNG_S)


async def test_a_gateway_without_a_router_answers_after_a_while_and_ends_before(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    stage.router.leads = False
    async with open_gateway(stage.router, nats_url, redis_url, tmp_path / "one", submit_window_s=0.01):
        pass
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        opened = open_gateway(stage.router, nats_url, redis_url, tmp_path / "two", submit_window_s=60)
        opening = tasks.create_task(stack.enter_async_context(opened))
        await listening_port(tmp_path / "two" / "port")
        opening.cancel()  # which stops the gateway
        async with asyncio.timeout(HUNG_S):
            await asyncio.wait([opening])
