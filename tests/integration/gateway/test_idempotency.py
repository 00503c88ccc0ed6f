"""A request that is repeated under its key is answered by the job that it made."""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import giornata.client
from giornata.api_keys import TenantLimits
from giornata.bus import bus
from giornata.wire import codec, subjects
from giornata.wire.errors import (
    IdempotencyKeyReused,
    InvalidField,
    QueueFull,
    RowPoisoned,
)
from giornata.wire.jobs import JobState
from giornata.wire.messages import IDEMPOTENCY_HEADER, EditMessage, EditReply
from giornata.wire.requests import EditParameters
from giornata_gateway.jobs.preparation import HEADER
from tests.fakes.key_files import write_keys
from tests.integration.fake_router import picture_of
from tests.integration.gateway_fakes import Answer, ListedBlobs, Opening, Stage, leave, open_gateway
from tests.patience import HUNG_S


def fresh() -> str:
    """A key that no other test has."""
    return secrets.token_hex(8)


async def edit(
    stage: Stage, key: str, path: str = "/v1/images/edits", image: bytes = b"picture", /, **fields: str
) -> Answer:
    form = stage.form(image, **fields)
    return await stage.post(path, data=form, headers={HEADER: key})


@asynccontextmanager
async def second_gateway(stage: Stage, folder: Path, **options: Any) -> AsyncIterator[Stage]:
    """Another gateway in front of the same router."""
    servers = stage.config.nats_url, stage.config.blobs_url
    async with open_gateway(stage.router, *servers, folder / "second", **options) as opened:
        await stage.router.announce()
        yield opened


def stored(stage: Stage) -> list[str]:
    """Pictures that lie in the blob store for the router's jobs."""
    found = [key for job_id in stage.router.submitted for key in keys_below(stage, job_id)]
    return sorted(name for name in found if name.endswith(("/image", "/mask")))


def keys_below(stage: Stage, job_id: str) -> list[str]:
    """All keys of a job's pictures in the blob store in memory."""
    assert isinstance(stage.router.blobs, ListedBlobs)
    return [key for key in stage.router.blobs.keys if key.startswith(f"default/{job_id}/")]


async def test_the_same_key_is_the_same_job_and_nothing_is_computed_twice(stage: Stage) -> None:
    key = fresh()
    first = await edit(stage, key, n="2")
    again = await edit(stage, key, n="2")
    assert [(one.status, one.replayed) for one in (first, again)] == [(200, False), (200, True)]
    assert again.json["giornata"] == first.json["giornata"]
    assert [base64.b64decode(one["b64_json"]) for one in again.json["data"]] == [picture_of(0), picture_of(1)]
    assert len(stage.router.jobs) == len(stage.router.submitted) == 1
    other = await edit(stage, fresh(), n="2")
    assert (other.status, other.replayed) == (200, False)
    assert other.json["giornata"]["job_id"] != first.json["giornata"]["job_id"]


async def test_the_same_key_in_another_form_of_answer(stage: Stage) -> None:
    key = fresh()
    job_id = (await edit(stage, key)).json["giornata"]["job_id"]
    answer = await edit(stage, key, response_format="url")
    assert (answer.status, answer.replayed, job_id in answer.json["data"][0]["url"]) == (200, True, True)
    view = await edit(stage, key, "/v1/jobs")
    assert (view.status, view.replayed, view.json["id"], view.json["state"]) == (
        202,
        True,
        job_id,
        "completed",
    )
    answer = await stage.post(
        "/v1/images/edits", data=stage.form(response_format="image"), headers={HEADER: key}
    )
    assert (answer.status, answer.headers["Idempotent-Replayed"]) == (200, "true")
    assert answer.body == picture_of(0)


async def test_the_same_key_with_another_edit_is_refused_by_what_differs(stage: Stage) -> None:
    key = fresh()
    assert (await edit(stage, key)).status == 200
    for path in ("/v1/images/edits", "/v1/jobs"):
        answer = await edit(stage, key, path, prompt="another")
        assert answer.code == (422, "idempotency_key_reused")
        assert "its fields" in answer.error["received"]
        answer = await edit(stage, key, path, b"another picture")
        assert (answer.status, "its image or template" in answer.error["received"]) == (422, True)
    assert len(stage.router.jobs) == 1


