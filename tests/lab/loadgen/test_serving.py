"""``giornata bench serve`` against servers of OpenAI's image API: what they are sent, and how answers are told."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from giornata_lab.cli.bench import BenchPlan, BenchTarget, run
from giornata_lab.loadgen.driver import ApiDialect
from giornata_lab.loadgen.traces import OfferedLoad
from giornata_lab.loadgen.workload import MaskShape, WorkloadRequest
from tests.integration.gateway_fakes import Stage
from tests.lab.loadgen.images_server import Asked, at_once, images_server, pictures, refused

KEY = "sk-never-shown"


def load(count: int, *, gap_s: float = 0.01, rate: float | None = 100.0, **asked: Any) -> OfferedLoad:
    """`count` requests, `gap_s` apart, all of them measured."""
    due = WorkloadRequest(0.0, 0, 0.2, 8, 1, 0, MaskShape.BLOB)
    requests = tuple(
        replace(due, at_s=number * gap_s, template=number % 2, seed=number, **asked)
        for number in range(count)
    )
    return OfferedLoad(rate, requests, 0.0, 1.0)


def plan(out: Path, *urls: str, loads: tuple[OfferedLoad, ...], **options: Any) -> BenchPlan:
    targets = tuple(BenchTarget(name, url) for name, url in zip(("ours", "theirs"), urls, strict=False))
    standard: dict[str, Any] = {
        "api": ApiDialect.GIORNATA,
        "api_key": None,
        "templates": None,
        "size": (48, 32),
        "fields": {"prompt": "a hat"},
        "slo_s": None,
        "in_flight": 1000,
        "timeout_s": 60.0,
        "seed": 0,
        "options": {"rate": "100"},
    }
    return BenchPlan(targets=targets, loads=loads, out=out, **{**standard, **options})


def report(out: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((out / "report.json").read_text())
    return told


async def test_requests_are_sent_as_drawn_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with images_server() as server:
        asked_for = plan(tmp_path, server.url, loads=(load(6, n=2),), api_key=KEY, slo_s=30.0)
        assert await run(asked_for) == 0
        first, *rest = server.asked
    [told] = report(tmp_path)["runs"]
    assert first.fields == {"prompt": "a hat", "n": "2", "seed": "0", "num_inference_steps": "8"}
    assert sorted(asked.fields["seed"] for asked in rest) == ["0", "1", "2", "3", "4", "5"]
    assert {asked.authorization for asked in server.asked} == {f"Bearer {KEY}"}
    assert len({asked.files["image"] for asked in server.asked}) == 2, "two templates"
    mask = np.asarray(Image.open(io.BytesIO(first.files["mask"])))
    assert mask.shape == (32, 48, 4)
    assert (mask[..., 3] == 0).sum() == round(0.2 * 48 * 32)
    figures = told["figures"]
    assert (figures["requests"], figures["succeeded"], figures["pictures"]) == (6, 6, 12)
    assert (figures["errors"], figures["slo_share"]) == ({}, 1.0)
    assert len(told["requests"]) == 6
    assert (tmp_path / "latency_cdf.svg").is_file()
    printed = "".join(capsys.readouterr())
    assert "served/s" in printed
    assert KEY not in printed + (tmp_path / "report.json").read_text()


async def test_errors_are_told_by_their_codes_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def respond(asked: Asked) -> web.StreamResponse:
        match asked.number:
            case 1 | 2:
                return refused(429, "queue_full", "come again")
            case 3:
                return web.Response(status=502, text="<html>")
            case 4:
                asked.transport.abort()
            case 5:
                return pictures(1)
            case 6:
                return web.json_response({"data": "?"})
        return await at_once(asked)

    async with images_server(respond) as server:
        assert await run(plan(tmp_path, server.url, loads=(load(9, n=2, gap_s=0.05),))) == 0
    [told] = report(tmp_path)["runs"]
    assert told["figures"]["errors"] == {
        "queue_full": 2,
        "http_502": 1,
        "connection_lost": 1,
        "pictures_missing": 1,
        "not_an_image_answer": 1,
    }
    assert told["figures"]["succeeded"] == 3
    assert "ours, 100/s: 2 x queue_full: come again" in capsys.readouterr().out


async def test_an_overloaded_server_is_sent_everything_before_it_has_answered_anything(
    tmp_path: Path,
) -> None:
    """A generator that waited for answers would never send the second request; this one's latencies grow."""
    count, turns = 12, asyncio.Semaphore(0)

    async def respond(asked: Asked) -> web.StreamResponse:
        if asked.number:
            await turns.acquire()
            if len(server.asked) <= count:
                return refused(500, "answered_too_early")
            asyncio.get_running_loop().call_later(0.02, turns.release)
        return await at_once(asked)

    async def begin() -> None:
        await server.until(count + 1)
        turns.release()

    async with images_server(respond) as server, asyncio.TaskGroup() as group:
        group.create_task(begin())
        assert await run(plan(tmp_path, server.url, loads=(load(count),))) == 0
    [told] = report(tmp_path)["runs"]
    assert (told["figures"]["errors"], told["figures"]["in_flight"]) == ({}, count)
    ends = [
        line["ended_s"] - line["at_s"] for line in sorted(told["requests"], key=lambda line: line["ended_s"])
    ]
    assert ends[0] < ends[-1]


async def test_a_server_that_refuses_the_first_request_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def respond(_: Asked) -> web.StreamResponse:
        return refused(401, "unauthorized", "no key")

    async with images_server() as ours, images_server(respond) as theirs:
        assert await run(plan(tmp_path, ours.url, theirs.url, loads=(load(3),))) == 1
    assert len(ours.asked) == len(theirs.asked) == 1
    told = capsys.readouterr().err
    assert f"theirs at {theirs.url} does not answer an edit with a picture: no key" in told
    assert "[unauthorized]" in told


async def test_ctrl_c_reports_what_there_is(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def respond(asked: Asked) -> web.StreamResponse:
        if asked.number > 3:
            await held.wait()
        return await at_once(asked)

    async with images_server(respond) as server:
        trace = tmp_path / "trace.csv"
        trace.write_text("timestamp\n0\n0.01\n0.02\n0.03\n0.04\n0.05\n3600\n")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "giornata_tools.cli", "bench", "serve", "--url", server.url),
            *(
                "--trace",
                str(trace),
                "--warmup",
                "0",
                "--picture-size",
                "32x32",
                "--out",
                str(tmp_path / "out"),
            ),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await server.until(1 + 6)
        process.send_signal(signal.SIGINT)
        printed, said = await process.communicate()
        held.set()
    assert process.returncode == 130, said.decode()
    assert "Stopped; this is what there is." in said.decode()
    told = report(tmp_path / "out")
    assert told["interrupted"] is True
    answered = {str(line["seed"]) for line in told["runs"][0]["requests"]}
    assert answered <= {asked.fields["seed"] for asked in server.asked[1:4]}
    given_up = f"{7 - len(answered)} requests were given up without an answer or not sent"
    assert given_up in printed.decode()


async def test_giornatas_gateway_takes_every_field(stage: Stage, tmp_path: Path) -> None:
    fields = {"prompt": "a hat", "reuse": "off", "halo": "2", "output_format": "jpeg"}
    assert await run(plan(tmp_path, stage.url, loads=(load(3, n=2),), fields=fields)) == 0
    [told] = report(tmp_path)["runs"]
    assert (told["figures"]["errors"], told["figures"]["pictures"]) == ({}, 6)
    parameters = (await stage.record()).job.parameters
    assert (parameters.num_inference_steps, parameters.n, parameters.halo) == (8, 2, 2)
