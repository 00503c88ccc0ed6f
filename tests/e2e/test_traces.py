"""One edit through every service, as a collector sees it: real processes, OTLP as protobuf over HTTP."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest

import giornata.client
from giornata.bus import bus as buses
from giornata.seeing.told import SpanAttributes, attribute
from giornata.wire import codec, subjects
from giornata.wire.messages import EditMessage, EditReply
from giornata.wire.requests import EditParameters
from giornata.wire.workers import ServiceName
from giornata_lab.bench.systems.collector import CollectedSpan, Collector, collecting
from tests.e2e.live import LiveStack, live_stack, paced, slowly
from tests.e2e.pictures import edit_form, file, scene
from tests.patience import HUNG_MS, HUNG_S

PROMPT = "a walrus nobody may hear of"
KEY = "sk-walrus-key"
STEPS = 4
SETTINGS = {"OTEL_BSP_SCHEDULE_DELAY": "100", "GIORNATA_LOG_FORMAT": "json", "GIORNATA_DRAIN_S": "0"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def traced(tiny_model: Path, collector: Collector, pace: Path) -> Iterator[LiveStack]:
    with paced(pace) as env_of:
        env = SETTINGS | {"GIORNATA_TRACES_URL": collector.url}
        with live_stack(tiny_model, {ServiceName.LORA_STORE: 0}, env, env_of=env_of) as live:
            yield live


def ended(spans: Sequence[CollectedSpan]) -> bool:
    """Whether the whole edit has been told: the door and the job end last."""
    names = {one.name for one in spans}
    return {"job", "denoise", "paste"} <= names and bool(names & {"edit", "POST /v1/images/edits"})


def chain(spans: Sequence[CollectedSpan], one: CollectedSpan) -> list[str]:
    """Names from the trace's first span to this one."""
    by_id = {each.id: each for each in spans}
    names = [one.name]
    while one.parent in by_id:
        one = by_id[one.parent]
        names.insert(0, one.name)
    return names


def only(spans: Sequence[CollectedSpan], name: str) -> CollectedSpan:
    [found] = [one for one in spans if one.name == name]
    return found


async def test_an_edit_over_http_is_one_trace_from_the_door_to_every_step(
    traced: LiveStack, collector: Collector
) -> None:
    trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace}-{caller}-01", "Authorization": f"Bearer {KEY}"}
    form = edit_form(prompt=PROMPT, num_inference_steps=STEPS, user="walrus-user")
    async with (
        aiohttp.ClientSession(traced.url, headers=headers) as http,
        http.post("/v1/images/edits", data=form) as answer,
    ):
        assert answer.status == 200, await answer.text()
    spans = collector.until(trace, ended)

    door = only(spans, "POST /v1/images/edits")
    assert (door.service, door.parent) == ("giornata-gateway", caller)
    assert door.attributes["http.response.status_code"] == 200
    for name, above in {
        "submit": ["POST /v1/images/edits"],
        "job": ["POST /v1/images/edits"],
        "queue": ["POST /v1/images/edits", "job"],
        "inspect pictures": ["POST /v1/images/edits", "job", "ask prepost inspect", "prepost inspect"],
        "encode": ["POST /v1/images/edits", "job", "ask prepost encode", "prepost encode"],
        "place": ["POST /v1/images/edits", "job"],
        "attempt": ["POST /v1/images/edits", "job"],
        "denoise": ["POST /v1/images/edits", "job", "attempt", "worker run"],
        "inputs": ["POST /v1/images/edits", "job", "attempt", "worker run", "denoise"],
        "write outcome": ["POST /v1/images/edits", "job", "attempt", "worker run", "denoise"],
        "decode": ["POST /v1/images/edits", "job", "ask prepost finish", "prepost finish"],
        "paste": ["POST /v1/images/edits", "job", "ask prepost finish", "prepost finish"],
    }.items():
        assert chain(spans, only(spans, name)) == [*above, name]
    steps = [one for one in spans if one.name == "step"]
    assert len(steps) == STEPS
    denoise = only(spans, "denoise")
    assert {one.parent for one in steps} == {denoise.id}
    assert all(denoise.began_ns <= one.began_ns < one.ended_ns <= denoise.ended_ns for one in steps)
    [(event, placed)] = only(spans, "place").events
    assert (event, placed["giornata.worker"]) == ("placed", denoise.instance)

    blobs = Counter(one.name for one in spans if one.name.startswith("blob"))
    assert blobs["blob write"] >= 3, "two pictures of the request and one of the answer"
    assert blobs["blob read"] >= 5
    assert not any(one.failed for one in spans)
    of = {one.service for one in spans}
    assert of == {f"giornata-{name}" for name in ("gateway", "router", "prepost", "denoiser")}


