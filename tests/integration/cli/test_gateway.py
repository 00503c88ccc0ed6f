"""The command line's HTTP door against a gateway with a scripted router, and against what is no gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from giornata_tools.cli import mask, models, status
from giornata_tools.cli.app import cli
from giornata_tools.clients.edits import EditCall, EditProgress, EditStopped, Preview, RequestRefused
from giornata_tools.clients.http import open_http
from tests.fakes.colours import CARD, ColourMasks
from tests.fakes.key_files import write_keys
from tests.integration.gateway_fakes import Stage, open_stage

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


async def test_a_key_is_sent_and_a_missing_one_refused(nats_url: str, redis_url: str, tmp_path: Path) -> None:
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
        assert await status.run(stage.url, None, watch=False, as_json=True) == 1


async def test_a_cancelled_edit_cancels_its_job(stage: Stage) -> None:
    stage.router.hold = asyncio.Event()
    heard = asyncio.Event()
    async with open_http(stage.url, None) as door:
        editing = asyncio.ensure_future(door.edit(ORDER, lambda told: heard.set()))
        await heard.wait()
        editing.cancel()
        with pytest.raises(EditStopped, match="ancelled"):
            await editing
    assert (await stage.record()).cancel


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


async def test_the_served_models_are_told_and_one_that_is_not_is_named(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await models.run(stage.url, None, "tiny", as_json=True) == 0
    [told] = json.loads(capsys.readouterr().out)
    assert (told["id"], told["defaults"]["edit"]["num_inference_steps"]) == ("tiny", 3)
    assert await models.run(stage.url, None, None, as_json=False) == 0
    assert "tiny" in capsys.readouterr().out
    assert await models.run(stage.url, None, "other", as_json=False) == 1
    refused = capsys.readouterr().err
    assert "model_not_found" in refused
    assert "Accepted: tiny" in refused


async def test_a_mask_is_written_and_its_regions_are_told(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("giornata_tools.terminal.run", lambda main: asyncio.run(main()))  # in a thread
    picture = np.full((32, 48, 3), 200, np.uint8)
    picture[4:20, 8:30] = (255, 0, 0)
    target, out = BytesIO(), tmp_path / "mask.png"
    Image.fromarray(picture).save(target, "PNG")
    ask = partial(mask.run, stage.url, None, target.getvalue(), out=str(out))
    assert await ask(fields={"prompt": "red"}, as_json=False) == 1
    assert "masks_not_served" in capsys.readouterr().err
    stage.router.masks = CARD
    async with ColourMasks(stage.router.bus, stage.router.blobs, "tiny").running():
        await stage.router.announce()
        assert await ask(fields={"prompt": "red"}, as_json=True) == 0
        [region] = json.loads(capsys.readouterr().out)["regions"]
        assert (region["box"], region["area"]) == ([8, 4, 22, 16], 22 * 16)
        assert np.array_equal(np.asarray(Image.open(out)), picture[..., 1] == 0)
        assert await ask(fields={"prompt": "green"}, as_json=False) == 1
        assert "nothing_found" in capsys.readouterr().err
        (photo := tmp_path / "photo.png").write_bytes(target.getvalue())
        words = ["mask", str(photo), "red", "-o", str(out), "--url", stage.url, "--model"]
        assert (await asyncio.to_thread(CliRunner().invoke, cli, [*words, "tiny"])).exit_code == 0
        unknown = await asyncio.to_thread(CliRunner().invoke, cli, [*words, "other"])
        assert (unknown.exit_code, "model_not_found" in unknown.output) == (1, True)
        nowhere = mask.run(
            stage.url, None, target.getvalue(), {"prompt": "red"}, f"{tmp_path}/no/m.png", as_json=False
        )
        assert await nowhere == 1
