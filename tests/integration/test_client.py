"""The NATS door through the library's client."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from nats.aio.msg import Msg

import giornata.client
from giornata.bus import bus
from giornata.bus.connection import barrier
from giornata.wire import codec, subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    InvalidField,
    JobCancelled,
    JobNotFound,
    MaskEmpty,
    ModelNotFound,
    PayloadTooLarge,
    ServiceUnavailable,
)
from giornata.wire.jobs import JobState
from giornata.wire.messages import DoneEvent, JobEstimate, PreviewEvent, StateEvent, StepEvent
from giornata_gateway.jobs import submission
from tests.integration.fake_router import picture_of
from tests.integration.gateway_fakes import Stage
from tests.patience import HUNG_MS, HUNG_S

pytestmark = pytest.mark.world


async def test_an_edit_with_its_progress(stage: Stage, nats_account: str) -> None:
    stage.router.steps_when = asyncio.Event()
    async with giornata.client.connect(nats_account) as client:
        edit = await client.edit(image=b"picture", mask=b"mask", prompt="a scarf", n=2, seed=4)
        assert edit.job_id in stage.router.jobs
        progress = []
        async for told in edit:
            progress.append(told)
            if isinstance(told, StateEvent) and told.state is JobState.RUNNING:
                stage.router.steps_when.set()
        result = await edit
    assert [told.state for told in progress if isinstance(told, StateEvent)] == [
        "queued",
        "preparing",
        "running",
    ]
    assert [(told.index, told.step) for told in progress if isinstance(told, StepEvent)] == [
        (index, step) for step in (1, 2, 3) for index in (0, 1)
    ]
    assert isinstance(progress[-1], DoneEvent)
    assert [(p.index, p.seed, p.data) for p in result.pictures] == [
        (0, 4, picture_of(0)),
        (1, 5, picture_of(1)),
    ]
    assert (result.width, result.height, result.errors) == (64, 48, ())


async def test_an_accepted_edit_tells_its_place_and_when_it_should_be_done(
    stage: Stage, nats_account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "FORECAST_MS", HUNG_MS)
    stage.router.forecast = JobEstimate(position=3, finish_ms=12_500)
    async with giornata.client.connect(nats_account) as client:
        edit = await client.edit(image=b"picture", prompt="a scarf")
        states = [told async for told in edit if isinstance(told, StateEvent)]
    assert [(told.queue_position, told.predicted_finish_s) for told in states] == [
        (3, 12.5),
        (None, None),
        (None, None),
    ]


async def test_an_edit_with_its_previews(stage: Stage, nats_account: str) -> None:
    async with giornata.client.connect(nats_account) as client:
        edit = await client.edit(image=b"picture", prompt="a scarf", n=2, partial_images=1)
        progress = [told async for told in edit]
    shown = [told for told in progress if isinstance(told, PreviewEvent)]
    assert [(told.index, told.step, told.partial_image_index, told.image) for told in shown] == [
        (0, 1, 0, b"\xff\xd8\0\1"),
        (1, 1, 0, b"\xff\xd8\1\1"),
    ]
    assert {told.job_id for told in shown} == {edit.job_id}
    assert "xff" not in repr(shown)  # who prints progress is not shown bytes


async def test_an_edit_is_cancelled(stage: Stage, nats_account: str) -> None:
    stage.router.hold = asyncio.Event()
    async with giornata.client.connect(nats_account) as client:
        edit = await client.edit(image=b"picture", prompt="a scarf")
        await stage.router.held.wait()
        await edit.cancel()
        with pytest.raises(JobCancelled):
            await edit.result()
        assert [told async for told in edit][-1].state is JobState.CANCELLED  # type: ignore[union-attr]
        with pytest.raises(JobNotFound):
            await client.cancel("job_unknown")


async def test_refusals_and_failures_are_raised_as_themselves(stage: Stage, nats_account: str) -> None:
    async with giornata.client.connect(nats_account) as client:
        with pytest.raises(InvalidField, match="n: Input should be"):
            await client.edit(image=b"picture", prompt="a scarf", n=99)
        with pytest.raises(ModelNotFound, match="tiny"):
            await client.edit(image=b"picture", prompt="a scarf", model="other")
        stage.router.failure = MaskEmpty()
        with pytest.raises(MaskEmpty):
            await (await client.edit(image=b"picture", prompt="a scarf"))


async def test_the_time_of_an_edit_ends(stage: Stage, nats_account: str) -> None:
    stage.router.hold = asyncio.Event()
    async with giornata.client.connect(nats_account) as client:
        edit = await client.edit(image=b"picture", prompt="a scarf", timeout_s=4)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineExceeded):
            await edit
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(4, abs=0.1)
    await stage.router.ended.wait()
    assert (await stage.record()).state is JobState.CANCELLED


async def test_progress_ends_for_everybody_who_reads_it(stage: Stage, nats_account: str) -> None:
    async with giornata.client.connect(nats_account) as client:
        edit = await client.edit(image=b"picture", prompt="a scarf")
        assert [told async for told in edit]
        async with asyncio.timeout(HUNG_S):
            assert [told async for told in edit] == []
            await edit
            await edit


async def test_a_gateway_that_falls_silent_is_not_waited_for_for_ever(nats_account: str) -> None:
    async def accept(message: Msg) -> None:
        progress = codec.unpack(message.data)["progress"]
        queued = StateEvent(job_id="job_1", state=JobState.QUEUED, attempt=0)
        await silent.client.publish(progress, codec.encode(queued), headers={"Giornata-Event": "state"})

    async with (
        bus.connect(nats_account, "silent") as silent,
        giornata.client.connect(nats_account) as client,
    ):
        await silent.client.subscribe(subjects.EDIT, cb=accept)
        await barrier(silent.client)
        edit = await client.edit(image=b"picture", prompt="a scarf", timeout_s=3)
        progress = aiter(edit)
        assert await anext(progress) == StateEvent(job_id="job_1", state=JobState.QUEUED, attempt=0)
        async with asyncio.timeout(HUNG_S):
            with pytest.raises(DeadlineExceeded):
                await anext(progress)
            with pytest.raises(DeadlineExceeded):
                await edit
        assert not client._edits


@pytest.mark.real_nats
async def test_a_mistake_uploads_nothing(stage: Stage, nats_url: str, redis_url: str) -> None:
    uploads = "giornata:*/upload_*"
    async with (
        redis.asyncio.from_url(redis_url) as store,
        giornata.client.connect(nats_url, blobs_url=redis_url) as client,
    ):
        before = set(await store.keys(uploads))
        with pytest.raises(InvalidField):
            await client.edit(image=b"x" * (7 << 20), prompt="a scarf", n=99)
        assert set(await store.keys(uploads)) <= before, "others' uploads end with their time"


async def test_nobody_answers(nats_account: str) -> None:
    async with giornata.client.connect(nats_account) as client:
        with pytest.raises(ServiceUnavailable):
            await client.edit(image=b"picture", prompt="a scarf")


@pytest.mark.real_nats
async def test_large_pictures_are_claim_checks(stage: Stage, nats_url: str, redis_url: str) -> None:
    large = b"x" * (7 << 20)
    stage.router.picture_bytes = 5 << 20
    async with giornata.client.connect(nats_url) as client:
        with pytest.raises(PayloadTooLarge, match="blobs_url"):
            await client.edit(image=large, prompt="a scarf")
        edit = await client.edit(image=b"picture", prompt="a scarf", n=2)
        with pytest.raises(PayloadTooLarge, match="blobs_url"):
            await edit
    async with giornata.client.connect(nats_url, blobs_url=redis_url) as client:
        result = await (await client.edit(image=large, mask=b"mask", prompt="a scarf", n=2))
    assert [picture.data for picture in result.pictures] == [picture_of(i, 5 << 20) for i in range(2)]
    job = (await stage.record()).job
    assert job.image is not None
    assert await stage.router.blobs.get(job.image) == large
