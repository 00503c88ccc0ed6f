"""Requests of one key at the same time, through several gateways and both doors, share one job."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import giornata.client
from giornata.bus import bus
from giornata.wire import codec, subjects
from giornata.wire.errors import (
    IdempotencyKeyReused,
    InvalidField,
)
from giornata.wire.jobs import JobState
from giornata.wire.messages import IDEMPOTENCY_HEADER, EditMessage, EditReply
from giornata.wire.requests import EditParameters
from giornata_gateway.intake.rules.idempotency import HEADER
from tests.integration.fake_router import picture_of
from tests.integration.gateway.repeating import edit, fresh, second_gateway, stored
from tests.integration.gateway_fakes import Stage


async def test_requests_at_the_same_time_share_one_job(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    stage.router.hold = asyncio.Event()
    key = fresh()
    async with second_gateway(stage, nats_url, redis_url, tmp_path) as second:
        running = [asyncio.create_task(edit(one, key)) for one in (stage, second) * 4]
        await stage.router.held.wait()
        late = asyncio.create_task(edit(second, key))
        stage.router.hold.set()
        answers = await asyncio.gather(*running, late)
    assert {status for status, _, _ in answers} == {200}
    assert len({answer["giornata"]["job_id"] for _, answer, _ in answers}) == 1
    assert [repeated for _, _, repeated in answers].count(False) == 1
    assert len(stage.router.jobs) == 1
    assert len(await stored(stage)) == 2, "the pictures of those that came second stayed behind"


async def test_of_two_edits_at_the_same_time_under_one_key_one_is_refused(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    stage.router.answer_when = asyncio.Event()
    key = fresh()
    async with second_gateway(stage, nats_url, redis_url, tmp_path) as second:
        running = [
            asyncio.create_task(edit(one, key, prompt=f"prompt {number}"))
            for number, one in enumerate((stage, second))
        ]
        await stage.router.asked.wait()
        stage.router.answer_when.set()
        answers = await asyncio.gather(*running)
    assert sorted(status for status, _, _ in answers) == [200, 422]
    assert len(stage.router.jobs) == 1
    assert len(await stored(stage)) == 2


async def test_who_leaves_cancels_nobodys_job(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    stage.router.hold = asyncio.Event()
    key = fresh()
    first = asyncio.create_task(edit(stage, key))
    await stage.router.held.wait()
    async with second_gateway(stage, nats_url, redis_url, tmp_path) as second:
        waiters = [asyncio.create_task(edit(one, key)) for one in (stage, second, second)]
        for gone in (first, waiters[1]):
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        for one in (stage, second):
            async with one.http.get("/healthz"):  # by now the gateway has seen them leave
                pass
        stage.router.hold.set()
        for waiter in (waiters[0], waiters[2]):
            status, _, repeated = await waiter
            assert (status, repeated) == (200, True)
    assert (await stage.record()).state is JobState.COMPLETED


async def test_a_gateway_that_leaves_keeps_the_job_for_another(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    stage.router.hold = asyncio.Event()
    key = fresh()
    async with second_gateway(stage, nats_url, redis_url, tmp_path, drain_s=0.1) as leaving:
        first = asyncio.create_task(edit(leaving, key))
        await stage.router.held.wait()
        leaving.stop.set()
        assert (await first)[0] == 503
        await leaving.serving
    again = asyncio.create_task(edit(stage, key))
    stage.router.hold.set()
    assert [(await again)[position] for position in (0, 2)] == [200, True]
    assert len(stage.router.jobs) == 1


async def test_a_stream_and_a_waiter_share_a_job_of_another_gateway(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    stage.router.hold = asyncio.Event()
    key = fresh()
    first = asyncio.create_task(edit(stage, key))
    await stage.router.held.wait()
    async with (
        second_gateway(stage, nats_url, redis_url, tmp_path) as second,
        second.http.post(
            "/v1/images/edits", data=stage.form(stream="true"), headers={HEADER: key}
        ) as response,
    ):
        stage.router.hold.set()
        assert "event: image_edit.completed" in await response.text()
        assert (await first)[0] == 200


async def test_the_nats_door_shares_keys_with_http(stage: Stage, nats_url: str) -> None:
    key = fresh()
    async with giornata.client.connect(nats_url) as client:
        edits = [
            await client.edit(image=b"picture", mask=b"mask", prompt="a red star", idempotency_key=key)
            for _ in range(2)
        ]
        results = [await one for one in edits]
        assert results[0].job_id == results[1].job_id
        assert [result.pictures[0].data for result in results] == [picture_of(0)] * 2
        status, answer, repeated = await edit(stage, key)
        assert (status, repeated, answer["giornata"]["job_id"]) == (200, True, results[0].job_id)
        with pytest.raises(IdempotencyKeyReused, match="its mask"):
            await client.edit(image=b"picture", prompt="a red star", idempotency_key=key)
        with pytest.raises(InvalidField, match="idempotency key"):
            await client.edit(image=b"picture", prompt="a red star", idempotency_key="x" * 256)
    assert len(stage.router.jobs) == 1


async def test_a_repetition_over_nats_needs_no_blob_any_more(stage: Stage, nats_url: str) -> None:
    ref = await stage.router.blobs.put(f"default/upload_{fresh()}/image", b"picture", 60)
    message = EditMessage(parameters=EditParameters(prompt="x"), image=ref)
    headers = {IDEMPOTENCY_HEADER: fresh()}
    async with bus.connect(nats_url, "test") as connected:
        told = []
        for _ in range(2):
            reply = await connected.client.request(
                subjects.EDIT, codec.encode(message), timeout=5, headers=headers
            )
            told.append(codec.decode(EditReply, reply.data))
            await stage.router.blobs.delete(ref)
    assert told[0] == told[1]
    assert len(stage.router.jobs) == 1
