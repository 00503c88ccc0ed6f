"""Webhooks to a real receiver that fails, is slow, lies elsewhere than it says, or hears from another gateway."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from standardwebhooks import Webhook, WebhookVerificationError

from giornata.records import WebhookRecords
from giornata.wire.errors import QueueFull
from giornata.wire.templates import WebhookRecord, WebhookState
from giornata_gateway.jobs.preparation import HEADER
from tests.integration.gateway.test_idempotency import second_gateway
from tests.integration.gateway.test_templates import ALICE, BOB, keys
from tests.integration.gateway_fakes import Answer, Opening, Stage
from tests.patience import HUNG_S
from tests.receiver import receiving

LOCAL = {"webhook_networks": "127.0.0.0/8"}


def hooked(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of a gateway that sends webhooks, to tenants that no other test has."""
    (folder / "secret").write_text(secrets.token_urlsafe(32) + "\n")
    known = {"webhook_secret_file": folder / "secret", "api_keys_file": keys(folder), "webhook_retry_s": 0.05}
    return known | LOCAL | options


async def submit(stage: Stage, url: str, headers: dict[str, str] = ALICE, **fields: str) -> Answer:
    form = stage.form(webhook=url, **fields)
    return await stage.post("/v1/jobs", data=form, headers=headers)


async def ask(stage: Stage, method: str, path: str, headers: dict[str, str] = ALICE) -> Answer:
    return await stage.ask(method, f"/v1/webhooks{path}", headers=headers)


async def secret_of(stage: Stage, headers: dict[str, str] = ALICE) -> str:
    return str((await stage.get("/v1/webhook-secret", headers=headers)).expect(200).json["secret"])


async def listed(stage: Stage, headers: dict[str, str] = ALICE) -> list[dict[str, Any]]:
    return list((await ask(stage, "GET", "", headers)).expect(200).json["data"])


async def until(stage: Stage, job_id: str, condition: Callable[[WebhookRecord | None], bool]) -> None:
    """Return when `condition` holds for a webhook's record, which is None when it was taken."""
    records = await WebhookRecords.open(stage.router.bus.jetstream)
    key = f"{stage.router.jobs[job_id].tenant}.{job_id}"
    async with asyncio.timeout(HUNG_S), aclosing(records.bucket.changes(key)) as changes:
        async for _, hook in changes:
            if condition(hook):
                return


def taken(hook: WebhookRecord | None) -> bool:
    return hook is None


def dead(hook: WebhookRecord | None) -> bool:
    return hook is not None and hook.state is WebhookState.DEAD


