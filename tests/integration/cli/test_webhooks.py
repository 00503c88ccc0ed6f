"""``giornata webhooks`` against a real gateway and a receiver that takes nothing at first."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from giornata_tools.cli.app import cli
from tests.integration.cli.conftest import Run
from tests.integration.gateway.test_webhooks import dead, hooked, secret_of, submit, taken, until
from tests.integration.gateway_fakes import open_stage
from tests.receiver import receiving

ALICE, BOB = "sk-alice-123", "sk-robert-12"


async def test_what_was_given_up_is_listed_sent_again_and_removed(
    nats_url: str, redis_url: str, tmp_path: Path, run: Run
) -> None:
    options = hooked(tmp_path, webhook_attempts=1)
    async with receiving() as receiver, open_stage(nats_url, redis_url, tmp_path, **options) as stage:

        def told_by(*words: str, key: str = ALICE) -> Awaitable[Result]:
            return run("webhooks", *words, "--url", stage.url, "--api-key", key)

        receiver.answers = [web.Response(status=503) for _ in range(3)]
        ids = []
        for _ in range(3):
            job = (await submit(stage, receiver.url)).json
            ids.append(job["id"])
            await receiver.next()
            await until(stage, job["id"], dead)
        told = json.loads((await told_by("list", "--dead", "--json")).stdout)
        assert {one["id"] for one in told} == set(ids)
        table = (await told_by("list")).stdout.replace("\n", "")
        assert "dead" in table
        assert "503" in table
        assert (await told_by("list", key=BOB)).stderr == "Every webhook was taken.\n"

        others = await told_by("rm", ids[0], key=BOB)
        assert (others.exit_code, "[webhook_not_found]" in others.stderr) == (1, True)
        removed = await told_by("rm", ids[0])
        assert (removed.exit_code, removed.stderr) == (0, f"{ids[0]} is removed.\n")

        retried = await told_by("retry", ids[1])
        assert (retried.exit_code, retried.stderr) == (0, f"{ids[1]} waits to be sent.\n")
        assert (await receiver.next()).told["data"]["id"] == ids[1]
        await until(stage, ids[1], taken)

        again = json.loads((await told_by("retry", "--dead", "--json")).stdout)
        assert [(one["id"], one["state"]) for one in again] == [(ids[2], "waiting")]
        assert (await receiver.next()).told["data"]["id"] == ids[2]
        await until(stage, ids[2], taken)
        assert receiver.heard.empty()
        assert (await told_by("list", "--dead")).stderr == "No webhook was given up.\n"


async def test_the_secret_is_the_tenants(nats_url: str, redis_url: str, tmp_path: Path, run: Run) -> None:
    async with open_stage(nats_url, redis_url, tmp_path, **hooked(tmp_path)) as stage:
        told = await run("webhooks", "secret", "--url", stage.url, "--api-key", ALICE)
        assert told.stdout == await secret_of(stage) + "\n"


@pytest.mark.parametrize("words", [["retry"], ["rm"], ["retry", "job_1", "--dead"]])
def test_jobs_are_named_or_all_that_were_given_up(words: list[str]) -> None:
    refused = CliRunner().invoke(cli, ["webhooks", *words, "--url", "http://127.0.0.1:9"])
    assert (refused.exit_code, "--dead" in refused.stderr) == (2, True)
