"""The NATS door through the library's client, and through bare messages."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest

import giornata.client
from giornata import bus, codec, subjects
from giornata.deadlines import Deadline
from giornata.errors import (
    DeadlineExceeded,
    GiornataError,
    InvalidField,
    JobCancelled,
    JobNotFound,
    MaskEmpty,
    ModelNotFound,
    PayloadTooLarge,
    ServiceUnavailable,
    TooManyRequests,
    Unauthorized,
)
from giornata.events import DoneEvent, StateEvent, StepEvent
from giornata.jobs import BlobRef, JobState
from giornata.messages import Accepted, CancelMessage, EditMessage, EditReply
from giornata.requests import EditParameters
from tests.integration.gateway_fakes import Stage, open_stage, picture_of

EXAMPLE = Path(__file__).parents[2] / "shared" / "examples" / "edit_over_nats.py"


async def test_an_edit_with_its_progress(stage: Stage, nats_url: str) -> None:
    async with giornata.client.connect(nats_url) as client:
        edit = await client.edit(image=b"picture", mask=b"mask", prompt="a scarf", n=2, seed=4)
        assert edit.job_id in stage.router.jobs
        progress = [told async for told in edit]
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


async def test_an_edit_is_cancelled(stage: Stage, nats_url: str) -> None:
    stage.router.hold = asyncio.Event()
    async with giornata.client.connect(nats_url) as client:
        edit = await client.edit(image=b"picture", prompt="a scarf")
        await stage.router.held.wait()
        await edit.cancel()
        with pytest.raises(JobCancelled):
            await edit.result()
        assert [told async for told in edit][-1].state is JobState.CANCELLED  # type: ignore[union-attr]
        with pytest.raises(JobNotFound):
            await client.cancel("job_unknown")


async def test_refusals_and_failures_are_raised_as_themselves(stage: Stage, nats_url: str) -> None:
    async with giornata.client.connect(nats_url) as client:
        with pytest.raises(InvalidField, match="n: Input should be"):
            await client.edit(image=b"picture", prompt="a scarf", n=99)
        with pytest.raises(ModelNotFound, match="tiny"):
            await client.edit(image=b"picture", prompt="a scarf", model="other")
        stage.router.failure = MaskEmpty()
        with pytest.raises(MaskEmpty):
            await (await client.edit(image=b"picture", prompt="a scarf"))


async def test_the_time_of_an_edit_ends(stage: Stage, nats_url: str) -> None:
    stage.router.hold = asyncio.Event()
    async with giornata.client.connect(nats_url) as client:
        edit = await client.edit(image=b"picture", prompt="a scarf", timeout_s=0.5)
        with pytest.raises(DeadlineExceeded):
            await edit
    async with asyncio.timeout(5):
        await stage.router.ended.wait()
    assert (await stage.record()).state is JobState.CANCELLED


async def test_nobody_answers(private_nats: Any) -> None:
    async with giornata.client.connect(private_nats.url) as client:
        with pytest.raises(ServiceUnavailable):
            await client.edit(image=b"picture", prompt="a scarf")


async def test_large_pictures_are_claim_checks(stage: Stage, nats_url: str, redis_url: str) -> None:
    large = b"x" * (7 << 20)
    stage.router.picture_bytes = 5 << 20
    async with giornata.client.connect(nats_url) as client:
        with pytest.raises(PayloadTooLarge, match="redis_url"):
            await client.edit(image=large, prompt="a scarf")
        edit = await client.edit(image=b"picture", prompt="a scarf", n=2)
        with pytest.raises(PayloadTooLarge, match="redis_url"):
            await edit
    async with giornata.client.connect(nats_url, redis_url=redis_url) as client:
        result = await (await client.edit(image=large, mask=b"mask", prompt="a scarf", n=2))
    assert [picture.data for picture in result.pictures] == [picture_of(i, 5 << 20) for i in range(2)]
    job = (await stage.record()).job
    assert await stage.router.blobs.get(job.image) == large


async def test_admission_is_shared_with_the_other_door(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    async with open_stage(nats_url, redis_url, tmp_path, max_concurrent_rows=1) as stage:
        stage.router.hold = asyncio.Event()
        request = asyncio.create_task(stage.edit())
        await stage.router.held.wait()
        async with giornata.client.connect(nats_url) as client:
            with pytest.raises(TooManyRequests):
                await client.edit(image=b"picture", prompt="a scarf")
        stage.router.hold.set()
        assert (await request)[0] == 200


async def test_keys_at_the_nats_door(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    keys = json.dumps({"sk-alice-123": "alice"})
    async with open_stage(nats_url, redis_url, tmp_path, api_keys=keys) as stage:
        async with giornata.client.connect(nats_url) as client:
            with pytest.raises(Unauthorized):
                await client.edit(image=b"picture", prompt="a scarf")
        async with giornata.client.connect(nats_url, api_key="sk-alice-123") as client:
            await (await client.edit(image=b"picture", prompt="a scarf"))
        assert (await stage.record()).job.tenant == "alice"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"progress": "giornata.jobs.batch"}, "progress"),
        ({"progress": "_INBOX.>"}, "progress"),
        ({"image": b""}, "image"),
        ({"image": BlobRef(key="bob/x", size_bytes=3, sha256="0" * 64)}, "image"),
        ({"image": BlobRef(key="default/none", size_bytes=3, sha256="0" * 64)}, "image"),
        ({"image": b"x" * (6 << 20), "mask": b"x"}, "image"),
        ({"remaining_ms": 0}, "remaining_ms"),
    ],
)
async def test_bad_messages_are_refused_by_name(
    stage: Stage, nats_url: str, changes: dict[str, Any], field: str
) -> None:
    message = EditMessage(parameters=EditParameters(prompt="a scarf"), image=b"picture").model_copy(
        update=changes
    )
    async with bus.connect(nats_url, "bare") as connected:
        with pytest.raises(GiornataError) as raised:
            await connected.call(
                subjects.EDIT, message, EditReply, Deadline.after_ms(3000), limit_bytes=8 << 20
            )
    assert (raised.value.status, raised.value.field) in {(400, field), (413, field)}
    assert not stage.router.jobs


async def test_parameters_are_refused_field_by_field(stage: Stage, nats_url: str) -> None:
    async with bus.connect(nats_url, "bare") as connected:
        fields = codec.unpack(codec.encode(EditMessage(parameters=EditParameters(prompt="x"), image=b"p")))
        fields["parameters"] |= {"stile": "y"}
        reply = await connected.client.request(subjects.EDIT, _packed(fields), timeout=3)
        assert codec.unpack(reply.data)["code"] == "unknown_field"
        accepted = await connected.call(
            subjects.EDIT_CANCEL, CancelMessage(job_id=await _done(stage)), Accepted, Deadline.after_ms(3000)
        )
        assert accepted.job_id in stage.router.jobs


async def test_the_example_edits_a_picture(
    stage: Stage, nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 20
    (tmp_path / "photo.png").write_bytes(b"picture")
    (tmp_path / "mask.png").write_bytes(b"mask")
    process = await asyncio.create_subprocess_exec(
        sys.executable, EXAMPLE, "photo.png", "mask.png", "a red scarf", cwd=tmp_path,
        env=os.environ | {"GIORNATA_NATS_URL": nats_url}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.count(b"step=") == 3
    assert (tmp_path / "edited.png").read_bytes() == picture_of(0)


async def _done(stage: Stage) -> str:
    _, answer = await stage.edit()
    return str(answer["giornata"]["job_id"])


def _packed(fields: dict[str, Any]) -> bytes:

    return bytes(msgpack.packb(fields))
