"""Health, readiness, metrics, lists, the document of the API, the studio's files, with servers that come and go."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

import giornata_gateway
from giornata.bus.connection import barrier
from giornata.client import connect
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.jobs import JobState
from giornata.wire.subjects import TEMPLATES, bucket_stream
from giornata.wire.workers import RowProgress
from giornata_gateway.fleet import KNOWN_S
from tests.fakes.nats_world.server import MemoryNatsServer
from tests.integration.fake_router import CARD
from tests.integration.gateway.test_hostile import connection
from tests.integration.gateway.test_idempotency import second_gateway
from tests.integration.gateway.test_templates import get, register
from tests.integration.gateway_fakes import Opening, Stage, listening_port, open_gateway
from tests.patience import HUNG_S


async def test_ready_only_while_an_edit_could_be_done(stage: Stage) -> None:
    assert (await stage.get("/readyz")).told == (
        200,
        {"ready": True, "missing": [], "models": ["tiny"], "nearly_full": [], "storage_full": {}},
    )
    stage.router.cards = ()
    await stage.router.announce()
    answer = await stage.get("/readyz")
    assert (answer.status, answer.json["missing"]) == (503, ["denoiser"])
    assert answer.headers["Retry-After"] == "1"
    stage.router.ready = False
    await stage.router.announce()
    answer = await stage.get("/readyz")
    missing = answer.json["missing"]
    assert missing == ["prepost", "denoiser"], "another router takes over before a submission gives up"
    assert (await stage.edit()).code == (503, "service_unavailable")


async def test_models_have_other_names_where_the_configuration_gives_them_some(opening: Opening) -> None:
    async with opening(model_aliases="gpt-image-1=tiny") as stage:
        assert (await stage.edit(model="gpt-image-1")).status == 200
        job = (await stage.record()).job
        assert (job.model, job.parameters.model) == ("tiny", "tiny")
        async with openai.AsyncOpenAI(base_url=f"{stage.url}/v1", api_key="none", max_retries=0) as client:
            for name in ("tiny", "gpt-image-1"):
                model = await client.models.retrieve(name)
                assert (model.id, getattr(model, "aliases", None)) == ("tiny", ["gpt-image-1"])
            with pytest.raises(openai.NotFoundError) as missed:
                await client.models.retrieve("tiney")
        assert missed.value.code == "model_not_found"
        assert "The closest is tiny." in missed.value.message
        answer = await stage.get("/v1/models/gpt-image-2")
        assert (answer.status, answer.error["accepted"]) == (
            404,
            "tiny, gpt-image-1 (stands for tiny)",
        )


async def test_a_field_that_no_list_names_is_refused_with_the_models_whose_list_does(stage: Stage) -> None:
    guided = CARD.model_copy(update={"name": "guided", "guided_above": 1.0})
    await stage.serve(CARD, guided)
    told = {model["id"]: model["fields"] for model in (await stage.get("/v1/models")).json["data"]}
    assert {name: list(fields) for name, fields in told.items()} == {"guided": ["edit"], "tiny": ["edit"]}
    assert set(told["guided"]["edit"]) - set(told["tiny"]["edit"]) == {"negative_prompt"}
    answer = await stage.edit(model="tiny", negative_prompt="snow")
    assert answer.fault == (400, "negative_prompt")
    assert answer.error["accepted"] == "leave negative_prompt out; models that take it: guided"
    assert (await stage.edit(model="tiny", sampler="heun")).fault == (400, "sampler")
    assert (await stage.edit(model="guided", negative_prompt="snow")).status == 200


async def test_health_follows_the_servers(
    memory_nats: MemoryNatsServer, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ping() -> None:
        raise ServiceUnavailable

    async with opening() as stage:
        answer = await stage.get("/healthz")
        assert (answer.status, answer.json["healthy"]) == (200, True)
        monkeypatch.setattr(stage.router.blobs, "ping", ping)
        answer = await stage.get("/healthz")
        assert (answer.status, answer.json["nats"]) == (503, "ok")
        assert answer.headers["Retry-After"] == "1"
        memory_nats.kill()
        answer = await stage.get("/healthz")
        assert (answer.status, answer.json["nats"] == "ok") == (503, False)
        memory_nats.start()


async def test_an_end_that_came_while_nats_was_away_is_noticed(
    memory_nats: MemoryNatsServer, opening: Opening
) -> None:
    async with opening() as stage:
        stage.router.publish_done = False
        request = await stage.begin(stage.edit())
        stage.router.go_on()
        await stage.router.ended.wait()  # its record says completed, and its event is lost
        memory_nats.kill()
        memory_nats.start()
        async with asyncio.timeout(HUNG_S):
            (await request).expect(200)
        assert (await stage.record()).state is JobState.COMPLETED


async def test_streams_work_again_after_nats_was_away(
    memory_nats: MemoryNatsServer, opening: Opening
) -> None:
    async with opening() as stage:
        back = asyncio.Event()
        stage.front.on_reconnect.append(back.set)
        behind = asyncio.Event()
        stage.router.bus.on_reconnect.append(behind.set)
        memory_nats.kill()
        memory_nats.start()
        async with asyncio.timeout(HUNG_S):
            await back.wait()
            await behind.wait()
            await stage.router.announce()
        stage.router.hold = asyncio.Event()
        async with stage.http.post(
            "/v1/images/edits", data=stage.form(stream="true", progress="true")
        ) as response:
            stage.router.go_on()
            text = await response.text()
        assert response.status == 200, text
        assert '"step":3' in text
        assert "event: image_edit.completed" in text


async def test_metrics_count_doors_codes_stages_and_workers(opening: Opening) -> None:
    async with opening() as stage:
        await stage.edit()
        await stage.edit(n="99")
        await stage.get("/v1/jobs/job_none")
        text = (await stage.get("/metrics")).text
    for line in (
        'giornata_requests_total{code="ok",door="http",route="/v1/images/edits",status="200"} 1.0',
        'giornata_requests_total{code="invalid_field",door="http",route="/v1/images/edits",status="400"} 1.0',
        'giornata_requests_total{code="job_not_found",door="http",route="/v1/jobs/{job_id}",status="404"} 1.0',
        'giornata_request_seconds_count{door="http"} 3.0',
        'giornata_stage_seconds_sum{stage="denoise"} 0.03',
        "giornata_jobs_in_flight 0.0",
        'giornata_fleet_instances{service="denoiser"} 1.0',
        'giornata_worker_running_rows{worker="fake-denoiser"} 0.0',
        'giornata_worker_waiting_rows{worker="fake-denoiser"} 0.0',
        'giornata_worker_steps_total{worker="fake-denoiser"} 7.0',
        'giornata_errors_total{code="invalid_field"} 1.0',
    ):
        assert line in text, line


async def test_unknown_paths_and_methods_have_the_same_form(stage: Stage) -> None:
    assert (await stage.get("/v2/nothing")).code == (404, "route_not_found")
    answer = await stage.get("/v1/images/edits")
    assert answer.code == (405, "method_not_allowed")
    assert answer.headers["Allow"] == "POST"


async def test_a_server_that_stands_still_is_not_called_full(
    memory_nats: MemoryNatsServer, opening: Opening
) -> None:
    async with opening() as stage:

        async def full() -> Any:
            return (await stage.get("/readyz")).json["storage_full"]

        assert await full() == {}
        await asyncio.sleep(KNOWN_S)  # what was tried serves until then
        with memory_nats.frozen():
            assert await full() == {}
        assert await full() == {}


# The files of the studio page, and the live stream of the fleet, as a browser gets them.


STATIC = Path(giornata_gateway.__file__).parent / "static"


async def test_every_file_is_served_with_its_type_and_a_strict_policy(stage: Stage) -> None:
    pages = {"/": "index.html", "/docs": "docs.html"}
    files = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()]
    for url, name in {**pages, **{f"/studio/{name}": name for name in files}}.items():
        answer = await stage.get(url)
        assert answer.status == 200, url
        assert answer.body == (STATIC / name).read_bytes()
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-cache"


async def test_a_file_that_the_browser_has_is_not_sent_again(stage: Stage) -> None:
    tag = (await stage.get("/")).headers["ETag"]
    for known, status in ((tag, 304), (f'W/{tag}, "x"', 304), ('"other"', 200)):
        answer = await stage.get("/", headers={"If-None-Match": known})
        assert (answer.status, answer.headers["ETag"]) == (status, tag)
        assert bool(answer.body) == (status == 200)


@pytest.mark.parametrize("path", ["nothing.js", "../catalog.py", "js/%2e%2e/%2e%2e/catalog.py", "js/", "."])
async def test_nothing_else_is_served(stage: Stage, path: str) -> None:
    assert (await stage.get(f"/studio/{path}")).code == (404, "route_not_found")


def test_the_pages_name_only_files_that_are_there_and_no_inline_code() -> None:
    for page in ("index.html", "docs.html"):
        text = (STATIC / page).read_text("utf-8")
        named = re.findall(r'(?:src|href)="studio/([^"]+)"', text)
        assert len(named) > 3
        assert [name for name in named if not (STATIC / name).is_file()] == []
        assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", text) == []
    for module in (STATIC / "js").glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', module.read_text("utf-8")):
            assert (STATIC / "js" / name).is_file(), f"{module.name} imports {name}"


def test_the_samples_are_there_small_and_credited() -> None:
    samples = json.loads((STATIC / "samples" / "samples.json").read_text("utf-8"))["samples"]
    notes = (STATIC / "samples" / "README.md").read_text("utf-8")
    for sample in samples:
        assert (STATIC / "samples" / sample["file"]).stat().st_size < 40_000
        assert sample["mask"] is None or (STATIC / "samples" / sample["mask"]).is_file()
        assert sample["title"]
        assert sample["prompt"]
        assert f"`{sample['file']}`" in notes


async def test_the_fleet_is_told_again_and_again(stage: Stage) -> None:
    async with stage.http.get("/v1/fleet", headers={"Accept": "text/event-stream"}) as answer:
        assert answer.content_type == "text/event-stream"
        running = []
        async for line in answer.content:
            if line.startswith(b"event:"):
                assert line == b"event: fleet\n"
            if not line.startswith(b"data: "):
                continue
            running.append(json.loads(line[6:])["running_rows"])
            if running[-1]:
                break
            stage.router.progress = (RowProgress(job_id="j", attempt=1, index=0, step=1, steps=9, tokens=4),)
    assert running[0] == 0
    assert running[-1] == 1


async def test_watchers_of_the_fleet_are_counted_and_sent_away_at_the_drain(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    accept = {"Accept": "text/event-stream"}
    async with (
        open_gateway(stage.router, nats_url, redis_url, tmp_path / "one", max_streams=1) as only,
        only.http.get("/v1/fleet", headers=accept) as first,
    ):
        answer = (await only.get("/v1/fleet", headers=accept)).expect(429)
        assert "Retry-After" in answer.headers
        only.stop.set()
        async with asyncio.timeout(HUNG_S):
            assert b"event: fleet" in await first.read()


# A gateway leaves: who has come is answered, who could come is told first, who only looks on is sent
# elsewhere.


BODY = (
    b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n'
    b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\nx\r\n--b--\r\n'
)
HEAD = (
    b"POST /v1/images/edits HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)


@pytest_asyncio.fixture(loop_scope="module")
async def other(stage: Stage, tmp_path: Path) -> AsyncIterator[Stage]:
    """A second gateway of the same fleet, which gives notice."""
    async with second_gateway(stage, tmp_path, notice_s=8) as opened:
        async with opened.http.get("/v1/fleet", headers={"Accept": "text/event-stream"}) as response:
            async for line in response.content:
                if stage.config.instance.encode() in line:
                    break
        yield opened


async def left(stage: Stage) -> None:
    """Return when no client can connect any more."""
    async with asyncio.timeout(HUNG_S):
        while True:
            try:
                async with stage.http.get("/healthz", headers={"Connection": "close"}):
                    await asyncio.sleep(0.05)  # the balancer's own
            except aiohttp.ClientConnectionError:
                return


async def test_requests_are_taken_while_others_do_not_know_yet(other: Stage) -> None:
    answer = await other.get("/readyz")
    assert (answer.status, answer.headers.get("Connection")) == (200, None)
    other.stop.set()
    answer = await other.get("/readyz")
    assert (answer.status, answer.headers["Connection"]) == (503, "close")
    assert answer.json["missing"] == ["gateway"]
    answer = await other.post("/v1/images/edits", data=other.form())
    assert (answer.status, answer.headers["Connection"]) == (200, "close")
    answer = await other.post("/v1/jobs", data=other.form())
    assert (answer.status, answer.headers["Connection"]) == (202, "close")
    await left(other)


async def test_who_has_come_is_answered_and_nobody_else_comes(stage: Stage) -> None:
    """There is no other gateway, so that no balancer waits for notice."""
    edit = await stage.begin(stage.edit())
    idle = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with (
        connection(stage, HEAD + BODY[:20]) as (reader, writer),
        connection(stage, idle) as (idle_reader, _),
    ):
        await idle_reader.readuntil(b"\r\n\r\n")
        stage.stop.set()
        await left(stage)
        await idle_reader.read()  # it is closed
        assert not edit.done()
        writer.write(BODY[20:])
        stage.router.go_on()
        assert (await edit).status == 200
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"\r\nConnection: close\r\n" in answer
        await stage.serving


async def test_edits_over_nats_are_finished_and_go_elsewhere(
    stage: Stage, nats_url: str, tmp_path: Path
) -> None:
    stage.router.hold = asyncio.Event()
    async with connect(nats_url) as client:
        edits = [await client.edit(image=b"i", prompt="x") for _ in range(3)]
        stage.stop.set()
        await left(stage)
        async with second_gateway(stage, tmp_path):
            edits.append(await client.edit(image=b"i", prompt="x"))
            stage.router.go_on()
            assert [len((await edit).pictures) for edit in edits] == [1] * 4
            assert len({job.gateway for job in stage.router.jobs.values()}) == 2


async def test_who_waits_for_a_template_is_told_how_far_it_is(stage: Stage) -> None:
    told = (await register(stage)).json
    nats = stage.router.bus.client
    watched = await nats.subscribe(f"$JS.API.CONSUMER.CREATE.{bucket_stream(TEMPLATES)}")
    await barrier(nats)
    waiting = asyncio.create_task(get(stage, f"/{told['id']}?wait_ms=60000"))
    await watched.next_msg(HUNG_S)  # the request has come, and its record is watched
    stage.stop.set()
    async with asyncio.timeout(HUNG_S):
        answer = (await waiting).expect(200)
        await stage.serving
    assert answer.json["state"] == "recording"


async def test_a_gateway_that_knows_of_no_fleet_leaves_edits_over_nats_to_others(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    stage.router.leads = False
    folder = tmp_path / "next"
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        opened = open_gateway(stage.router, nats_url, redis_url, folder, submit_window_s=60)
        opening = tasks.create_task(stack.enter_async_context(opened))
        await listening_port(folder / "port")
        async with connect(nats_url) as client:
            for _ in range(12):  # NATS deals them out by chance
                await (await client.edit(image=b"i", prompt="x"))
        assert {job.gateway for job in stage.router.jobs.values()} == {stage.config.instance}
        assert not opening.done()
        stage.router.leads = True
        await asyncio.wait_for(opening, HUNG_S)


async def test_a_gateway_without_a_router_answers_after_a_while_and_ends_before(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    stage.router.leads = False
    async with open_gateway(stage.router, nats_url, redis_url, tmp_path / "one", submit_window_s=0.01):
        pass
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        opened = open_gateway(stage.router, nats_url, redis_url, tmp_path / "two", submit_window_s=60)
        opening = tasks.create_task(stack.enter_async_context(opened))
        await listening_port(tmp_path / "two" / "port")
        opening.cancel()  # which stops the gateway
        async with asyncio.timeout(HUNG_S):
            await asyncio.wait([opening])
