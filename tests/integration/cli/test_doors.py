"""The command line's doors before a gateway with a scripted router, and before what is no gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from click.testing import CliRunner, Result
from PIL import Image

from giornata.bus import bus
from giornata.bus.bus import Endpoint
from giornata.bus.connection import barrier
from giornata.wire import subjects
from giornata.wire.errors import LoraMismatch
from giornata.wire.loras import CanonicalLora, NormaliseLora
from giornata_tools.cli.app import cli
from giornata_tools.clients import nats
from giornata_tools.clients.edits import EditCall, EditProgress, EditStopped, Preview, RequestRefused
from giornata_tools.clients.http import open_http
from giornata_tools.clients.nats import open_nats
from tests.fakes.colours import CARD, ColourMasks
from tests.fakes.key_files import write_keys
from tests.integration.cli.conftest import Run
from tests.integration.gateway.test_webhooks import dead, hooked, secret_of, submit, taken, until
from tests.integration.gateway_fakes import Stage, open_stage
from tests.integration.lora_bench import canonical, lora, open_bench
from tests.integration.nats_server import NatsServer
from tests.patience import HUNG_S
from tests.receiver import receiving

ORDER = EditCall(b"picture", b"mask", {"prompt": "a hat"})
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def unheard(told: EditProgress | Preview) -> None:
    """Nobody listens."""


@asynccontextmanager
async def answering(text: str) -> AsyncIterator[str]:
    """URL of a server that answers every request with `text` and hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text.replace("\n", "\r\n").encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def code_of(url: str, api_key: str | None = None) -> tuple[str, str]:
    async with open_http(url, api_key) as door:
        with pytest.raises(RequestRefused) as raised:
            await door.edit(ORDER, unheard)
    return raised.value.body.code, str(raised.value)


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("HTTP/1.1 502 Bad\nContent-Length: 6\n\n<html>", "schema_mismatch", "not a gateway of this version"),
        ("HTTP/1.1 200 OK\nContent-Length: 2\n\n{}", "failed", "without a picture"),
        (
            "HTTP/1.1 200 OK\nConnection: close\n\nevent: image_edit.progress\ndata: {}\n\n",
            "schema_mismatch",
            "job_id",
        ),
        ("HTTP/1.1 200 OK\nContent-Length: 99\n\nevent:", "service_unavailable", "stopped answering"),
        ("", "service_unavailable", "stopped answering"),
    ],
)
async def test_what_is_no_gateway_is_told_in_words(text: str, code: str, told: str) -> None:
    async with answering(text) as url:
        found, sentence = await code_of(url)
    assert (found, told in sentence) == (code, True), sentence


async def test_no_gateway_at_all_says_how_to_start_one() -> None:
    code, sentence = await code_of("http://user:secret@127.0.0.1:1")
    assert code == "service_unavailable"
    assert "giornata up" in sentence
    assert "secret" not in sentence


async def test_a_key_is_sent_and_a_missing_one_refused(
    nats_url: str, redis_url: str, tmp_path: Path, run: Run
) -> None:
    keys = write_keys(tmp_path, {"key-of-alice": "alice"})
    async with open_stage(nats_url, redis_url, tmp_path, api_keys_file=keys) as stage:
        code, sentence = await code_of(stage.url)
        assert code == "unauthorized"
        assert "--api-key KEY, or GIORNATA_API_KEY" in sentence
        assert "Authorization" not in sentence
        async with open_http(stage.url, "key-of-alice") as door:
            outcome = await door.edit(ORDER, unheard)
            assert (await door.read("/v1/fleet"))["instances"]
        assert outcome.pictures
        assert (await run("status", "--url", stage.url, "--json")).exit_code == 1


async def test_an_edit_that_nobody_accepted_yet_has_no_job_to_cancel() -> None:
    reached, done = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await done.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with server, open_http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None) as door:
        editing = asyncio.ensure_future(door.edit(ORDER, unheard))
        await reached.wait()
        editing.cancel()
        with pytest.raises(EditStopped, match="before the edit was accepted"):
            await editing
        done.set()


