"""Health, readiness, metrics, lists and the document of the API, with servers that come and go."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from giornata.wire.errors import ServiceUnavailable
from giornata.wire.jobs import JobState
from giornata_gateway.fleet import KNOWN_S
from tests.fakes.nats_world.server import MemoryNatsServer
from tests.integration.fake_router import CARD
from tests.integration.gateway_fakes import Opening, Stage
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
