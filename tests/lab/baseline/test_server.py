"""The baseline server: its batches, what it refuses, and the program."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from PIL import Image

from giornata_lab.baseline.pipeline import PipelineCallSettings, PipelineRow
from giornata_lab.baseline.server import BatchPolicy
from tests.lab.baseline.served import FOREVER_S, edited, form, pixels, served


@dataclass
class Painter:
    """A pipeline that paints grey at once, or when it may; knows what it was asked."""

    name: str = "grey"
    calls: list[tuple[int, PipelineCallSettings]] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    may: threading.Event = field(default_factory=threading.Event)
    failing: set[str] = field(default_factory=set)

    def paint(self, rows: Sequence[PipelineRow], alike: PipelineCallSettings) -> list[Image.Image]:
        self.calls.append((len(rows), alike))
        self.began.set()
        self.may.wait()
        if self.failing & {row.prompt for row in rows}:
            raise RuntimeError("out of memory")
        return [Image.new("L", (alike.width, alike.height), row.seed % 256) for row in rows]


@pytest.fixture
def painter() -> Painter:
    painter = Painter()
    painter.may.set()
    return painter


@contextmanager
def held(painter: Painter) -> Iterator[None]:
    """It paints nothing while inside; a test that fails there leaves no thread that waits."""
    painter.may.clear()
    try:
        yield
    finally:
        painter.may.set()


async def test_requests_that_differ_in_steps_are_not_one_batch(painter: Painter) -> None:
    async with served(painter, BatchPolicy(2, FOREVER_S)) as http:
        answers = await asyncio.gather(
            *(edited(http, num_inference_steps=steps, n="1") for steps in ("4", "8", "8", "4"))
        )
    assert [status for status, _ in answers] == [200] * 4
    assert sorted((rows, alike.steps) for rows, alike in painter.calls) == [(2, 4), (2, 8)]


async def test_pictures_of_a_request_have_seeds_of_their_own_and_fill_a_batch(painter: Painter) -> None:
    async with served(painter, BatchPolicy(3, FOREVER_S)) as http:
        status, body = await edited(http, n="3", seed="7")
    assert (status, [int(pixels(body, index)[0, 0]) for index in range(3)]) == (200, [7, 8, 9])
    assert (body["size"], len(painter.calls)) == ("64x48", 1)


async def test_who_comes_while_a_batch_is_computed_waits_for_the_next_or_is_refused(painter: Painter) -> None:
    async with served(painter, BatchPolicy(2, 0.0), most=3) as http:
        with held(painter):
            first = asyncio.ensure_future(edited(http, n="2"))
            await asyncio.to_thread(painter.began.wait)
            others = [asyncio.ensure_future(edited(http, n="2")) for _ in range(2)]
            [refused], _ = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            assert (refused.result()[0], refused.result()[1]["error"]["code"]) == (429, "queue_full")
        assert sorted(status for status, _ in await asyncio.gather(first, *others)) == [200, 200, 429]
    assert [rows for rows, _ in painter.calls] == [2, 2]


async def test_a_client_that_leaves_takes_its_rows_along(painter: Painter) -> None:
    async with served(painter, BatchPolicy(2, FOREVER_S)) as http:
        with pytest.raises(TimeoutError):
            await http.post("/v1/images/edits", data=form(), timeout=aiohttp.ClientTimeout(total=0.3))
        status, body = await edited(http, n="2", seed="9")
    assert (status, [one["seed"] for one in body["static_batching"]]) == (200, [9, 10])
    assert [rows for rows, _ in painter.calls] == [2]


async def test_a_batch_that_fails_is_told_and_the_next_goes_on(painter: Painter) -> None:
    painter.failing.add("poison")
    async with served(painter, BatchPolicy(2, 0.0)) as http:
        status, body = await edited(http, prompt="poison", n="2")
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "out of memory" in body["error"]["message"]
        assert (await edited(http))[0] == 200


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": ""}, (400, "invalid_field", "prompt")),
        ({"num_inference_steps": "0"}, (400, "invalid_field", "num_inference_steps")),
        ({"reuse": "off"}, (400, "unknown_field", "reuse")),
        ({"size": "8x8"}, (400, "invalid_field", "size")),
        ({"model": "other"}, (404, "model_not_found", "model")),
        ({"response_format": "url"}, (400, "invalid_field", "response_format")),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(
    painter: Painter, fields: dict[str, str], expected: tuple[int, str, str]
) -> None:
    async with served(painter, BatchPolicy(1, 0.0)) as http:
        status, body = await edited(http, 0, **fields)
    assert (status, body["error"]["code"], body["error"]["param"]) == expected
    assert painter.calls == []


async def test_the_program_serves_the_model_that_ships_until_it_is_told_to_stop() -> None:
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "giornata_tools.cli",
            "bench",
            "baseline",
            "--port",
            "0",
            "--window-ms",
            "0",
            "--torch-threads",
            "1",
        ),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        [url] = re.findall(r"^fresco at (http://\S+): up to 8 pictures a batch$", said)
        async with aiohttp.ClientSession(url) as http:
            status, body = await edited(http, num_inference_steps="1")
            async with http.get("/v1/models") as response:
                [model] = (await response.json())["data"]
        assert (status, body["size"], model["id"]) == (200, "64x48", "fresco")
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 130
