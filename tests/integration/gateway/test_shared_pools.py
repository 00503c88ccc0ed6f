"""One tenant holds all it can of a pool of the gateway. Another one is served, at once or within the pool's grace."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from giornata.api_keys import TenantLimits
from giornata_gateway import gateway
from tests.fakes.key_files import write_keys
from tests.integration.gateway.test_connections import one_answer
from tests.integration.gateway.test_hostile import LARGE, connection, upload
from tests.integration.gateway_fakes import Answer, Opening, Stage
from tests.patience import HUNG_S

MIB: Final = 1 << 20
ALICE, BOB = ({"Authorization": f"Bearer {key}"} for key in ("sk-alice-123", "sk-robert-12"))
STREAM: Final = {"Accept": "text/event-stream"}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"api_keys_file": write_keys(tmp_path, {"sk-alice-123": "alice", "sk-robert-12": "bob"})}


async def edit(stage: Stage, headers: dict[str, str], image: bytes = b"picture") -> Answer:
    return await stage.post("/v1/images/edits", data=stage.form(image), headers=headers)


async def job(stage: Stage, headers: dict[str, str]) -> str:
    job_id = str((await stage.post("/v1/jobs", data=stage.form(), headers=headers)).json["id"])
    await stage.get(f"/v1/jobs/{job_id}/events", headers=headers)  # until it has ended
    return job_id


async def fleet(stage: Stage, headers: dict[str, str]) -> dict[str, Any]:
    answer = await stage.get("/v1/fleet", headers=headers)
    view: dict[str, Any] = answer.json
    return view


async def told(stage: Stage) -> str:
    return (await stage.get("/metrics")).text


async def used(stage: Stage, pool: str) -> float:
    """What is held of a pool."""
    return float((await told(stage)).partition(f'giornata_shared_pool_used{{pool="{pool}"}} ')[2].split()[0])


async def test_bodies_that_stop_keep_no_other_tenant_out(opening: Opening, options: dict[str, Any]) -> None:
    options |= {"max_held_bytes": 2 * MIB, "max_request_bytes": 2 * MIB, "receive_s": HUNG_S}
    async with opening(**options) as stage, AsyncExitStack() as held:
        readers = []
        for _ in range(3):  # with a connection's buffer each, they fill the pool
            reader, writer = await held.enter_async_context(connection(stage))
            writer.write(upload(700_000, 540_000, f"Authorization: {ALICE['Authorization']}\r\n"))
            await writer.drain()
            readers.append(reader)
        while await used(stage, "uploads") < 1_700_000:
            pass
        assert (await edit(stage, BOB, b"x" * 300_000)).status == 200
        answers = [asyncio.create_task(one_answer(reader)) for reader in readers]
        done, _ = await asyncio.wait(answers, timeout=HUNG_S, return_when=asyncio.FIRST_COMPLETED)
        assert [answer.result().split(b" ")[1] for answer in done] == [b"429"]
        assert (
            'giornata_shared_pool_outcomes_total{outcome="taken_back",pool="uploads",tenant="alice"} 1.0'
            in await told(stage)
        )
        for answer in answers:
            answer.cancel()


async def test_slow_readers_keep_no_other_tenant_out(
    opening: Opening, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "GRACE_S", 0.05)
    options |= {"max_held_bytes": 2 * LARGE, "max_request_bytes": 2 * MIB, "stall_s": 600}
    async with opening(**options) as stage, AsyncExitStack() as held:
        stage.router.picture_bytes = LARGE
        alices, bobs = await job(stage, ALICE), await job(stage, BOB)
        get = f"GET /v1/jobs/{alices}/image HTTP/1.1\r\nHost: x\r\nAuthorization: {ALICE['Authorization']}\r\n\r\n"
        readers = []
        for _ in range(2):
            reader, writer = await held.enter_async_context(connection(stage, receive_buffer=4096))
            writer.write(get.encode())
            assert b" 200 " in await reader.readline()
            readers.append(reader)
        async with asyncio.timeout(HUNG_S):
            for _ in range(3):  # what it had is kept for it
                assert len((await stage.get(f"/v1/jobs/{bobs}/image", headers=BOB)).body) == LARGE


async def test_streams_of_one_tenant_keep_no_other_out(opening: Opening, options: dict[str, Any]) -> None:
    async with opening(max_streams=2, **options) as stage, AsyncExitStack() as held:
        first, second = [
            await held.enter_async_context(stage.http.get("/v1/fleet", headers=ALICE | STREAM))
            for _ in range(2)
        ]
        async with stage.http.get("/v1/fleet", headers=BOB | STREAM) as bobs:
            assert bobs.status == 200
            async with asyncio.timeout(HUNG_S):
                assert (await first.read()).endswith(b"retry: 5000\n\n")
                assert b"event: fleet" in await second.content.readline()
            answer = await stage.get("/v1/fleet", headers=ALICE | STREAM)
            assert answer.code == (429, "too_many_streams")
            assert "event streams" in answer.error["message"]


async def test_a_tenant_is_told_of_models_and_its_own_load_and_an_operator_of_everything(
    opening: Opening, tmp_path: Path
) -> None:
    limits = {"alice": TenantLimits(operator=True)}
    keys = write_keys(tmp_path, {"sk-alice-123": "alice", "sk-robert-12": "bob"}, limits)
    async with opening(api_keys_file=keys) as stage:
        running = await stage.begin(edit(stage, ALICE))
        whole, own = [await fleet(stage, headers) for headers in (ALICE, BOB)]
        secret = {one[name] for one in whole["instances"] for name in ("host", "instance")}
        assert not any(word in json.dumps(own) for word in secret)
        models = [one["models"] for one in whole["instances"] if one["ready"]]
        assert [one["models"] for one in own["instances"]] == models
        assert all(one["instance"].startswith(one["service"]) for one in own["instances"])
        hidden = ("running_rows", "queued_jobs", "free_rows", "stores", "templates")
        assert [own[name] for name in hidden] == [0, None, None, None, None]
        assert own["workers"] == whole["workers"]
        stage.router.go_on()
        assert (await running).status == 200
