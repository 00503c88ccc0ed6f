"""Health, readiness, metrics, lists, the document of the API, the studio's files, with servers that come and go."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

import giornata_gateway
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.jobs import JobState
from giornata.wire.workers import RowProgress
from giornata_gateway.fleet import KNOWN_S
from tests.fakes.nats_world.server import MemoryNatsServer
from tests.integration.fake_router import CARD
from tests.integration.gateway_fakes import Opening, Stage, open_gateway
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
