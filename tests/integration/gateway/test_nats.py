"""The NATS door: who may what, how much, and what it says to bare messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgpack
import pytest

import giornata.client
from giornata.bus import bus
from giornata.deadlines import Deadline
from giornata.wire import codec, subjects
from giornata.wire.codec import NAMES, TEXT_BYTES
from giornata.wire.errors import GiornataError, InvalidField, JobNotFound, TooManyRequests, Unauthorized
from giornata.wire.jobs import BlobRef
from giornata.wire.messages import CancelMessage, EditMessage, EditReply, JobAck
from giornata.wire.requests import EditParameters
from tests.fakes.key_files import write_keys
from tests.integration.gateway_fakes import Opening, Stage
from tests.patience import HUNG_MS, HUNG_S


async def test_bytes_in_flight_are_limited_at_this_door_too(nats_url: str, opening: Opening) -> None:
    options = {"max_held_bytes": 2 << 20, "max_request_bytes": 2 << 20}
    async with opening(**options) as stage:
        stage.router.hold = asyncio.Event()
        async with giornata.client.connect(nats_url) as client:
            first = await client.edit(image=b"x" * (700 << 10), prompt="a scarf")
            with pytest.raises(TooManyRequests) as refused:
                await client.edit(image=b"x" * (700 << 10), prompt="a scarf")
            assert refused.value.retry_after_s
            stage.router.go_on()
            await first
            await (await client.edit(image=b"x" * (700 << 10), prompt="a scarf"))


async def test_admission_is_shared_with_the_other_door(nats_url: str, opening: Opening) -> None:
    async with opening(max_concurrent_rows=1) as stage:
        request = await stage.begin(stage.edit())
        async with giornata.client.connect(nats_url) as client:
            with pytest.raises(TooManyRequests):
                await client.edit(image=b"picture", prompt="a scarf")
        stage.router.go_on()
        assert (await request).status == 200


async def test_keys_at_the_nats_door(nats_url: str, opening: Opening, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, {"sk-alice-123": "alice", "sk-robert-12": "bob"})
    async with opening(api_keys_file=keys) as stage:
        async with giornata.client.connect(nats_url) as client:
            with pytest.raises(Unauthorized):
                await client.edit(image=b"picture", prompt="a scarf")
        async with giornata.client.connect(nats_url, api_key="sk-alice-123") as client:
            await (await client.edit(image=b"picture", prompt="a scarf"))
            job = (await stage.record()).job
            assert job.tenant == "alice"
            await client.cancel(job.job_id)
        for other, error in (
            ("sk-robert-12", JobNotFound),
            (None, Unauthorized),
            ("sk-wrong-1", Unauthorized),
        ):
            async with giornata.client.connect(nats_url, api_key=other) as client:
                with pytest.raises(error):
                    await client.cancel(job.job_id)
        assert job.image is not None
        bobs = EditMessage(parameters=EditParameters(prompt="x"), image=job.image, api_key="sk-robert-12")
        async with bus.connect(nats_url, "bare") as connected:
            with pytest.raises(InvalidField, match="not of this tenant"):
                await connected.call(subjects.EDIT, bobs, EditReply, Deadline.after_ms(HUNG_MS))
            own = bobs.model_copy(update={"api_key": "sk-alice-123"})
            reply = await connected.call(subjects.EDIT, own, EditReply, Deadline.after_ms(HUNG_MS))
        assert reply.job_id != job.job_id
        assert await stage.router.blobs.has(job.image)  # the caller's own blob outlives the job


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
        data = codec.encode(message, limit_bytes=8 << 20)
        reply = await connected.client.request(subjects.EDIT, data, timeout=HUNG_S)
        with pytest.raises(GiornataError) as raised:
            bus.answer_in(reply, EditReply)
    assert (raised.value.status, raised.value.field) in {(400, field), (413, field)}
    assert not stage.router.jobs


async def test_parameters_are_refused_field_by_field(stage: Stage, nats_url: str) -> None:
    async with bus.connect(nats_url, "bare") as connected:
        fields = codec.unpack(codec.encode(EditMessage(parameters=EditParameters(prompt="x"), image=b"p")))
        fields["parameters"] |= {"stile": "y"}
        reply = await connected.client.request(subjects.EDIT, _packed(fields), timeout=HUNG_S)
        assert codec.unpack(reply.data)["code"] == "unknown_field"
        many = {f"{i}" * 60: "y" for i in range(NAMES)}
        no_text = {b"\xff%d" % i: "y" for i in range(NAMES)}
        for parameters in (many, no_text, {"x" * TEXT_BYTES: "y"}, {b"\xff": 1}, [1], None, "x"):
            reply = await connected.client.request(
                subjects.EDIT, _packed(fields | {"parameters": parameters}), timeout=HUNG_S
            )
            assert codec.unpack(reply.data)["field"] == "parameters"
        for beyond in (many | {"one": "more"}, {"x" * (TEXT_BYTES + 1): "y"}):
            reply = await connected.client.request(
                subjects.EDIT, _packed(fields | {"parameters": beyond}), timeout=HUNG_S
            )
            assert codec.unpack(reply.data)["code"] == "malformed_message"
        accepted = await connected.call(
            subjects.EDIT_CANCEL, CancelMessage(job_id=await _done(stage)), JobAck, Deadline.after_ms(HUNG_MS)
        )
        assert accepted.job_id in stage.router.jobs


async def _done(stage: Stage) -> str:
    answer = (await stage.edit()).json
    return str(answer["giornata"]["job_id"])


def _packed(fields: dict[str, Any]) -> bytes:

    return bytes(msgpack.packb(fields))


@pytest.mark.parametrize("subject", [subjects.EDIT, subjects.GENERATE])
@pytest.mark.parametrize("inside", [False, True])
async def test_a_webhook_is_refused_with_the_reason(
    stage: Stage, nats_url: str, subject: str, *, inside: bool
) -> None:
    webhook = {"webhook": "https://example.org/hook"}
    fields = {"schema": 1, "parameters": {"prompt": "x"}, "image": b"p"}
    fields = fields | ({"parameters": {"prompt": "x"} | webhook} if inside else webhook)
    async with bus.connect(nats_url, "bare") as connected:
        reply = await connected.client.request(subject, _packed(fields), timeout=HUNG_S)
    told = codec.unpack(reply.data)
    assert (told["code"], told["field"]) == ("invalid_field", "webhook")
    assert "POST /v1/jobs" in told["accepted"]
    assert not stage.router.jobs


@pytest.mark.parametrize(
    ("subject", "misplaced", "accepted"),
    [
        (subjects.EDIT, {"seed": 7}, "seed within parameters"),
        (subjects.GENERATE, {"num_inference_steps": 4}, "num_inference_steps within parameters"),
        (subjects.EDIT, {"idempotency_key": "k"}, "header Nats-Msg-Id"),
        (subjects.GENERATE, {"Idempotency-Key": "k"}, "header Nats-Msg-Id"),
        (subjects.GENERATE, {"image": b"p"}, "no image"),
        (subjects.GENERATE, {"template_id": "t"}, "no template_id"),
    ],
)
async def test_what_stands_where_it_is_not_read_is_refused(
    stage: Stage, nats_url: str, subject: str, misplaced: dict[str, Any], accepted: str
) -> None:
    picture = {"image": b"p"} if subject == subjects.EDIT else {}
    fields = {"schema": 1, "parameters": {"prompt": "x"}, **picture, **misplaced}
    async with bus.connect(nats_url, "bare") as connected:
        reply = await connected.client.request(subject, _packed(fields), timeout=HUNG_S)
    told = codec.unpack(reply.data)
    assert (told["code"], told["field"]) == ("invalid_field", next(iter(misplaced)))
    assert accepted in told["accepted"]
    assert not stage.router.jobs


async def test_a_name_of_a_later_version_is_ignored(stage: Stage, nats_url: str) -> None:
    fields = {"schema": 1, "parameters": {"prompt": "x"}, "image": b"p", "of_a_later_version": {"a": 1}}
    async with bus.connect(nats_url, "bare") as connected:
        reply = await connected.client.request(subjects.EDIT, _packed(fields), timeout=HUNG_S)
    assert codec.unpack(reply.data)["job_id"] in stage.router.jobs


async def test_partial_images_without_a_subject_for_progress_are_refused(stage: Stage, nats_url: str) -> None:
    message = EditMessage(parameters=EditParameters(prompt="x", partial_images=1), image=b"picture")
    async with bus.connect(nats_url, "bare") as connected:
        with pytest.raises(InvalidField, match="told as progress") as refused:
            await connected.call(subjects.EDIT, message, EditReply, Deadline.after_ms(HUNG_MS))
    assert refused.value.field == "partial_images"
    assert not stage.router.jobs
