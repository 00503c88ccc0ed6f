"""The program ``giornata`` against a whole stack: pictures, progress, refusals, Ctrl-C, the fleet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from giornata.fleet import Fleet
from giornata.wire.workers import ServiceName
from giornata_lab.bench.systems.edit_forms import box, file, pixels, scene
from giornata_tools.launcher.plan import ONE_EACH
from tests import forked_programs
from tests.e2e.live import LiveStack
from tests.patience import HUNG_S

DOORS = ("http", "nats")
NOTHING: Mapping[str, str] = MappingProxyType({})
LONG = ("--num-inference-steps", "200")


def environment(**added: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIORNATA_")}
    return {**clean, "TERM": "xterm", "COLUMNS": "120", **added}


PROGRAM = (sys.executable, "-m", "giornata_tools.cli")
"""It is forked; that it starts by its own name is seen by the examples of the pages."""


async def giornata(
    *arguments: str, cwd: Path, stdin: bytes = b"", env: Mapping[str, str] = NOTHING
) -> tuple[int, bytes, str]:
    """Exit status, standard output, standard error."""
    return await forked_programs.run(*PROGRAM, *arguments, env=environment(**env), stdin=stdin, cwd=cwd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a photograph and its mask."""
    (tmp_path / "photo.png").write_bytes(file(scene()))
    (tmp_path / "mask.png").write_bytes(file(box()))
    return tmp_path


def edit(*more: str) -> tuple[str, ...]:
    quick = () if "--num-inference-steps" in more else ("--num-inference-steps", "4")
    fixed = ("--mask", "mask.png", "--prompt", "a red hat", "--seed", "7", "--mask-blur", "0")
    return ("edit", "photo.png", *fixed, *quick, *more)


def door(stack: LiveStack, kind: str) -> tuple[str, str]:
    return ("--url", stack.url) if kind == "http" else ("--nats", stack.nats_url)


async def test_an_edit_repaints_inside_the_mask_alone_and_both_doors_paint_the_same(
    stack: LiveStack, folder: Path
) -> None:
    inside, painted = box() == 255, []
    for kind in DOORS:
        arguments = edit("--reuse", "off", "-o", f"{kind}.png", *door(stack, kind))
        status, out, err = await giornata(*arguments, cwd=folder)
        assert (status, out) == (0, b""), err
        assert err.startswith(f"{kind}.png: 128x96, seed 7, ")
        result = pixels((folder / f"{kind}.png").read_bytes()).astype(int)
        assert np.array_equal(result[~inside], scene()[~inside])
        assert np.abs(result[inside] - scene()[inside]).mean() > 5
        painted.append(result)
    assert np.abs(painted[0] - painted[1]).max() <= 1


@pytest.mark.parametrize("kind", DOORS)
async def test_several_pictures_their_previews_and_the_report(
    stack: LiveStack, folder: Path, kind: str
) -> None:
    asked = ("-n", "2", "--partial-images", "2", "--padding-mask-crop", "8", "-o", "it.webp", "--json")
    arguments = edit(*asked, *door(stack, kind))
    status, out, err = await giornata(*arguments, cwd=folder)
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert [(p["file"], p["seed"]) for p in report["pictures"]] == [("it-0.webp", 7), ("it-1.webp", 8)]
    assert report["size"] == "128x96"
    assert report["errors"] == []
    for picture in report["pictures"]:
        data = (folder / picture["file"]).read_bytes()
        assert (data[8:12], len(data)) == (b"WEBP", picture["bytes"])
    names = sorted(Path(preview["file"]).stem for preview in report["previews"])
    assert names == ["it-0-preview-0", "it-0-preview-1", "it-1-preview-0", "it-1-preview-1"]
    for preview in report["previews"]:
        assert max(pixels((folder / preview["file"]).read_bytes()).shape) <= 128
        assert preview["box"] == [24, 12, 48, 48], "32x24 pixels with 8 around, made square"


async def test_pictures_go_through_pipes(stack: LiveStack, folder: Path) -> None:
    arguments = (
        "edit",
        "-",
        "--num-inference-steps",
        "2",
        "-o",
        "-",
        "--output-format",
        "jpeg",
        "--prompt",
        "hat",
    )
    given, env = file(scene()), {"GIORNATA_URL": stack.url}
    status, out, err = await giornata(*arguments, cwd=folder, stdin=given, env=env)
    assert status == 0, err
    assert out[:2] == b"\xff\xd8"
    assert pixels(out).shape == (96, 128, 3)