async def test_a_client_that_lost_its_connection_comes_again_for_its_picture(stage: Stage) -> None:
    key = fresh()
    first = await stage.begin(edit(stage, key))
    await leave(first)
    stage.router.go_on()
    await asyncio.wait_for(stage.router.ended.wait(), HUNG_S)
    answer = await edit(stage, key)
    assert (answer.status, answer.replayed) == (200, True)
    assert base64.b64decode(answer.json["data"][0]["b64_json"]) == picture_of(0)


async def test_an_error_is_repeated_too_and_a_refusal_is_not(stage: Stage) -> None:
    key = fresh()
    stage.router.refusals = [QueueFull(retry_after_s=1)]
    assert (await edit(stage, key)).status == 429
    stage.router.failure = RowPoisoned()
    first = await edit(stage, key)
    stage.router.failure = None
    again = await edit(stage, key)
    assert first.error["code"] == again.error["code"] == "row_poisoned"
    assert [first.replayed, again.replayed] == [False, True]
    assert len(stage.router.jobs) == 1
    assert len(stored(stage)) == 2, "the pictures of the refused one stayed behind"


@pytest.mark.parametrize("keyed", [True, False])
async def test_pictures_stay_where_a_router_that_did_not_answer_may_have_queued_the_job(
    stage: Stage, keyed: bool
) -> None:
    """The first router may have died after it had queued the job; the next one, which refuses, does not know of it."""
    stage.router.silent, stage.router.refusals = 1, [QueueFull(retry_after_s=1)]
    status = (await edit(stage, fresh())).status if keyed else (await stage.edit()).status
    assert status == 429
    (job_id,) = stage.router.submitted
    assert len(stored(stage)) == 2
    stage.router.refusals = [QueueFull(retry_after_s=1)]
    assert (await stage.edit()).status == 429
    async with asyncio.timeout(HUNG_S):
        while len(stored(stage)) > 2:  # noqa: ASYNC110 - forgetting is not told
            await asyncio.sleep(0.02)
    assert len(stage.router.submitted) == 2
    assert all(job_id in key for key in keys_below(stage, job_id))


async def test_a_cancelled_job_stays_cancelled_under_its_key(stage: Stage) -> None:
    key = fresh()
    submitted = await stage.begin(edit(stage, key, "/v1/jobs"))
    job_id = (await submitted).json["id"]
    waiting = asyncio.create_task(edit(stage, key))
    assert (await stage.ask("DELETE", f"/v1/jobs/{job_id}")).status == 202
    for answer in (await waiting, await edit(stage, key)):
        assert (*answer.code, answer.error["job_id"]) == (409, "job_cancelled", job_id)


async def test_a_key_whose_record_is_gone_is_new(stage: Stage) -> None:
    key = fresh()
    job_id = (await edit(stage, key)).json["giornata"]["job_id"]
    await stage.router.records.bucket.purge(job_id)
    assert not (await edit(stage, key, prompt="another")).expect(200).replayed
    assert (await stage.router.records.get(job_id)).job.parameters.prompt == "another"


async def test_a_picture_that_is_gone_is_not_computed_again(stage: Stage) -> None:
    key = fresh()
    job_id = (await edit(stage, key)).json["giornata"]["job_id"]
    row = (await stage.router.records.get(job_id)).rows[0]
    assert row.image is not None
    await stage.router.blobs.delete(row.image)
    assert (await edit(stage, key)).code == (410, "result_expired")


async def test_a_stream_is_told_again_from_its_beginning(stage: Stage) -> None:
    key = fresh()
    told = []
    for _ in range(2):
        answer = (
            await stage.post("/v1/images/edits", data=stage.form(stream="true"), headers={HEADER: key})
        ).expect(200)
        told.append((answer.text, answer.headers.get("Idempotent-Replayed")))
    frames = (
        re.sub(r"(?m)^:.*\n", "", text).split("\n\n") for text, _ in told
    )  # comments keep proxies awake
    first, again = ([one for one in each if one.startswith("id: ")] for each in frames)
    assert first == again, "steps have no ids, and are told live alone"
    assert again[-1].splitlines()[1] == "event: image_edit.completed"
    assert [repeated for _, repeated in told] == [None, "true"]
    assert len(stage.router.jobs) == 1


