"""Event streams are what the document says: every event of a live stream of each route that has one."""

from __future__ import annotations

import json
from typing import Any

import pytest_asyncio
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # has no types

import giornata.client
from giornata.wire.errors import InputLost, RowPoisoned
from giornata.wire.messages import StepEvent
from giornata.wire.models import Task
from giornata_gateway.http.routes import ROUTES, STREAM, EventStream
from tests.integration.fake_router import CARD
from tests.integration.gateway_fakes import Stage

Document = dict[str, Any]


def parse(text: str) -> list[dict[str, str]]:
    """The events in the text of a stream; comments and `retry` are none."""
    events = []
    for block in text.split("\n\n"):
        lines = [line.partition(": ") for line in block.split("\n") if line and not line.startswith(":")]
        fields = {name: value for name, _, value in lines}
        if "data" in fields:
            events.append(fields)
    return events


def check(document: Document, path: str, method: str, events: list[dict[str, str]]) -> set[str]:
    """Hold each event against the document; the names that were told."""
    media = document["paths"][path][method]["responses"]["200"]["content"][STREAM]
    assert "schema" not in media, "readers differ in what it would describe: the text or an event"
    branches = {branch["properties"]["event"]["const"]: branch for branch in media["x-itemSchema"]["oneOf"]}
    for event in events:
        branch = branches[event["event"]]
        Draft202012Validator(branch).validate(event)
        reference = branch["properties"]["data"]["contentSchema"]
        schema = {**reference, "components": document["components"]}
        data = json.loads(event["data"])
        Draft202012Validator(schema).validate(data)
        told = document["components"]["schemas"][reference["$ref"].rpartition("/")[2]]
        assert data.keys() <= told["properties"].keys()
        assert data.get("type", event["event"]) == event["event"]
    return {event["event"] for event in events}


@pytest_asyncio.fixture(loop_scope="module")
async def document(stage: Stage) -> Document:
    found: Document = (await stage.get("/openapi.json")).json
    return found


async def edited(stage: Stage, **fields: str) -> list[dict[str, str]]:
    form = stage.form(stream="true", progress="true", **fields)
    answer = await stage.post("/v1/images/edits", data=form)
    assert answer.content_type == STREAM
    return parse(answer.text)


async def followed(stage: Stage, **fields: str) -> list[dict[str, str]]:
    job = (await stage.post("/v1/jobs", data=stage.form(**fields))).json["id"]
    return parse((await stage.get(f"/v1/jobs/{job}/events")).text)


async def test_the_stream_of_an_edit_is_as_documented(stage: Stage, document: Document) -> None:
    stage.router.row_errors = {1: RowPoisoned()}
    told = check(document, "/v1/images/edits", "post", await edited(stage, n="2", partial_images="1"))
    assert told == {"image_edit.progress", "image_edit.partial_image", "image_edit.completed", "error"}
    stage.router.failure = InputLost()
    assert "error" in check(document, "/v1/images/edits", "post", await edited(stage))


async def test_the_stream_of_a_generation_is_as_documented(stage: Stage, document: Document) -> None:
    await stage.serve(CARD.model_copy(update={"tasks": tuple(Task), "generation_guidance_scale": 3.5}))
    stage.router.row_errors = {1: RowPoisoned()}
    asked = {"prompt": "a red barn", "n": 2, "partial_images": 1}
    streaming = asked | {"stream": True, "progress": True}
    told = parse((await stage.post("/v1/images/generations", json=streaming)).text)
    names = {"image_generation.progress", "image_generation.partial_image", "image_generation.completed"}
    assert check(document, "/v1/images/generations", "post", told) == names | {"error"}
    job = (await stage.post("/v1/jobs", json=asked)).json["id"]
    told = parse((await stage.get(f"/v1/jobs/{job}/events")).text)
    assert check(document, "/v1/jobs/{job_id}/events", "get", told) == names | {"error"}


async def test_the_stream_of_a_job_is_as_documented(stage: Stage, document: Document) -> None:
    stage.router.row_errors = {1: RowPoisoned()}
    told = check(
        document, "/v1/jobs/{job_id}/events", "get", await followed(stage, n="2", partial_images="1")
    )
    assert told == {"image_edit.progress", "image_edit.partial_image", "image_edit.completed", "error"}


async def test_no_step_is_missed_of_an_edit_that_is_quicker_than_its_acceptance(
    stage: Stage, nats_url: str
) -> None:
    stage.router.answer_late = stage.router.ended
    told = [json.loads(event["data"]) for event in await edited(stage)]
    assert [data["step"] for data in told if data.get("step")] == [1, 2, 3]
    stage.router.ended.clear()
    async with giornata.client.connect(nats_url) as client:
        edit = await client.edit(image=b"picture", prompt="a scarf")
        assert [one.step async for one in edit if isinstance(one, StepEvent)] == [1, 2, 3]


async def test_the_stream_of_the_fleet_is_as_documented(stage: Stage, document: Document) -> None:
    events: list[dict[str, str]] = []
    async with stage.http.get("/v1/fleet", headers={"Accept": STREAM}) as response:
        while len(events) < 2:
            events += parse((await response.content.readuntil(b"\n\n")).decode())
    assert check(document, "/v1/fleet", "get", events) == {"fleet"}


def test_every_route_with_a_stream_is_held_against_the_document() -> None:
    streaming = {
        route.path
        for route in ROUTES
        for answer in route.answers.values()
        if isinstance(answer.bodies.get(STREAM), EventStream)
    }
    images = {"/v1/images/edits", "/v1/images/generations"}
    assert streaming == images | {"/v1/jobs/{job_id}/events", "/v1/fleet"}
