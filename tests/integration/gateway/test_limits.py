"""API keys that come and go while a gateway runs, what their tenants may do, and what one holds of all pools."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest

import giornata.client
from giornata.api_keys import TenantLimits
from giornata.wire.errors import ConcurrencyLimited, QueueFull, RateLimited, ServiceUnavailable
from giornata_gateway import admission, gateway
from tests.fakes.key_files import write_keys
from tests.integration.gateway.test_connections import one_answer
from tests.integration.gateway.test_hostile import LARGE, connection, upload
from tests.integration.gateway_fakes import Answer, Opening, Stage, leave
from tests.patience import HUNG_S

KEYS = {"sk-alice-123": "alice", "sk-robert-12": "bob"}
ALICE, BOB = ({"Authorization": f"Bearer {key}"} for key in KEYS)


Limiting = Callable[..., AbstractAsyncContextManager[Stage]]


@pytest.fixture
def limited(opening: Opening, tmp_path: Path) -> Limiting:
    """Opens a gateway with keys of alice, who has the limits that are given, and of bob."""

    def opened(**limits: Any) -> AbstractAsyncContextManager[Stage]:
        return opening(api_keys_file=write_keys(tmp_path, KEYS, {"alice": TenantLimits(**limits)}))

    return opened


async def edit(
    stage: Stage, headers: dict[str, str], path: str = "/v1/images/edits", **fields: str
) -> Answer:
    return await stage.post(path, data=stage.form(**fields), headers=headers)


async def test_keys_come_and_go_without_a_restart(
    limited: Limiting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "LOOK_S", 0.0)
    async with limited() as stage:

        async def status(key: str) -> int:
            return (await stage.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status

        assert [await status(key) for key in ("sk-alice-123", "sk-carol-123")] == [200, 401]
        write_keys(tmp_path, {"sk-carol-123": "carol"})
        assert [await status(key) for key in ("sk-alice-123", "sk-carol-123")] == [401, 200]
        (tmp_path / "keys.json").write_text("{")
        assert [await status(key) for key in ("sk-alice-123", "sk-carol-123")] == [401, 200]
        write_keys(tmp_path, {})
        assert [await status(key) for key in ("sk-alice-123", "sk-carol-123")] == [401, 401]
        os.unlink(tmp_path / "keys.json")  # noqa: PTH108 - what an operator does
        assert (await stage.get("/v1/models")).status == 401, "a gateway whose keys are gone is not open"


async def test_a_gateway_does_not_start_without_its_keys(opening: Opening, tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with opening(api_keys_file=tmp_path / "missing.json"):
            pass
    (refusals, others) = caught.value.split(ServiceUnavailable)
    assert "The API keys cannot be read from" in str(refusals and refusals.exceptions)
    assert others is None


async def test_pictures_a_minute(limited: Limiting) -> None:
    async with limited(per_minute=3) as stage:
        assert (await edit(stage, ALICE, n="4")).code == (400, "invalid_field")
        answer = (await edit(stage, ALICE, n="2")).expect(200)
        assert answer.headers["RateLimit-Policy"] == '"pictures";q=3;w=60'
        assert answer.headers["RateLimit"].startswith('"pictures";r=1;t=')
        answer = await edit(stage, ALICE, n="2")
        assert answer.code == (429, "rate_limit_exceeded")
        assert 1 <= int(answer.headers["Retry-After"]) <= 20
        assert answer.headers["RateLimit"].startswith('"pictures";r=1;t=')
        answer = (await edit(stage, ALICE, "/v1/jobs")).expect(202)
        assert answer.headers["RateLimit"].startswith('"pictures";r=0;t=')
        answer = await stage.post("/v1/templates", data=stage.form(b"picture", None), headers=ALICE)
        assert (answer.status, "Retry-After" in answer.headers) == (429, True)
        assert "RateLimit" not in (await edit(stage, BOB)).expect(200).headers
        refused = 'giornata_tenant_refusals_total{code="rate_limit_exceeded",tenant="alice"} 2.0'
        assert refused in (await stage.get("/metrics")).text


async def test_a_tenant_without_room_is_refused_before_its_pictures_are_read(limited: Limiting) -> None:
    async with limited(per_minute=1) as stage:
        assert (await edit(stage, ALICE)).status == 200
        headers = ALICE | {"Content-Type": "multipart/form-data; boundary=b"}
        assert (await stage.post("/v1/images/edits", data=b"not a form", headers=headers)).status == 429


async def test_pictures_in_progress_of_edits_and_of_jobs(limited: Limiting) -> None:
    async with limited(in_progress=3) as stage:
        stage.router.hold = asyncio.Event()
        job_id = (await stage.post("/v1/jobs", data=stage.form(n="2"), headers=ALICE)).json["id"]
        await stage.router.held.wait()
        waiting = await stage.begin(edit(stage, ALICE))
        for path in ("/v1/images/edits", "/v1/jobs"):
            answer = await edit(stage, ALICE, path)
            assert answer.code == (429, "concurrency_limit_exceeded")
            assert int(answer.headers["Retry-After"]) >= 1
        assert (await edit(stage, BOB, "/v1/jobs")).status == 202, "another tenant's pictures are not alice's"
        stage.router.go_on()
        assert (await waiting).status == 200
        stage.router.hold = None
        assert "image_edit.completed" in (await stage.get(f"/v1/jobs/{job_id}/events", headers=ALICE)).text
        assert (await edit(stage, ALICE, n="3")).status == 200
        assert (await edit(stage, ALICE, n="4")).code == (400, "invalid_field")


async def test_who_leaves_gives_its_pictures_back(limited: Limiting) -> None:
    async with limited(in_progress=1) as stage:
        gone = await stage.begin(edit(stage, ALICE))
        await leave(gone)
        await asyncio.wait_for(stage.router.ended.wait(), HUNG_S)
        stage.router.hold = None
        assert (await edit(stage, ALICE)).status == 200


async def test_an_edit_with_a_key_counts_until_it_ends_not_until_its_client_leaves(limited: Limiting) -> None:
    async with limited(in_progress=1) as stage:
        headers = ALICE | {"Idempotency-Key": secrets.token_hex(8)}
        gone = await stage.begin(edit(stage, headers))
        await leave(gone)
        await stage.get("/healthz")
        assert (await edit(stage, ALICE)).code == (429, "concurrency_limit_exceeded")
        again = asyncio.create_task(edit(stage, headers))
        stage.router.go_on()
        assert (await again).status == 200
        assert (await edit(stage, ALICE)).status == 200


async def test_an_edit_with_a_key_that_is_refused_counts_no_more_though_its_client_has_left(
    limited: Limiting,
) -> None:
    async with limited(in_progress=1) as stage:
        stage.router.refusals = [QueueFull()]
        stage.router.answer_when = asyncio.Event()
        gone = asyncio.create_task(edit(stage, ALICE | {"Idempotency-Key": secrets.token_hex(8)}))
        await stage.router.asked.wait()
        await leave(gone)
        await stage.get("/healthz")
        assert (await edit(stage, ALICE)).code == (429, "concurrency_limit_exceeded")
        accepting = [task for task in asyncio.all_tasks() if task.get_name().startswith("accept-")]
        stage.router.answer_when.set()
        await asyncio.wait(accepting)
        assert (await edit(stage, ALICE)).status == 200


async def test_limits_at_the_nats_door(limited: Limiting, nats_url: str) -> None:
    async with (
        limited(per_minute=2, in_progress=1, weight=0.5) as stage,
        giornata.client.connect(nats_url, api_key="sk-alice-123") as client,
    ):
        stage.router.hold = asyncio.Event()
        first = await client.edit(image=b"picture", prompt="x")
        with pytest.raises(ConcurrencyLimited) as busy:
            await client.edit(image=b"picture", prompt="x")
        assert busy.value.retry_after_s
        stage.router.go_on()
        await first
        await (await client.edit(image=b"picture", prompt="x"))
        with pytest.raises(RateLimited) as caught:
            await client.edit(image=b"picture", prompt="x")
        assert 0 < (caught.value.retry_after_s or 0) <= 30
        assert {job.weight for job in stage.router.jobs.values()} == {0.5}


async def test_without_keys_the_configuration_says_what_everybody_may_do(opening: Opening) -> None:
    async with opening(tenant_per_minute=1) as stage:
        assert (await edit(stage, {})).status == 200
        assert (await edit(stage, {})).code == (429, "rate_limit_exceeded")
        assert {job.weight for job in stage.router.jobs.values()} == {1.0}


async def test_no_key_is_in_the_log(limited: Limiting, capfd: pytest.CaptureFixture[str]) -> None:
    async with limited() as stage:
        assert (await edit(stage, ALICE)).status == 200
        assert (await edit(stage, {"Authorization": "Bearer sk-stranger-1"})).status == 401
    told = "".join(capfd.readouterr())
    assert "accepted" in told
    assert [key for key in (*KEYS, "sk-stranger-1") if key in told] == []


# One tenant holds all it can of a pool of the gateway. Another one is served, at once or within the
# pool's grace.


MIB: Final = 1 << 20
STREAM: Final = {"Accept": "text/event-stream"}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"api_keys_file": write_keys(tmp_path, {"sk-alice-123": "alice", "sk-robert-12": "bob"})}


async def edit_picture(stage: Stage, headers: dict[str, str], image: bytes = b"picture") -> Answer:
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
        assert (await edit_picture(stage, BOB, b"x" * 300_000)).status == 200
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
        running = await stage.begin(edit_picture(stage, ALICE))
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
