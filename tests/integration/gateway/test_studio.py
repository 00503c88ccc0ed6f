"""The files of the studio page, and the live stream of the fleet, as a browser gets them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

import giornata_gateway
from giornata.wire.workers import RowProgress
from tests.integration.gateway_fakes import Stage, open_gateway
from tests.patience import HUNG_S

STATIC = Path(giornata_gateway.__file__).parent / "static"


async def test_every_file_is_served_with_its_type_and_a_strict_policy(stage: Stage) -> None:
    pages = {"/": "index.html", "/docs": "docs.html"}
    files = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()]
    for url, name in {**pages, **{f"/studio/{name}": name for name in files}}.items():
        answer = await stage.get(url)
        assert answer.status == 200, url
        assert answer.body == (STATIC / name).read_bytes()
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-cache"


async def test_a_file_that_the_browser_has_is_not_sent_again(stage: Stage) -> None:
    tag = (await stage.get("/")).headers["ETag"]
    for known, status in ((tag, 304), (f'W/{tag}, "x"', 304), ('"other"', 200)):
        answer = await stage.get("/", headers={"If-None-Match": known})
        assert (answer.status, answer.headers["ETag"]) == (status, tag)
        assert bool(answer.body) == (status == 200)


@pytest.mark.parametrize("path", ["nothing.js", "../catalog.py", "js/%2e%2e/%2e%2e/catalog.py", "js/", "."])
async def test_nothing_else_is_served(stage: Stage, path: str) -> None:
    assert (await stage.get(f"/studio/{path}")).code == (404, "route_not_found")


def test_the_pages_name_only_files_that_are_there_and_no_inline_code() -> None:
    for page in ("index.html", "docs.html"):
        text = (STATIC / page).read_text("utf-8")
        named = re.findall(r'(?:src|href)="studio/([^"]+)"', text)
        assert len(named) > 3
        assert [name for name in named if not (STATIC / name).is_file()] == []
        assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", text) == []
    for module in (STATIC / "js").glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', module.read_text("utf-8")):
            assert (STATIC / "js" / name).is_file(), f"{module.name} imports {name}"


def test_the_samples_are_there_small_and_credited() -> None:
    samples = json.loads((STATIC / "samples" / "samples.json").read_text("utf-8"))["samples"]
    notes = (STATIC / "samples" / "README.md").read_text("utf-8")
    for sample in samples:
        assert (STATIC / "samples" / sample["file"]).stat().st_size < 40_000
        assert sample["mask"] is None or (STATIC / "samples" / sample["mask"]).is_file()
        assert sample["title"]
        assert sample["prompt"]
        assert f"`{sample['file']}`" in notes


async def test_the_fleet_is_told_again_and_again(stage: Stage) -> None:
    async with stage.http.get("/v1/fleet", headers={"Accept": "text/event-stream"}) as answer:
        assert answer.content_type == "text/event-stream"
        running = []
        async for line in answer.content:
            if line.startswith(b"event:"):
                assert line == b"event: fleet\n"
            if not line.startswith(b"data: "):
                continue
            running.append(json.loads(line[6:])["running_rows"])
            if running[-1]:
                break
            stage.router.progress = (RowProgress(job_id="j", attempt=1, index=0, step=1, steps=9, tokens=4),)
    assert running[0] == 0
    assert running[-1] == 1


async def test_watchers_of_the_fleet_are_counted_and_sent_away_at_the_drain(
    stage: Stage, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    accept = {"Accept": "text/event-stream"}
    async with (
        open_gateway(stage.router, nats_url, redis_url, tmp_path / "one", max_streams=1) as only,
        only.http.get("/v1/fleet", headers=accept) as first,
    ):
        answer = (await only.get("/v1/fleet", headers=accept)).expect(429)
        assert "Retry-After" in answer.headers
        only.stop.set()
        async with asyncio.timeout(HUNG_S):
            assert b"event: fleet" in await first.read()
