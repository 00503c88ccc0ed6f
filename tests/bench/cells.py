"""One cell of 1,000 workers beside two of 500: what each router has to do, and how the edits of many tenants spread.

Routers, gateway and NATS are the real processes; workers and preposts are simulated, a process for each cell. Edits
come through the gateway's REST door, with a key of each tenant. ``python -m tests.bench.cells --help``.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import uvloop

from giornata import api_keys
from giornata.bus import bus as buses
from giornata.records import Records
from giornata.wire import subjects
from giornata.wire.events import DoneEvent, EventKind
from giornata.wire.stores import STORE_BYTES
from giornata_tools.launcher.folders import socket_folder
from giornata_tools.launcher.plan import cell_names
from tests.bench.reporting.report import write
from tests.bench.systems.fleet import GATEWAY, System, router_of
from tests.flags import Several, option, parsed

SETTLE_S: Final = 5.0


def tenants_of(folder: Path, number: int) -> tuple[Path, list[str]]:
    """A file of API keys, and a key for each of so many tenants."""
    file, keys = api_keys.KeysFile(), [f"{api_keys.PREFIX}bench-{tenant:032d}" for tenant in range(number)]
    for tenant, key in enumerate(keys):
        file = api_keys.with_key(file, key, f"tenant-{tenant}", datetime.now(UTC).replace(microsecond=0))
    path = folder / "keys.json"
    path.write_text(api_keys.render(file))
    return path, keys


async def layout_row(n: int, options: SimpleNamespace) -> dict[str, Any]:
    """What `n` cells do with the workers and the edits that the flags name."""
    cells = cell_names(n)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gio-", dir=socket_folder())))
        path, keys = tenants_of(folder, options.tenants)
        system = System(stack, folder, cells, path)
        for cell in cells:
            idle = options.workers // n - options.taking
            flags = {"idle": idle, "taking": options.taking, "hz": options.hz, "cell": cell}
            stack.enter_context(system.crowd(**flags, **{"store-bytes": STORE_BYTES // n}))
        await system.knows(options.workers // n * n, keys[0])
        await asyncio.sleep(SETTLE_S)
        quiet = await system.over(options.seconds)
        before = {cell: await system.read(router_of(cell)) for cell in cells}
        spread, seconds, latency_s = await _edited(system, cells, keys, options)
        used = {cell: await system.read(router_of(cell)) - before[cell] for cell in cells}
    routers = [quiet[router_of(cell)] for cell in cells]
    extra_s = sum(
        used[cell].cpu_s - quiet[router_of(cell)].cpu_s * used[cell].at_s / quiet[router_of(cell)].at_s
        for cell in cells
    )
    return {
        "cells": n,
        "workers of each": options.workers // n,
        "messages/s": round(sum(one.told / one.at_s for one in routers), 1),
        "busiest router, core": round(max(one.cpu_s / one.at_s for one in routers), 3),
        "all routers, core": round(sum(one.cpu_s / one.at_s for one in routers), 3),
        "router ms a message": round(
            sum(one.cpu_s for one in routers) / sum(one.told for one in routers) * 1e3, 4
        ),
        "router ms a job": round(extra_s / options.jobs * 1e3, 2),
        "jobs/s": round(options.jobs / seconds, 1),
        "latency p50 s": round(latency_s[len(latency_s) // 2], 3),
        "latency p95 s": round(latency_s[len(latency_s) * 95 // 100], 3),
        "jobs by cell": "/".join(str(spread[cell]) for cell in cells),
    }


async def _edited(
    system: System, cells: tuple[str, ...], keys: list[str], options: SimpleNamespace
) -> tuple[Counter[str], float, list[float]]:
    """Have edits carried out: in which cells, in how many seconds, and how long each took, sorted."""
    slots, left, done = asyncio.Semaphore(options.in_flight), options.jobs, asyncio.Event()
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}

    def heard(event: DoneEvent) -> None:
        nonlocal left
        ended[event.job_id] = time.monotonic()
        left -= 1
        slots.release()
        if not left:
            done.set()

    async def edit(number: int) -> None:
        form = aiohttp.FormData({"prompt": "a red star", "seed": str(number)})
        form.add_field("image", b"picture", filename="image.png", content_type="image/png")
        headers = {"Authorization": f"Bearer {keys[number % len(keys)]}"}
        at_s = time.monotonic()
        async with http.post(f"{system.url}/v1/jobs", data=form, headers=headers) as answer:
            begun[(await answer.json())["id"]] = at_s

    async with (
        buses.connect(system.nats_url, "listener") as bus,
        aiohttp.ClientSession(raise_for_status=True) as http,
        bus.listen(subjects.events_of_gateway(GATEWAY, EventKind.DONE), DoneEvent, heard),
        asyncio.TaskGroup() as tasks,
    ):
        began_s = time.monotonic()
        for number in range(options.jobs):
            await slots.acquire()
            tasks.create_task(edit(number))
        await done.wait()
        seconds = time.monotonic() - began_s
        spread: Counter[str] = Counter()
        for cell in cells:
            spread[cell] = len(await (await Records.open(bus.jetstream, cell)).matching(">"))
    return spread, seconds, sorted(ended[job] - begun[job] for job in begun)


async def measure(options: SimpleNamespace) -> None:
    """Print the table and write ``out/bench/cells.json``."""
    rows = [await layout_row(n, options) for _ in range(options.repeats) for n in options.cells]
    write("cells", rows, workload=vars(options))


def main() -> None:
    """Measure what the flags say."""
    flags = [
        option("--cells", type=Several(int), default=(1, 2), help="numbers of cells"),
        option("--workers", type=int, default=1000, help="of all cells together"),
        option("--taking", type=int, default=8, help="of them, in each cell, take jobs"),
        option("--hz", type=float, default=1.0, help="messages a second of each worker; services tell 4"),
        option("--tenants", type=int, default=32),
        option("--jobs", type=int, default=600),
        option("--in-flight", type=int, default=16, help="jobs at a time"),
        option("--seconds", type=float, default=10.0, help="of the measurement without jobs"),
        option("--repeats", type=int, default=2),
    ]
    uvloop.run(measure(parsed(__doc__, flags)))


if __name__ == "__main__":
    main()
