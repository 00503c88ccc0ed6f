"""Are accepted jobs lost while preposts stand still, and who waits while one tenant's pictures are heavy?

``python -m tests.lab.bench.prepost_faults`` starts whole stacks with small models, and prints a line for each of three
scenes: one of two preposts is stopped under load, all of them are, and a tenant sends many 40-megapixel pictures with
the largest masks while another edits a small picture again and again. Takes about ten minutes on two cores.

Writes ``out/bench/prepost_faults.json``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import numpy as np

from giornata.families import Family
from giornata.wire.workers import ServiceName
from giornata_lab.bench.reporting.report import write
from giornata_lab.bench.systems.edit_forms import box, edit_form, file
from giornata_lab.flags import option, parsed
from giornata_tools.checkout import MODELS
from giornata_tools.launcher.models import choose
from tests.e2e.live import LiveStack, live_stack
from tests.fakes.key_files import write_keys

MANY, ONE = "gio_many", "gio_one"
HEAVY: Final = {"grow_mask": 512, "mask_blur": 256}
LIMIT_S: Final = 1200.0


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--scenes", type=str, default="one,all,heavy", help="which of them, by comma"),
            option("--stopped", type=float, default=60.0, help="seconds that one of two stands still"),
            option("--all-stopped", type=float, default=30.0, help="seconds that all stand still"),
            option("--jobs", type=int, default=32, help="jobs while preposts stand still"),
            option("--heavy", type=int, default=44, help="jobs with heavy pictures"),
            option("--megapixels", type=float, default=40.0, help="of each; less on a busy machine"),
        ],
        arguments,
    )


async def submitted(http: aiohttp.ClientSession, form: aiohttp.FormData) -> list[str]:
    """Path of a job, if it is accepted: without any prepost the gateway refuses with 503."""
    async with http.post("/v1/jobs", data=form) as answer:
        body = await answer.json()
        if answer.status not in {202, 503}:
            raise SystemExit(f"a job was refused: {body}")
        return [f"/v1/jobs/{body['id']}"] if answer.status == 202 else []


async def outcome(http: aiohttp.ClientSession, job: str) -> dict[str, Any]:
    """The job's status once it has ended."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            async with http.get(job) as answer:
                status: dict[str, Any] = await answer.json()
            if status["state"] in {"completed", "failed", "cancelled"}:
                return status
            await asyncio.sleep(0.5)


def told(statuses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many were lost, and of what."""
    errors = Counter(
        str((one.get("error") or {}).get("code")) for one in statuses if one["state"] != "completed"
    )
    return {"jobs": len(statuses), "lost": sum(errors.values()), "errors": ", ".join(errors) or "none"}


async def stopped(live: LiveStack, victims: Sequence[str], seconds: float, jobs: int) -> dict[str, Any]:
    """Submit `jobs` while `victims` stand still for so many seconds."""
    pids = [live.pid(name) for name in victims]
    async with aiohttp.ClientSession(live.url, headers={"Authorization": f"Bearer {ONE}"}) as http:
        paths = list[str]()
        for i in range(jobs // 4):
            paths += await submitted(http, edit_form(seed=i, reuse="off"))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        try:
            for i in range(jobs // 4, jobs):
                paths += await submitted(http, edit_form(seed=i, reuse="off"))
                await asyncio.sleep(seconds / jobs)
            await asyncio.sleep(max(0.0, began_s + seconds - time.monotonic()))
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        statuses = [await outcome(http, path) for path in paths]
        after_s = time.monotonic() - began_s - seconds
    return {**told(statuses), "refused": jobs - len(paths), "done": f"{after_s:.1f} s after"}


async def edits(http: aiohttp.ClientSession, until: asyncio.Event | None, count: int) -> list[float]:
    """Seconds of each of another tenant's edits, one after the other: `count` of them, or until the event."""
    took: list[float] = []
    while len(took) < count and not (until and until.is_set()):
        began_s = time.monotonic()
        form = edit_form(seed=len(took), reuse="off", response_format="b64_json")
        async with http.post("/v1/images/edits", data=form) as answer:
            if answer.status != 200:
                raise SystemExit(f"another tenant's edit failed: {await answer.text()}")
            await answer.read()
        took.append(time.monotonic() - began_s)
        await asyncio.sleep(0.2)
    return took


async def heavy(live: LiveStack, count: int, megapixels: float) -> dict[str, Any]:
    """Another tenant's edits alone, and beside so many heavy jobs of one tenant."""
    width, height = (round(side * (megapixels / 40) ** 0.5) for side in (8000, 5000))
    picture = file(np.full((height, width, 3), 120, np.uint8))
    mask = file(box(width, height))
    headers = [{"Authorization": f"Bearer {key}"} for key in (MANY, ONE)]
    async with (
        aiohttp.ClientSession(live.url, headers=headers[0]) as many,
        aiohttp.ClientSession(live.url, headers=headers[1]) as one,
    ):
        began_s = time.monotonic()
        [path] = await submitted(many, edit_form(picture, mask, reuse="off", **HEAVY))
        await outcome(many, path)
        alone_s = time.monotonic() - began_s
        alone = await edits(one, None, 10)
        paths = list[str]()
        for i in range(count):
            paths += await submitted(many, edit_form(picture, mask, seed=i, reuse="off", **HEAVY))
        over = asyncio.Event()
        beside = asyncio.create_task(edits(one, over, 100_000))
        statuses = [await outcome(many, path) for path in paths]
        over.set()
        took = await beside
    return {
        **told(statuses),
        "picture": f"{len(picture) // 1024} KB",
        "alone": f"{statistics.median(alone):.2f} s",
        "beside": f"{statistics.median(took):.2f} s, at most {max(took):.2f} s, {len(took)} edits",
        "one heavy alone": f"{alone_s:.1f} s",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = options_of(arguments)
    model = Path(asyncio.run(choose({}, Family.FLUX_FILL, MODELS, print)).source)
    lines: list[dict[str, Any]] = []
    scenes = options.scenes.split(",")
    with tempfile.TemporaryDirectory(prefix="gio-faults-") as folder:
        keys = {"GIORNATA_API_KEYS_FILE": str(write_keys(Path(folder), {MANY: "many", ONE: "one"}))}
        if "one" in scenes or "all" in scenes:
            with live_stack(model, {ServiceName.PREPOST: 2}, keys) as live:
                names = live.instances(ServiceName.PREPOST)
                for scene_name, victims, seconds in (
                    ("one", names[:1], options.stopped),
                    ("all", names, options.all_stopped),
                ):
                    if scene_name in scenes:
                        found = asyncio.run(stopped(live, victims, seconds, options.jobs))
                        lines.append({"scene": f"{len(victims)} of 2 stopped for {seconds:g} s", **found})
                        print(lines[-1], flush=True)
        if "heavy" in scenes:
            with live_stack(model, {}, keys) as live:
                lines.append(
                    {"scene": "heavy pictures", **asyncio.run(heavy(live, options.heavy, options.megapixels))}
                )
                print(lines[-1], flush=True)
    names_of = dict.fromkeys(name for line in lines for name in line)
    write("prepost_faults", [dict.fromkeys(names_of, "") | line for line in lines], workload=vars(options))


if __name__ == "__main__":
    main()