async def test_progress_is_drawn_on_a_terminal(stack: LiveStack, folder: Path) -> None:
    async with terminal(*edit("-o", "edited.png", *door(stack, "http")), cwd=folder) as (process, seen):
        assert await process.wait() == 0
    assert "━" in seen.text
    assert "4/4" in seen.text
    assert "edited.png: 128x96, seed 7" in seen.text


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize(("kind", "number"), [("http", signal.SIGINT), ("nats", signal.SIGTERM)])
async def test_ctrl_c_cancels_and_says_so(stack: LiveStack, folder: Path, kind: str, number: int) -> None:
    async with terminal(*edit("-o", "edited.png", *LONG, *door(stack, kind)), cwd=folder) as (process, seen):
        await seen.until("running")
        process.send_signal(number)
        assert await process.wait() == 130
    assert "Cancelled job " in seen.text
    assert not (folder / "edited.png").exists()
    await stack.until(_idle)


@pytest.mark.usefixtures("slow_steps")
async def test_time_that_is_over_cancels(stack: LiveStack, folder: Path) -> None:
    late = edit("-o", "e.png", "--timeout", "0.4", *LONG, *door(stack, "http"))
    status, _, err = await giornata(*late, cwd=folder)
    assert (status, "[deadline_exceeded]" in err) == (1, True), err
    await stack.until(_idle)


async def test_large_pictures_travel_over_nats_through_the_blob_store(stack: LiveStack, folder: Path) -> None:
    large = np.random.default_rng(0).integers(0, 256, (1536, 2048, 3), dtype=np.uint8)
    (folder / "photo.png").write_bytes(file(large))
    (folder / "mask.png").write_bytes(file(box(2048, 1536)))
    arguments = edit(
        "-o", "e.png", "--blobs", stack.blobs_url, "--padding-mask-crop", "8", *door(stack, "nats")
    )
    status, _, err = await giornata(*arguments, cwd=folder)
    assert status == 0, err
    outside = box(2048, 1536) == 0
    assert np.array_equal(pixels((folder / "e.png").read_bytes())[outside], large[outside])


async def test_the_fleet_as_table_and_as_json(stack: LiveStack, folder: Path) -> None:
    status, out, err = await giornata("status", "--url", stack.url, cwd=folder)
    assert status == 0, err
    lines = out.decode().splitlines()
    running = {service for service, count in ONE_EACH.items() if count}
    for service in running:
        assert any(line.startswith(service) and "ready" in line for line in lines), lines
    status, out, err = await giornata("status", "--url", stack.url, "--json", cwd=folder)
    assert status == 0, err
    assert {one["service"] for one in json.loads(out)["instances"]} == running


async def test_watching_draws_the_table_until_ctrl_c(stack: LiveStack, folder: Path) -> None:
    async with terminal("status", "--watch", "--url", stack.url, cwd=folder) as (process, seen):
        await seen.until("predicted wait: 0.0 s")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    assert stack.instances(ServiceName.DENOISER)[0] in seen.text


class Seen:
    """What a program has written to its terminal."""

    def __init__(self) -> None:
        self.text = ""
        self._more = asyncio.Condition()

    async def read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):  # the terminal ends with its last program, as an error on Linux
            while data := await reader.read(4096):
                async with self._more:
                    self.text += data.decode(errors="replace")
                    self._more.notify_all()

    async def until(self, text: str) -> None:
        """Until it has written what the regular expression `text` matches."""
        async with asyncio.timeout(HUNG_S), self._more:
            await self._more.wait_for(lambda: re.search(text, self.text))


@asynccontextmanager
async def terminal(*arguments: str, cwd: Path) -> AsyncIterator[tuple[Any, Seen]]:
    """The program with a terminal for what it writes; on leaving, everything of it has been seen."""
    primary, secondary = pty.openpty()
    files = {"stdin": asyncio.subprocess.DEVNULL, "stdout": secondary, "stderr": secondary}
    process = await forked_programs.spawn(
        *PROGRAM, *arguments, cwd=cwd, env=environment(), start_new_session=True, **files
    )
    os.close(secondary)
    reader, seen = asyncio.StreamReader(), Seen()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(primary, "rb", buffering=0)
    )
    reading = asyncio.create_task(seen.read(reader))
    try:
        yield process, seen
        await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        reading.cancel()
        transport.close()


def _idle(fleet: Fleet) -> Any:
    return all(not s.worker.running and not s.worker.waiting for s in fleet.all() if s.worker)
