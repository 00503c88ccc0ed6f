"""`/v1/jobs` in front of a scripted router."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from giornata.wire.errors import MaskEmpty, RowPoisoned
from giornata.wire.jobs import Priority
from giornata.wire.messages import JobEstimate
from giornata.wire.workers import RowProgress
from giornata_gateway.jobs import submission
from tests.integration.fake_router import CARD, PAINTER, picture_of
from tests.integration.gateway_fakes import Opening, Stage, open_gateway
from tests.patience import HUNG_MS, HUNG_S


async def submit(stage: Stage, **fields: str) -> str:
    answer = (await stage.post("/v1/jobs", data=stage.form(**fields))).expect(202)
    view = answer.json
    assert answer.headers["Location"] == f"/v1/jobs/{view['id']}"
    return str(view["id"])


async def held(stage: Stage, **fields: str) -> str:
    """The id of a job that waits at its first step."""
    return await (await stage.begin(submit(stage, **fields)))


async def frames_of(stage: Stage, job_id: str, after: str | None = None) -> list[dict[str, Any]]:
    """Frames of a job's event stream: id, event, data."""
    headers = {"Last-Event-ID": after} if after else {}
    answer = (await stage.get(f"/v1/jobs/{job_id}/events", headers=headers)).expect(200)
    assert answer.content_type == "text/event-stream"
    return read(answer.text)


def read(text: str) -> list[dict[str, Any]]:
    """The frames in a stream's text."""
    frames = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        frames.append({"id": fields.get("id"), "event": fields["event"], "data": json.loads(fields["data"])})
    return frames


async def test_a_job_from_submission_to_picture(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "FORECAST_MS", HUNG_MS)
    job_id = await held(stage, n="2", seed="5")
    stage.router.progress = tuple(
        RowProgress(job_id=job_id, attempt=1, index=i, step=i + 1, steps=3, tokens=12) for i in range(2)
    )
    await stage.router.announce()
    view = (await stage.get(f"/v1/jobs/{job_id}")).json
    assert (view["state"], view["step"], view["steps"]) == ("running", 1, 3)
    assert [picture["step"] for picture in view["pictures"]] == [1, 2]
    assert (view["queue_position"], view["predicted_finish_s"]) == (None, None), "the router does not know"
    stage.router.forecast = JobEstimate(position=3, finish_ms=12_500)
    view = (await stage.get(f"/v1/jobs/{job_id}")).json
    assert (view["queue_position"], view["predicted_finish_s"]) == (3, 12.5)
    assert (await stage.get(f"/v1/jobs/{job_id}/image")).code == (409, "job_not_finished")

    stage.router.go_on()
    assert (await frames_of(stage, job_id))[-1]["event"] == "image_edit.completed"
    view = (await stage.get(f"/v1/jobs/{job_id}")).json
    assert (view["state"], view["step"], view["usage"]["output_tokens"]) == ("completed", None, 10)
    assert (view["queue_position"], view["predicted_finish_s"]) == (None, None), "it is over"
    assert [picture["seed"] for picture in view["pictures"]] == [5, 6]
    answer = await stage.get(view["pictures"][1]["url"])
    assert answer.content_type == "image/png"
    assert answer.body == picture_of(1)
    tag = answer.headers["ETag"]
    assert (await stage.get(view["pictures"][1]["url"], headers={"If-None-Match": tag})).status == 304
    for index in ("2", "-1", "x"):
        assert (await stage.get(f"/v1/jobs/{job_id}/image", params={"index": index})).fault == (400, "index")


@pytest.mark.parametrize("kind", ["form", "json"])
async def test_a_job_waits_in_the_queue_that_it_asks_for(stage: Stage, kind: str) -> None:
    await stage.serve(CARD, PAINTER)
    queues = {}
    for asked in ({}, {"priority": "interactive"}, {"priority": "batch"}):
        if kind == "form":
            job_id = await submit(stage, model=CARD.name, **asked)
        else:
            body = {"prompt": "a red barn", "model": PAINTER.name, **asked}
            job_id = (await stage.post("/v1/jobs", json=body)).expect(202).json["id"]
        told = (await stage.get(f"/v1/jobs/{job_id}")).json["priority"]
        queues[asked.get("priority")] = (told, (await stage.record()).job.priority)
    assert queues == {
        None: ("batch", Priority.BATCH),
        "interactive": ("interactive", Priority.INTERACTIVE),
        "batch": ("batch", Priority.BATCH),
    }
    answer = await stage.post("/v1/jobs", data=stage.form(model=CARD.name, priority="first"))
    assert answer.fault == (400, "priority")
    answer = await stage.post("/v1/images/edits", data=stage.form(model=CARD.name, priority="batch"))
    assert answer.fault == (400, "priority")