async def test_the_served_models_are_told_and_one_that_is_not_is_named(stage: Stage, run: Run) -> None:
    [told] = json.loads((await run("models", "tiny", "--url", stage.url, "--json")).stdout)
    assert (told["id"], told["defaults"]["edit"]["num_inference_steps"]) == ("tiny", 3)
    whole = await run("models", "--url", stage.url)
    assert (whole.exit_code, "tiny" in whole.stdout) == (0, True)
    refused = await run("models", "other", "--url", stage.url)
    assert refused.exit_code == 1
    assert "model_not_found" in refused.stderr
    assert "Accepted: tiny" in refused.stderr


async def test_a_mask_is_written_and_its_regions_are_told(stage: Stage, tmp_path: Path, run: Run) -> None:
    picture = np.full((32, 48, 3), 200, np.uint8)
    picture[4:20, 8:30] = (255, 0, 0)
    photo, out = tmp_path / "photo.png", tmp_path / "mask.png"
    Image.fromarray(picture).save(photo, "PNG")

    async def asked(words: str, *more: str, to: Path = out) -> tuple[int, str]:
        told = await run("mask", str(photo), words, "-o", str(to), "--url", stage.url, *more)
        return told.exit_code, told.output

    def refused(told: tuple[int, str], code: str) -> bool:
        return told[0] == 1 and code in told[1]

    assert refused(await asked("red"), "masks_not_served")
    stage.router.masks = CARD
    async with ColourMasks(stage.router.bus, stage.router.blobs, "tiny").running():
        await stage.router.announce()
        status, told = await asked("red", "--json")
        [region] = json.loads(told)["regions"]
        assert (status, region["box"], region["area"]) == (0, [8, 4, 22, 16], 22 * 16)
        assert np.array_equal(np.asarray(Image.open(out)), picture[..., 1] == 0)
        assert refused(await asked("green"), "nothing_found")
        assert (await asked("red", "--model", "tiny"))[0] == 0
        assert refused(await asked("red", "--model", "other"), "model_not_found")
        assert refused(await asked("red", to=tmp_path / "no" / "m.png"), "output_not_written")


# The NATS door: refusals, and edits that are given up.


async def test_a_refusal_keeps_its_code(stage: Stage, nats_url: str) -> None:
    order = EditCall(b"picture", None, {"prompt": "a hat", "model": "unheard-of"})
    async with open_nats(nats_url, None, None, "default", 20) as door:
        with pytest.raises(RequestRefused) as raised:
            await door.edit(order, unheard)
    assert raised.value.body.code == "model_not_found"


async def give_up(listening: bus.Bus, url: str, told: str) -> None:
    """Give an edit up as soon as it is sent, which `listening` hears of; the door tells `told`."""
    sent = await listening.client.subscribe(subjects.EDIT)
    await barrier(listening.client)
    async with open_nats(url, None, None, "default", 20) as door:
        editing = asyncio.ensure_future(door.edit(ORDER, unheard))
        await sent.next_msg(HUNG_S)
        editing.cancel()
        with pytest.raises(EditStopped, match=told):
            await editing


async def test_an_edit_that_is_given_up_as_soon_as_it_is_sent(stage: Stage, nats_url: str) -> None:
    stage.router.hold = asyncio.Event()
    async with bus.connect(nats_url, "observer") as observer:
        await give_up(observer, nats_url, "Cancelled job ")
    assert (await stage.record()).cancel


async def test_a_gateway_that_never_accepts_is_not_waited_for_long(
    nats_account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats, "CANCEL_S", 0.1)
    async with bus.connect(nats_account, "silent") as silent:
        await give_up(silent, nats_account, "has not confirmed that the edit is cancelled")


@pytest.mark.usefixtures("impatient")
async def test_no_gateway_and_no_server(private_nats: NatsServer) -> None:
    async with open_nats(private_nats.url, None, None, "default", 20) as door:
        with pytest.raises(RequestRefused) as raised:
            await door.edit(ORDER, unheard)
    assert raised.value.body.code == "service_unavailable"
    private_nats.kill()
    with pytest.raises(RequestRefused):
        async with asyncio.timeout(HUNG_S), open_nats(private_nats.url, None, None, "default", 20):
            raise AssertionError("there is no server")


# Commands of tenants against a real gateway: ``giornata lora`` and ``giornata webhooks``.


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
