"""Commands of tenants against a real gateway: ``giornata lora`` and ``giornata webhooks``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from giornata.bus.bus import Endpoint
from giornata.wire import subjects
from giornata.wire.errors import LoraMismatch
from giornata.wire.loras import CanonicalLora, NormaliseLora
from giornata_tools.cli.app import cli
from tests.fakes.key_files import write_keys
from tests.integration.cli.conftest import Run
from tests.integration.gateway.test_webhooks import dead, hooked, secret_of, submit, taken, until
from tests.integration.gateway_fakes import Stage, open_stage
from tests.integration.lora_bench import canonical, lora, open_bench
from tests.receiver import receiving

KEY = "sk-command-line-1"


@dataclass
class Door:
    """A gateway, and what prepost says of the next LoRA."""

    stage: Stage
    folder: Path
    command: Run
    refusal: LoraMismatch | None = None

    async def normalise(self, request: NormaliseLora) -> CanonicalLora:
        if self.refusal is not None:
            raise self.refusal
        return canonical(request)

    async def run(self, *words: str, key: str = KEY) -> Result:
        return await self.command("lora", *words, "--url", self.stage.url, "--api-key", key)

    async def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((await self.run("list", "--json")).stdout)
        return found

    def file(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.write_bytes(data)
        return str(path)


@pytest.fixture
async def door(nats_account: str, redis_url: str, tmp_path: Path, run: Run) -> AsyncIterator[Door]:
    keys = write_keys(tmp_path, {KEY: tmp_path.name})
    async with (
        open_bench(nats_account, tmp_path) as bench,
        bench.instance(),
        open_stage(nats_account, redis_url, tmp_path, api_keys_file=keys) as stage,
    ):
        door = Door(stage, tmp_path, run)
        prepost = Endpoint(subjects.prepost("adapter", "tiny"), NormaliseLora, door.normalise)
        async with bench.bus.serve("prepost", prepost, instance="tiny"):
            yield door


async def test_a_lora_is_added_listed_and_removed(door: Door) -> None:
    file = door.file("rims.safetensors", lora(70))
    added = await door.run("add", file, "--model", "tiny", "--name", "dark rims")
    assert (added.exit_code, added.stderr) == (0, "Ready: rank 4, 1 modules of tiny.\n")
    name = (await door.listed())[0]["id"]
    assert added.stdout.splitlines()[-1] == name
    second = json.loads((await door.run("add", door.file("b.safetensors", lora(71)), "--json")).stdout)
    assert [(one["id"], one["name"], one["state"]) for one in await door.listed()] in (
        [(second["id"], "b", "ready"), (name, "dark rims", "ready")],
        [(name, "dark rims", "ready"), (second["id"], "b", "ready")],  # made in one second
    )
    table = (await door.run("list")).stdout
    assert "dark" in table
    assert name in _column(table), "whole, for other commands"
    assert name in _column((await door.run("show", name)).stdout)
    assert json.loads((await door.run("show", name, "--json")).stdout)["joins_within"] is None
    unknown = await door.run("show", f"lora_{'0' * 32}")
    assert (unknown.exit_code, "[lora_not_found]" in unknown.stderr) == (1, True)
    removed = await door.run("rm", name)
    assert (removed.exit_code, removed.stderr) == (0, f"{name} is removed.\n")
    assert json.loads((await door.run("rm", second["id"], "--json")).stdout)["deleted"] is True
    assert await door.listed() == []
    assert (await door.run("list")).stderr == "There is no LoRA.\n"


def _column(table: str) -> str:
    """The first column of a table."""
    return " ".join(line.split()[0] for line in table.splitlines())


async def test_what_is_refused_is_told_with_its_code(door: Door) -> None:
    door.refusal = LoraMismatch(received="double_blocks", accepted="modules of a UNet")
    failed = await door.run("add", door.file("other.safetensors", lora(72)))
    assert failed.exit_code == 1
    assert failed.stderr == (
        "Error: The LoRA does not fit the model. "
        "Received: double_blocks. Accepted: modules of a UNet. [lora_mismatch]\n"
    )
    assert "lora_mismatch" in (await door.run("list")).stdout
    for words, said in (
        (("add", door.file("junk.safetensors", b"junk")), "lora_unreadable"),
        (("rm", "lora_0"), "lora_not_found"),
    ):
        refused = await door.run(*words)
        assert refused.exit_code == 1
        assert said in refused.stderr
    assert (await door.run("list", key="sk-of-nobody")).exit_code == 1


# ``giornata webhooks`` against a real gateway and a receiver that takes nothing at first.


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