async def test_an_edit_over_nats_goes_on_with_its_callers_trace(
    traced: LiveStack, collector: Collector
) -> None:
    trace, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    message = EditMessage(
        parameters=EditParameters(prompt=PROMPT, num_inference_steps=STEPS),
        image=file(scene()),
        remaining_ms=HUNG_MS,
    )
    async with buses.connect(traced.nats_url, "application") as bus:
        answer = await bus.client.request(
            subjects.EDIT,
            codec.encode(message, limit_bytes=8 << 20),
            timeout=HUNG_S,
            headers={"Traceparent": f"00-{trace}-{caller}-01"},
        )
    assert codec.decode(EditReply, answer.data).pictures
    spans = collector.until(trace, ended)
    assert only(spans, "edit").parent == caller
    assert chain(spans, only(spans, "denoise")) == ["edit", "job", "attempt", "worker run", "denoise"]


async def test_the_client_takes_its_callers_trace_along(traced: LiveStack, collector: Collector) -> None:
    trace, caller = "5af7651916cd43dd8448eb211c80319c", "c7ad6b7169203331"
    async with giornata.client.connect(traced.nats_url) as client:
        edit = await client.edit(
            prompt=PROMPT,
            image=file(scene()),
            traceparent=f"00-{trace}-{caller}-01",
            num_inference_steps=STEPS,
        )
        assert (await edit.result()).pictures
    assert only(collector.until(trace, ended), "edit").parent == caller


async def test_a_caller_that_is_not_sampled_is_not_told_of(traced: LiveStack, collector: Collector) -> None:
    trace = "0123456789abcdef0123456789abcdef"
    async with aiohttp.ClientSession(traced.url) as http:
        for flags in ("00", "01"):  # the second one tells that the first would have come
            headers = {"traceparent": f"00-{trace[:-1]}{flags[-1]}-00f067aa0ba902b7-{flags}"}
            async with http.post("/v1/images/edits", data=edit_form(), headers=headers) as answer:
                assert answer.status == 200
    collector.until(f"{trace[:-1]}1", ended)
    assert not [one for one in collector.spans if one.trace == f"{trace[:-1]}0"]


async def test_an_attempt_after_a_lost_one_links_to_it(
    traced: LiveStack, collector: Collector, pace: Path
) -> None:
    trace = "11112222333344445555666677778888"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    with slowly(pace, 0.2):
        async with aiohttp.ClientSession(traced.url, headers=headers) as http:
            form = edit_form(file(scene(seed=5)), num_inference_steps=40)
            async with http.post("/v1/jobs", data=form) as answer:
                job = (await answer.json())["id"]
            async with http.get(f"/v1/jobs/{job}/events") as events:
                async for line in events.content:
                    if line.startswith(b"data: ") and json.loads(line[6:]).get("step"):
                        break
            [first] = traced.instances(ServiceName.DENOISER)
            await traced.kill(first)
    await traced.start(ServiceName.DENOISER)
    spans = collector.until(trace, lambda seen: "job" in {one.name for one in seen})
    lost, again = (one for one in spans if one.name == "attempt")
    assert lost.failed
    assert lost.attributes["error.type"] == "attempt_lost"
    assert lost.attributes["giornata.worker"] == first
    assert again.links == (lost.id,)
    assert not again.failed


def test_nothing_that_a_tenant_wrote_is_told(collector: Collector) -> None:
    everything = b"".join(collector.bodies)
    assert len(collector.spans) > 40
    for secret in (PROMPT, "walrus", KEY, "sk-"):
        assert secret.encode() not in everything
    named = {attribute(name) for name in SpanAttributes.__annotations__}
    for one in collector.spans:
        assert one.attributes.keys() <= named, one.name


def test_lines_of_the_log_name_the_trace(traced: LiveStack, collector: Collector) -> None:
    [router] = traced.instances(ServiceName.ROUTER)
    lines = [json.loads(line) for line in traced.log(router).splitlines() if line.startswith("{")]
    told = {one.trace for one in collector.spans if one.name == "job"}
    assert {line.get("trace_id") for line in lines if line["event"] == "job_ended"} >= told
