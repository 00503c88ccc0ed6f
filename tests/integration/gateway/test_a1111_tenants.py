"""Whose jobs, LoRAs and keys A1111's API sees."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest_asyncio

from giornata.records import LoraRecords
from giornata.wire.jobs import JobState
from giornata.wire.loras import CanonicalLora, LoraRecord, LoraState, StoredFile
from giornata.wire.messages import JobEstimate
from giornata_gateway.http.a1111 import A1111_ROUTES
from giornata_gateway.http.routes import ROUTES
from tests.fakes.key_files import write_keys
from tests.integration.fake_router import CARD
from tests.integration.gateway.test_a1111 import EDIT, get, post
from tests.integration.gateway_fakes import Opening, Stage
from tests.patience import HUNG_S

OPEN = {"/healthz", "/readyz", "/metrics", "/openapi.json"}
"""For probes and for readers of the API; they tell nothing of a tenant."""
LORA = f"lora_{'a' * 32}"
READY = LoraRecord(
    lora_id=LORA,
    tenant="",
    created_s=0,
    state=LoraState.READY,
    model=CARD.name,
    name="rims.safetensors",
    canonical=CanonicalLora(
        file=StoredFile(sha256="c" * 64, size_bytes=1234), model_digest=CARD.digest, rank=16, modules=40
    ),
)


def basic(key: str) -> str:
    return aiohttp.encode_basic_auth("anybody", key)


@pytest_asyncio.fixture(loop_scope="module")
async def doors(opening: Opening, tmp_path: Path) -> AsyncIterator[Stage]:
    """A gateway with the keys of two tenants."""
    alice, bob = (
        f"{name}-{secrets.token_hex(4)}" for name in ("alice", "bob")
    )  # other tests' records stay in NATS
    keys = write_keys(tmp_path, {"sk-alice-123": alice, "sk-robert-12": bob})
    async with opening(api_keys_file=keys) as stage:
        records = await LoraRecords.open(stage.router.bus.jetstream)
        await records.create(READY.model_copy(update={"tenant": alice}))
        yield stage


async def test_a_prompt_names_the_tenants_loras(doors: Stage) -> None:
    alice, bob = {"Authorization": basic("sk-alice-123")}, {"Authorization": basic("sk-robert-12")}
    assert [(one["name"], one["alias"]) for one in await get(doors, "loras", **alice)] == [("rims", LORA)]
    assert await get(doors, "loras", **bob) == []
    asked = EDIT | {"prompt": "a red <lora:rims:0.5> star"}
    (await post(doors, "img2img", asked, **alice)).expect(200)
    job = (await doors.record()).job
    assert job.parameters.prompt == "a red star"
    assert [(use.lora_id, use.scale) for use in job.loras] == [(LORA, 0.5)]
    assert (await post(doors, "img2img", asked, **bob)).code == (404, "lora_not_found")


async def test_progress_and_interrupt_see_the_tenants_own_jobs_alone(doors: Stage) -> None:
    doors.router.hold = asyncio.Event()
    alice, bob = {"Authorization": basic("sk-alice-123")}, {"Authorization": "Bearer sk-robert-12"}
    waiting = asyncio.create_task(post(doors, "img2img", EDIT | {"steps": 4}, **alice))
    await asyncio.wait_for(doors.router.held.wait(), HUNG_S)
    job = (await doors.record()).job
    silent = await get(doors, "progress", **alice)  # the router tells nothing of it
    assert (silent["progress"], silent["eta_relative"], silent["state"]["sampling_step"]) == (0.25, 0, 1)
    doors.router.forecast = JobEstimate(position=0, finish_ms=1500)
    own = await get(doors, "progress?skip_current_image=true", **alice)
    assert (own["progress"], own["eta_relative"], own["current_image"]) == (0.25, 1.5, None)
    assert own["state"]["job"] == own["current_task"] == job.job_id
    assert (own["state"]["job_count"], own["state"]["sampling_step"], own["state"]["sampling_steps"]) == (
        1,
        1,
        4,
    )
    assert (await get(doors, "progress", **bob))["state"]["job_count"] == 0
    assert (await post(doors, "interrupt", None, **bob)).told == (200, {})
    assert not (await doors.record()).cancel
    assert (await post(doors, "interrupt", None, **alice)).told == (200, {})
    assert (await waiting).code == (409, "job_cancelled")
    assert (await doors.record()).state is JobState.CANCELLED
    assert (await get(doors, "progress", **alice))["state"]["job_count"] == 0


async def test_every_route_wants_a_key(doors: Stage) -> None:
    named = {"{job_id}": "job_1", "{template_id}": "template_1", "{lora_id}": "lora_1", "{model}": "tiny"}
    closed = [route for route in (*ROUTES, *A1111_ROUTES) if route.path not in OPEN]
    assert len(closed) > 30
    wrong = ("Bearer sk-nobody-12", basic("sk-nobody-12"), "Basic ?")
    for route in closed:
        path = re.sub(r"\{\w+\}", lambda found: named[found[0]], route.path)
        for headers in ({}, *({"Authorization": key} for key in wrong)):
            answer = await doors.ask(route.method, path, headers=headers)
            challenge = answer.headers["WWW-Authenticate"]
            assert (answer.status, challenge.partition(" realm=")[0]) == (
                401,
                "Bearer, Basic" if route.basic else "Bearer",
            ), path
    assert (await doors.get("/")).status == 200, "the page itself asks for the key"


async def test_a_password_is_no_key_elsewhere(doors: Stage) -> None:
    answer = await doors.get("/v1/models", headers={"Authorization": basic("sk-alice-123")})
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


async def test_a_page_of_another_site_cannot_use_a_password_that_the_browser_remembers(doors: Stage) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site"}
    answer = await post(doors, "interrupt", None, Authorization=basic("sk-alice-123"), **foreign)
    assert answer.code == (403, "cross_site")
    (await post(doors, "interrupt", None, Authorization="Bearer sk-alice-123", **foreign)).expect(200)


async def test_where_every_page_may_call_none_uses_a_remembered_password(
    opening: Opening, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path, {"sk-alice-123": "alice"})
    page = {"Sec-Fetch-Site": "cross-site", "Origin": "https://any.example"}
    async with opening(api_keys_file=keys, cors_origins="*") as stage:
        for key, expected in (("Bearer sk-alice-123", 200), (basic("sk-alice-123"), 403)):
            assert (await post(stage, "interrupt", None, Authorization=key, **page)).status == expected