async def test_the_end_of_a_job_is_told_once_and_signed(opening: Opening, tmp_path: Path) -> None:
    async with receiving() as receiver, opening(**hooked(tmp_path)) as stage:
        job = (await submit(stage, receiver.url)).json
        heard = await receiver.next()
        told = heard.told
        assert (told["type"], told["data"]["id"], told["data"]["state"]) == (
            "job.completed",
            job["id"],
            "completed",
        )
        assert heard.headers["webhook-id"] == f"msg_{job['id']}"
        alices = await secret_of(stage)
        bobs = await secret_of(stage, BOB)
        Webhook(alices).verify(heard.body, heard.headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(bobs).verify(heard.body, heard.headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(alices).verify(heard.body.replace("completed", "failed"), heard.headers)
        await until(stage, job["id"], taken)
        assert receiver.heard.empty()


async def test_a_failing_receiver_is_tried_again_and_hears_the_same(opening: Opening, tmp_path: Path) -> None:
    async with receiving() as receiver, opening(**hooked(tmp_path)) as stage:
        moved = web.Response(status=302, headers={"Location": receiver.url.replace("/hook", "/elsewhere")})
        receiver.answers = [web.Response(status=500), moved, web.Response(status=404)]
        job = (await submit(stage, receiver.url)).json
        heard = [await receiver.next() for _ in range(4)]
        assert len({one.body for one in heard}) == len({one.headers["webhook-id"] for one in heard}) == 1
        await until(stage, job["id"], taken)
        assert receiver.heard.empty(), "a redirect was followed"


async def test_what_is_never_taken_is_given_up_listed_and_sent_again_when_asked(
    opening: Opening, tmp_path: Path
) -> None:
    options = hooked(tmp_path, webhook_attempts=2)
    async with receiving() as receiver, opening(**options) as stage:
        receiver.answers = [web.Response(status=503) for _ in range(2)]
        job = (await submit(stage, receiver.url)).json
        for _ in range(2):
            await receiver.next()
        await until(stage, job["id"], dead)
        metrics = (await stage.get("/metrics")).text
        for outcome in ("failed", "given_up"):
            assert f'giornata_webhook_attempts_total{{outcome="{outcome}"}} 1.0' in metrics
        [dead_ones] = re.findall(r'^giornata_webhooks\{state="dead"\} (\S+)$', metrics, re.MULTILINE)
        assert float(dead_ones) >= 1, "other tests leave theirs"
        [given_up] = await listed(stage)
        assert (given_up["id"], given_up["attempts"], given_up["error"]) == (job["id"], 2, "status 503")
        for method in ("PUT", "DELETE"):
            assert (await ask(stage, method, f"/{job['id']}", BOB)).status == 404
        assert await listed(stage, BOB) == []
        assert receiver.heard.empty()
        assert (await ask(stage, "PUT", f"/{job['id']}")).status == 200
        assert (await receiver.next()).told["data"]["id"] == job["id"]
        await until(stage, job["id"], taken)
        assert (await ask(stage, "DELETE", f"/{job['id']}")).status == 404


async def test_a_receiver_that_wants_no_more_is_heeded(opening: Opening, tmp_path: Path) -> None:
    async with receiving() as receiver, opening(**hooked(tmp_path)) as stage:
        receiver.answers = [web.Response(status=410)]
        job = (await submit(stage, receiver.url)).json
        await receiver.next()
        await until(stage, job["id"], dead)
        assert (await ask(stage, "DELETE", f"/{job['id']}")).status == 200
        await until(stage, job["id"], taken)


async def test_one_that_is_forgotten_is_not_sent(opening: Opening, tmp_path: Path) -> None:
    async with receiving() as receiver, opening(**hooked(tmp_path)) as stage:
        stage.router.hold = asyncio.Event()
        job = (await submit(stage, receiver.url)).json
        await stage.router.held.wait()
        assert (await ask(stage, "DELETE", f"/{job['id']}")).status == 200
        stage.router.go_on()
        await stage.router.ended.wait()
        another = (await submit(stage, receiver.url)).json
        assert (await receiver.next()).told["data"]["id"] == another["id"]


async def test_a_webhook_outlives_the_gateway_that_took_its_job(tmp_path: Path, opening: Opening) -> None:
    options = hooked(tmp_path)
    async with receiving() as receiver, opening(**options) as stage:
        stage.router.hold = asyncio.Event()
        job = (await submit(stage, receiver.url)).json
        await stage.router.held.wait()
        stage.stop.set()
        await stage.serving
        stage.router.go_on()
        await stage.router.ended.wait()  # while there is no gateway
        async with second_gateway(stage, tmp_path, **options) as other:
            heard = await receiver.next()
            assert heard.told["data"]["id"] == job["id"]
            await until(other, job["id"], taken)


async def test_of_two_gateways_one_tells(tmp_path: Path, opening: Opening) -> None:
    options = hooked(tmp_path)
    async with (
        receiving() as receiver,
        opening(**options) as stage,
        second_gateway(stage, tmp_path, **options),
    ):
        jobs = {(await submit(stage, receiver.url)).json["id"] for _ in range(8)}
        heard = [(await receiver.next()).told["data"]["id"] for _ in jobs]
        assert sorted(heard) == sorted(jobs)
        for job_id in jobs:
            await until(stage, job_id, taken)
        assert receiver.heard.empty()


async def test_failures_and_cancellations_are_told_too(opening: Opening, tmp_path: Path) -> None:
    async with receiving() as receiver, opening(**hooked(tmp_path)) as stage:
        stage.router.hold = asyncio.Event()
        job = (await submit(stage, receiver.url)).json
        await stage.router.held.wait()
        assert (await stage.ask("DELETE", f"/v1/jobs/{job['id']}", headers=ALICE)).status == 202
        assert (await receiver.next()).told["type"] == "job.cancelled"


async def test_a_repeated_request_does_not_tell_again(opening: Opening, tmp_path: Path) -> None:
    async with receiving() as receiver, opening(**hooked(tmp_path)) as stage:
        headers = ALICE | {HEADER: secrets.token_hex(8)}
        job = (await submit(stage, receiver.url, headers)).json
        await receiver.next()
        await until(stage, job["id"], taken)
        assert (await submit(stage, receiver.url, headers)).json["id"] == job["id"]
        await until(stage, job["id"], taken)
        assert receiver.heard.empty()


async def test_what_cannot_be_sent_is_refused_at_the_door(opening: Opening, tmp_path: Path) -> None:
    known = hooked(tmp_path)
    for changed, urls in (
        ({"webhook_networks": ""}, ("http://example.org/hook", "https://127.0.0.1/hook")),
        ({"webhook_secret_file": None}, ("https://example.org/",)),
        ({}, ("https://169.254.169.254/latest", "ftp://example.org/", "https://example.org/\r\nX: y")),
    ):
        async with opening(**known | changed) as stage:
            for url in urls:
                answer = await submit(stage, url)
                assert answer.refusal == (400, "invalid_field", "webhook")
                form = stage.form(webhook=url)
                answer = await stage.post("/v1/images/edits", data=form, headers=ALICE)
                assert answer.error["code"] == "unknown_field"
            assert not stage.router.submitted


async def test_a_name_that_leads_into_a_private_network_is_not_connected_to(
    opening: Opening, tmp_path: Path
) -> None:
    """`localhost` stands for every name: its address is known when it is connected to, and not before."""
    connected = asyncio.Event()
    server = await asyncio.start_server(lambda *_: connected.set(), "localhost", 0)
    port = server.sockets[0].getsockname()[1]
    options = hooked(tmp_path, webhook_attempts=1, webhook_networks="10.0.0.0/8")
    async with server, opening(**options) as stage:
        job = (await submit(stage, f"https://localhost:{port}/hook")).expect(202).json
        await until(stage, job["id"], dead)
        [given_up] = await listed(stage)
        assert given_up["error"] == "the address is not allowed"
        assert not connected.is_set()


async def test_a_job_that_is_not_accepted_leaves_no_webhook(opening: Opening, tmp_path: Path) -> None:
    async with opening(**hooked(tmp_path)) as stage:
        stage.router.refusals = [QueueFull(), QueueFull()]
        answer = await submit(stage, "http://127.0.0.1:9/")
        assert answer.status >= 400
        assert await listed(stage) == []


async def test_a_webhook_outlives_a_submission_whose_end_is_not_known(
    opening: Opening, tmp_path: Path
) -> None:
    """A repeated request finds the job, and so would not bring the webhook again."""
    options = hooked(tmp_path, submit_window_s=0.01)
    async with receiving() as receiver, opening(**options) as stage:
        stage.router.hold = asyncio.Event()
        stage.router.answer_late = asyncio.Event()
        headers = ALICE | {HEADER: secrets.token_hex(8)}
        assert (await submit(stage, receiver.url, headers)).status == 503
        stage.router.answer_late.set()
        job = await submit(stage, receiver.url, headers)
        assert (job.status, len(stage.router.submitted)) == (202, 1)
        stage.router.go_on()
        assert (await receiver.next()).told["data"]["id"] == job.json["id"]
        await until(stage, job.json["id"], taken)