async def test_tenants_do_not_share_keys_and_repetitions_count_for_no_limit(
    opening: Opening, tmp_path: Path
) -> None:
    names = {name: f"{name}-{fresh()}" for name in ("alice", "bob")}
    keys = write_keys(
        tmp_path,
        {"sk-alice-123": names["alice"], "sk-robert-12": names["bob"]},
        {names["alice"]: TenantLimits(per_minute=1, in_progress=1, weight=2.5)},
    )
    async with opening(api_keys_file=keys) as stage:
        key = fresh()
        jobs = set()
        for owner in ("sk-alice-123", "sk-robert-12", "sk-alice-123"):
            headers = {HEADER: key, "Authorization": f"Bearer {owner}"}
            answer = (await stage.post("/v1/images/edits", data=stage.form(), headers=headers)).expect(200)
            jobs.add(answer.headers["X-Giornata-Job"])
        assert jobs == stage.router.jobs.keys()
        assert {job.tenant: job.weight for job in stage.router.jobs.values()} == {
            names["alice"]: 2.5,
            names["bob"]: 1.0,
        }
        assert 'giornata_repeated_requests_total{door="http"} 1.0' in (await stage.get("/metrics")).text


async def test_requests_at_the_same_time_share_one_job(stage: Stage, tmp_path: Path) -> None:
    stage.router.hold = asyncio.Event()
    key = fresh()
    async with second_gateway(stage, tmp_path) as second:
        running = [asyncio.create_task(edit(one, key)) for one in (stage, second) * 4]
        await stage.router.held.wait()
        late = asyncio.create_task(edit(second, key))
        stage.router.go_on()
        answers = await asyncio.gather(*running, late)
    assert {answer.status for answer in answers} == {200}
    assert len({answer.json["giornata"]["job_id"] for answer in answers}) == 1
    assert [answer.replayed for answer in answers].count(False) == 1
    assert len(stage.router.jobs) == 1
    assert len(stored(stage)) == 2, "the pictures of those that came second stayed behind"


async def test_of_two_edits_at_the_same_time_under_one_key_one_is_refused(
    stage: Stage, tmp_path: Path
) -> None:
    stage.router.answer_when = asyncio.Event()
    key = fresh()
    async with second_gateway(stage, tmp_path) as second:
        running = [
            asyncio.create_task(edit(one, key, prompt=f"prompt {number}"))
            for number, one in enumerate((stage, second))
        ]
        await stage.router.asked.wait()
        stage.router.answer_when.set()
        answers = await asyncio.gather(*running)
    assert sorted(answer.status for answer in answers) == [200, 422]
    assert len(stage.router.jobs) == 1
    assert len(stored(stage)) == 2


async def test_who_leaves_cancels_nobodys_job(stage: Stage, tmp_path: Path) -> None:
    key = fresh()
    first = await stage.begin(edit(stage, key))
    async with second_gateway(stage, tmp_path) as second:
        waiters = [asyncio.create_task(edit(one, key)) for one in (stage, second, second)]
        for gone in (first, waiters[1]):
            await leave(gone)
        for one in (stage, second):
            await one.get("/healthz")
        stage.router.go_on()
        for waiter in (waiters[0], waiters[2]):
            assert (await waiter).expect(200).replayed
    assert (await stage.record()).state is JobState.COMPLETED


async def test_a_gateway_that_leaves_keeps_the_job_for_another(stage: Stage, tmp_path: Path) -> None:
    stage.router.hold = asyncio.Event()
    key = fresh()
    async with second_gateway(stage, tmp_path, drain_s=0.1) as leaving:
        first = asyncio.create_task(edit(leaving, key))
        await stage.router.held.wait()
        leaving.stop.set()
        assert (await first).status == 503
        await leaving.serving
    again = asyncio.create_task(edit(stage, key))
    stage.router.go_on()
    assert (await again).expect(200).replayed
    assert len(stage.router.jobs) == 1


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
        answer = await edit(stage, key)
        assert (answer.status, answer.replayed, answer.json["giornata"]["job_id"]) == (
            200,
            True,
            results[0].job_id,
        )
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
                subjects.EDIT, codec.encode(message), timeout=HUNG_S, headers=headers
            )
            told.append(codec.decode(EditReply, reply.data))
            await stage.router.blobs.delete(ref)
    assert told[0] == told[1]
    assert len(stage.router.jobs) == 1