async def test_events_are_replayed_from_where_a_client_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await submit(stage)
    frames = await frames_of(stage, job_id)
    kept = [frame for frame in frames if frame["data"].get("step") is None]
    assert [frame["data"].get("state") for frame in kept[:-1]] == ["preparing", "running"]
    ids = [int(frame["id"]) for frame in kept]
    assert ids == sorted(set(ids))
    assert frames[-1]["data"]["url"].endswith(f"/v1/jobs/{job_id}/image?index=0")
    monkeypatch.setattr("giornata_gateway.http.jobs.time", SimpleNamespace(time=lambda: 0.0))
    again = await frames_of(stage, job_id, str(ids[0]))
    assert again == kept[1:]  # told when it happened, not when read
    answer = await stage.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(ids[-1])})
    assert answer.status == 204
    answer = await stage.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "one"})
    assert answer.fault == (400, "Last-Event-ID")


async def test_any_gateway_follows_and_replays_a_job(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    job_id = await held(stage, n="2")
    async with open_gateway(stage.router, nats_url, redis_url, tmp_path / "second") as second:
        async with second.http.get(f"/v1/jobs/{job_id}/events") as response:
            async for line in response.content:
                if line.startswith(b"data:") and json.loads(line[5:]).get("state") == "running":
                    break
            stage.router.go_on()
            live = [frame["data"] for frame in read(await response.text())]
        steps = [(frame.get("index"), frame.get("step")) for frame in live]
        assert steps == [(0, 2), (1, 2), (0, 3), (1, 3), (0, None), (1, None)], (
            "steps are told as they happen"
        )

        stage.stop.set()
        await stage.serving  # the gateway that took the job is gone
        frames = await frames_of(second, job_id)
        told = [(frame["data"].get("state"), frame["data"].get("index")) for frame in frames]
        assert told == [("preparing", None), ("running", None), (None, 0), (None, 1)]
        assert await frames_of(second, job_id, frames[0]["id"]) == frames[1:]
        assert (await second.get(f"/v1/jobs/{job_id}/image?index=1")).body == picture_of(1)
        last = {"Last-Event-ID": frames[-1]["id"]}
        assert (await second.get(f"/v1/jobs/{job_id}/events", headers=last)).status == 204


async def test_steps_go_on_after_a_reconnect_and_have_no_id(stage: Stage) -> None:
    job_id = await held(stage)
    async with stage.http.get(f"/v1/jobs/{job_id}/events") as response:
        async for line in response.content:
            if line.startswith(b"id:"):
                seen = line.split()[1].decode()
            elif line.startswith(b"data:") and json.loads(line[5:]).get("state") == "running":
                break
    headers = {"Last-Event-ID": seen}
    async with stage.http.get(f"/v1/jobs/{job_id}/events", headers=headers) as response:
        stage.router.go_on()
        frames = read(await response.text())
    assert [(frame["data"].get("step"), frame["id"] is None) for frame in frames] == [
        (2, True),
        (3, True),
        (None, False),
    ]


async def test_an_id_that_the_stream_has_not_reached_is_of_one_that_is_gone(stage: Stage) -> None:
    job_id = await submit(stage)
    frames = await frames_of(stage, job_id)
    assert await frames_of(stage, job_id, "9" * 18) == frames


async def test_links_are_those_of_the_public_address(opening: Opening) -> None:
    public = "https://edit.example/api"
    async with opening(public_url=f"{public}/") as stage:
        answer = await stage.post("/v1/jobs", data=stage.form(user="ada"))
        view = answer.json
        assert answer.headers["Location"] == f"{public}/v1/jobs/{view['id']}"
        frames = await frames_of(stage, view["id"])
        link = f"{public}/v1/jobs/{view['id']}/image?index=0"
        assert frames[-1]["data"]["url"] == link
        assert (await stage.get(f"/v1/jobs/{view['id']}")).json["pictures"][0]["url"] == link
        answer = (await stage.edit(response_format="url", user="ada")).json
        assert answer["data"][0]["url"].startswith(f"{public}/v1/jobs/job_")
        assert (await stage.record()).job.parameters.user == "ada"


@pytest.mark.parametrize("trusted", ["127.0.0.0/8", "192.0.2.0/24"])
async def test_links_are_those_of_a_trusted_proxy_in_front(opening: Opening, trusted: str) -> None:
    said = {"Host": "edit.example", "X-Forwarded-Proto": "https", "X-Forwarded-Prefix": "/paint"}
    counts = trusted == "127.0.0.0/8"
    base, path = ("https://edit.example/paint", "/paint") if counts else ("http://edit.example", "")
    async with opening(trusted_proxies=trusted) as stage:
        answer = await stage.post("/v1/jobs", data=stage.form(), headers=said)
        view = answer.json
        assert answer.headers["Location"] == f"{path}/v1/jobs/{view['id']}"
        await frames_of(stage, view["id"])
        link = f"{base}/v1/jobs/{view['id']}/image?index=0"
        assert (await stage.get(f"/v1/jobs/{view['id']}", headers=said)).json["pictures"][0]["url"] == link
        answer = await stage.get(f"/v1/jobs/{view['id']}/events", headers=said)
        assert read(answer.text)[-1]["data"]["url"] == link
        form = stage.form(response_format="url")
        answer = await stage.post("/v1/images/edits", data=form, headers=said)
        assert answer.json["data"][0]["url"].startswith(f"{base}/v1/jobs/job_")
        assert (await stage.get("/openapi.json", headers=said)).json["servers"] == [{"url": path or "/"}]


async def test_the_end_is_told_even_when_the_stream_has_lost_it(stage: Stage) -> None:
    stage.router.publish_done = False
    job_id = await submit(stage)
    await stage.router.ended.wait()
    frames = await frames_of(stage, job_id)
    assert (frames[-1]["event"], frames[-1]["id"]) == ("image_edit.completed", None)


async def test_a_follower_notices_an_end_of_which_nobody_told(opening: Opening) -> None:
    async with opening(heartbeat_s=0.1) as stage:
        stage.router.hold, stage.router.publish_done = asyncio.Event(), False
        job_id = await submit(stage)
        await stage.router.held.wait()
        async with stage.http.get(f"/v1/jobs/{job_id}/events") as response:
            stage.router.go_on()
            async with asyncio.timeout(HUNG_S):
                assert "event: image_edit.completed" in await response.text()


async def test_errors_come_after_pictures_and_carry_the_last_id(stage: Stage) -> None:
    stage.router.row_errors = {0: RowPoisoned()}
    frames = await frames_of(stage, await submit(stage, n="2"))
    assert [frame["event"] for frame in frames[-2:]] == ["image_edit.completed", "error"]
    assert [frame["id"] is None for frame in frames[-2:]] == [True, False]
    assert frames[-1]["data"]["error"]["code"] == "row_poisoned"


async def test_a_failed_job_says_why(stage: Stage) -> None:
    stage.router.failure = MaskEmpty()
    job_id = await submit(stage)
    frames = await frames_of(stage, job_id)
    assert frames[-1]["data"]["error"]["code"] == "mask_empty"
    view = (await stage.get(f"/v1/jobs/{job_id}")).json
    assert (view["state"], view["error"]["code"]) == ("failed", "mask_empty")
    assert (await stage.get(f"/v1/jobs/{job_id}/image")).code == (400, "mask_empty")


async def test_cancelling(stage: Stage) -> None:
    job_id = await held(stage)
    answer = await stage.ask("DELETE", f"/v1/jobs/{job_id}")
    assert (answer.status, answer.json["cancelling"]) == (202, True)
    frames = await frames_of(stage, job_id)
    assert frames[-1]["data"]["error"]["code"] == "job_cancelled"
    answer = await stage.ask("DELETE", f"/v1/jobs/{job_id}")
    assert (answer.status, answer.json["state"]) == (200, "cancelled")
    assert (await stage.get(f"/v1/jobs/{job_id}/image")).code == (409, "job_cancelled")


async def test_an_expired_result_is_told_from_an_unknown_job(stage: Stage) -> None:
    job_id = await submit(stage)
    await frames_of(stage, job_id)
    image = (await stage.record()).rows[0].image
    assert image is not None
    await stage.router.blobs.delete(image)
    assert (await stage.get(f"/v1/jobs/{job_id}/image")).code == (410, "result_expired")
    for unknown in ("job_unknown", "a.b", "x" * 200):
        assert (await stage.get(f"/v1/jobs/{unknown}")).code == (404, "job_not_found")


async def test_what_a_job_cannot_have_is_refused(stage: Stage) -> None:
    for field, value in {"stream": "true", "response_format": "url"}.items():
        assert (await stage.post("/v1/jobs", data=stage.form(**{field: value}))).fault == (400, field)


async def test_a_quiet_stream_has_heartbeats_and_ends_at_the_drain(opening: Opening) -> None:
    async with opening(heartbeat_s=0.1) as stage:
        job_id = await held(stage)
        async with stage.http.get(f"/v1/jobs/{job_id}/events") as response:
            async for line in response.content:
                if line.startswith(b":"):
                    break
            stage.stop.set()
            rest = await response.text()
        assert "event: error" not in rest
        assert rest.endswith("retry: 500\n\n"), "the job goes on, and so may its watcher, at another gateway"
        assert not (await stage.record()).cancel  # asynchronous jobs outlive their gateway


async def test_previews_of_a_job_are_told_and_replayed_in_their_place(stage: Stage) -> None:
    job_id = await submit(stage, n="1", partial_images="2", output_format="webp")
    told = await frames_of(stage, job_id)
    shown = [frame for frame in told if frame["event"] == "image_edit.partial_image"]
    assert [frame["data"]["partial_image_index"] for frame in shown] == [0, 1]
    assert shown[0]["data"] | {"created_at": 0, "job_id": ""} == {
        "type": "image_edit.partial_image", "b64_json": base64.b64encode(b"\xff\xd8\0\1").decode(),
        "partial_image_index": 0, "created_at": 0, "background": "opaque", "output_format": "jpeg",
        "quality": "medium", "size": "8x6", "index": 0, "job_id": "", "step": 1, "steps": 3, "box": [0, 0, 64, 48],
        "media_type": "image/jpeg",
    }  # fmt: skip
    again = await frames_of(stage, job_id, after=shown[0]["id"])
    assert [f["id"] for f in again] == [f["id"] for f in told[told.index(shown[0]) + 1 :] if f["id"]]
