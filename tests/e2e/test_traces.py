"""One edit through every service, as a collector sees it: real processes, OTLP as protobuf over HTTP."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Sequence

import aiohttp

import giornata.client
from giornata.tracing import SpanAttributes, attribute
from giornata.wire.workers import ServiceName
from giornata_lab.bench.systems.edit_forms import edit_form, file, scene
from tests.e2e.collector import CollectedSpan, Collector
from tests.e2e.live import LiveStack
from tests.e2e.stacks import ALICE, BOB
from tests.s3_server import CREDENTIALS

PROMPT = "a walrus nobody may hear of"
STEPS = 4


def ended(spans: Sequence[CollectedSpan]) -> bool:
    """Whether the whole edit has been told: what ends last in each service, which tells of a span when it has ended."""
    names = {one.name for one in spans}
    return {"job", "denoise", "prepost finish"} <= names and bool(names & {"edit", "POST /v1/images/edits"})


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
    shipped: LiveStack, collector: Collector
) -> None:
    trace, caller = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace}-{caller}-01", "Authorization": f"Bearer {ALICE}"}
    form = edit_form(prompt=PROMPT, num_inference_steps=STEPS, user="walrus-user")
    async with (
        aiohttp.ClientSession(shipped.url, headers=headers) as http,
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
    shipped: LiveStack, collector: Collector
) -> None:
    trace, caller = secrets.token_hex(16), secrets.token_hex(8)
    async with giornata.client.connect(shipped.nats_url, api_key=ALICE) as client:
        edit = await client.edit(
            prompt=PROMPT,
            image=file(scene()),
            traceparent=f"00-{trace}-{caller}-01",
            num_inference_steps=STEPS,
        )
        assert (await edit.result()).pictures
    spans = collector.until(trace, ended)
    assert only(spans, "edit").parent == caller
    assert chain(spans, only(spans, "denoise")) == ["edit", "job", "attempt", "worker run", "denoise"]


def test_nothing_that_a_tenant_wrote_is_told(shipped: LiveStack, collector: Collector) -> None:
    everything = b"".join(collector.bodies)
    assert len(collector.spans) > 40
    for secret in (PROMPT, "walrus", ALICE, BOB, *CREDENTIALS.values()):
        assert secret.encode() not in everything
    named = {attribute(name) for name in SpanAttributes.__annotations__}
    for one in collector.spans:
        assert one.attributes.keys() <= named, one.name


def test_lines_of_the_log_name_the_trace(shipped: LiveStack, collector: Collector) -> None:
    [router] = shipped.instances(ServiceName.ROUTER)
    lines = [json.loads(line) for line in shipped.log(router).splitlines() if line.startswith("{")]
    told = {one.trace for one in collector.spans if (one.name, one.instance) == ("job", router)}
    assert told
    assert {line.get("trace_id") for line in lines if line["event"] == "job_ended"} >= told
