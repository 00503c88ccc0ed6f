"""Many registered LoRAs: what they cost lists, starts and memory of services, and an engine's steps.

``python -m giornata_lab.bench.lora_many`` prints two tables. In the first, a LoRA store and a gateway, both real
processes on a real NATS server, start beside no record and beside `--loras` of them, and the gateway is asked for
lists over HTTP. In the second, a step of rows with a LoRA each is made beside a cache folder that holds nothing else,
and beside one with so many files more, in turns. Records are written as the store writes them, and share one file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import psutil
import uvloop
from safetensors.torch import save

from giornata.bus import bus, streams
from giornata.bus.bus import Bus
from giornata.config import new_instance
from giornata.packed.low_rank import low_rank
from giornata.packed.packing import UNTRACED
from giornata.records import LoraRecords
from giornata.wire import subjects
from giornata.wire.loras import CanonicalLora, LoraRecord, LoraState, LoraStyle, StoredFile, lora_id
from giornata.wire.workers import ServiceState
from giornata_denoiser.loras import SUFFIX, LoraTierCapacities, LoraTiers
from giornata_denoiser.rows.row import RowLora
from giornata_lab.bench.compute.batches import Batches, StepKind
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.lora_rows import tensors_of
from giornata_lab.bench.options import clock_of, rows_of, shared
from giornata_lab.bench.reporting.report import measured, wait_for, write
from giornata_lab.bench.systems.servers import embedded
from giornata_lab.flags import option, parsed

TENANT: Final = "default"
AT_ONCE: Final = 64
LIMIT_S: Final = 120.0
LIST_AIM_MS: Final = 50.0
MASK: Final = 0.2
BUDGETS: Final = LoraTierCapacities(1 << 40, 1 << 34, 1 << 34)
EMPTY: Final = hashlib.sha256(b"").hexdigest()


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            *shared(tokens=256, text=32, repeats=9),
            option("--loras", type=int, default=10_000, help="registered"),
            option("--lists", type=int, default=200, help="requests for each kind of list"),
            option("--rows", type=int, default=8, help="of a step"),
            option("--rank", type=int, default=16, help="of the rows' LoRAs"),
        ],
        arguments,
    )


async def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/lora_many*.json``."""
    options = options_of(arguments)
    with ExitStack() as stack:
        urls = stack.enter_context(embedded())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gio-loras-")))
        services = [await _services(urls, folder, 0, options)]
        await _register(urls[0], options.loras)
        services.append(await _services(urls, folder, options.loras, options))
    write("lora_many", [line for lines in services for line in lines], workload=vars(options))
    write("lora_many_steps", _steps(rows_of(options), options), workload=vars(options))


async def _register(url: str, count: int) -> None:
    """Write so many LoRAs that are ready."""
    async with bus.connect(url, "bench") as connected:
        records = await LoraRecords.open(connected.jetstream)
        for first in range(0, count, AT_ONCE):
            some = range(first, min(count, first + AT_ONCE))
            await asyncio.gather(*(records.create(_record(number)) for number in some))


def _record(number: int) -> LoraRecord:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    made = CanonicalLora(
        file=StoredFile(sha256=EMPTY, size_bytes=0), model_digest=digest, rank=16, modules=40, weights=10**6
    )
    return LoraRecord(
        lora_id=lora_id(TENANT, "bench", digest),
        tenant=TENANT,
        created_s=number,
        state=LoraState.READY,
        model="bench",
        name=f"style {number}",
        source=StoredFile(sha256=digest, size_bytes=341_000_000),
        style=LoraStyle.DIFFUSERS,
        rank=16,
        canonical=made,
    )


async def _services(
    urls: tuple[str, str], folder: Path, count: int, options: SimpleNamespace
) -> list[dict[str, Any]]:
    """Return what a store and a gateway that start beside so many LoRAs do."""
    port_file = folder / f"port-{count}"
    async with bus.connect(urls[0], "bench") as connected:
        await streams.ensure_shared(connected.jetstream, replicas=1, events_ttl_s=3600)
        environment = {"GIORNATA_NATS_URL": urls[0], "GIORNATA_BLOBS_URL": urls[1]}
        store = _process(
            connected, "lora-store", {**environment, "GIORNATA_LORA_FOLDER": str(folder / "files")}
        )
        gateway = _process(connected, "gateway", environment, "--port", "0", "--port-file", str(port_file))
        async with (
            store as (store_s, store_mb),
            gateway as (gateway_s, gateway_mb),
            aiohttp.ClientSession() as http,
        ):
            url = f"http://127.0.0.1:{port_file.read_text().strip()}/v1/loras"
            records = await LoraRecords.open(connected.jetstream)
            lists = await _Lists(http, url, records, count, options.lists).lines()
            memory = {"store MiB": store_mb(), "gateway MiB": gateway_mb()}
    starts = {"store starts, s": round(store_s, 2), "gateway starts, s": round(gateway_s, 2)}
    facts = [{"LoRAs": count, "what": name, "value": value} for name, value in {**starts, **memory}.items()]
    return [*facts, *({"LoRAs": count, **line} for line in lists)]


@asynccontextmanager
async def _process(
    connected: Bus, service: str, environment: dict[str, str], *arguments: str
) -> AsyncIterator[tuple[float, Callable[[], float]]]:
    """A service; how long its start took until it told that it is ready, and a function that tells its memory."""
    instance, up = new_instance(service), asyncio.Event()

    def told(state: ServiceState) -> None:
        if state.ready:
            up.set()

    variables = {**os.environ, **environment, "GIORNATA_INSTANCE": instance, "GIORNATA_LOG_LEVEL": "error"}
    module = f"giornata_{service.replace('-', '_')}"
    async with connected.listen(subjects.telemetry(service, instance), ServiceState, told):
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments, env=variables
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                await up.wait()
            took_s = time.perf_counter() - began
            yield took_s, lambda: round(psutil.Process(process.pid).memory_info().rss / 2**20, 1)
        finally:
            process.terminate()
            await process.wait()


@dataclass
class _Lists:
    """Asks a gateway for lists beside so many LoRAs."""

    http: aiohttp.ClientSession
    url: str
    records: LoraRecords
    count: int
    requests: int
    """For each kind of list."""

    async def lines(self) -> list[dict[str, Any]]:
        """Latencies of each kind of list, and of the first one."""
        first_ms = await _ms(self._page)
        middle = partial(self._page, limit=100, **({"after": self._middle} if self.count else {}))
        whole_ms = await _ms(self._whole)
        return [
            {"what": "first list, ms", "value": round(first_ms, 1)},
            await self._latency("a page of 20", self._page),
            await self._latency("a page of 100 from the middle", middle),
            await self._latency("a page of 20 after a change", self._page, self._change),
            {"what": "the whole list in pages of 100, ms", "value": round(whole_ms, 1)},
        ]

    @property
    def _middle(self) -> str:
        return _record(self.count // 2).lora_id

    async def _page(self, **query: str | int) -> dict[str, Any]:
        async with self.http.get(self.url, params=query) as answer:
            found: dict[str, Any] = await answer.json()
            answer.raise_for_status()
            return found

    async def _whole(self) -> None:
        page = await self._page(limit=100)
        while page["has_more"]:
            page = await self._page(limit=100, after=page["data"][-1]["id"])

    async def _change(self) -> None:
        if self.count:
            await self.records.change(TENANT, self._middle, _changed)

    async def _latency(
        self,
        what: str,
        ask: Callable[[], Awaitable[object]],
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> dict[str, Any]:
        times = []
        for _ in range(self.requests):
            if before is not None:
                await before()
            times.append(await _ms(ask))
        found = measured(times)
        return {
            "what": f"{what}, P50 ms",
            "value": round(found.p50_ms, 1),
            "P95 ms": round(found.p95_ms, 1),
            "aim ms": LIST_AIM_MS,
        }


def _changed(record: LoraRecord) -> LoraRecord:
    return record.model_copy(update={"worked_s": record.worked_s + 1})


async def _ms(ask: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await ask()
    return (time.perf_counter() - began) * 1e3


def _steps(rows: Rows, options: SimpleNamespace) -> list[dict[str, Any]]:
    """A step of rows with a LoRA each, beside an empty cache folder and beside a full one, in turns."""
    files = [save(tensors_of(rows.family, options.rank, seed)) for seed in range(options.rows)]
    loras = [RowLora(hashlib.sha256(data).hexdigest(), size_bytes=len(data)) for data in files]
    batches, clock = Batches(rows, MASK), clock_of(options)
    with ExitStack() as stack:
        steps = {}
        for beside in (0, options.loras):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gio-cache-")))
            for data, lora in zip(files, loras, strict=True):
                (folder / f"{lora.digest}{SUFFIX}").write_bytes(data)
            for number in range(beside):
                digest = hashlib.sha256(str(number).encode()).hexdigest()
                (folder / f"{digest}{SUFFIX}").touch()
            began = time.perf_counter()
            tiers = stack.enter_context(
                LoraTiers(_none, low_rank, rows.family.network.layers, folder, BUDGETS)
            )
            start_ms = (time.perf_counter() - began) * 1e3
            sets = [stack.enter_context(tiers.held((lora,))).result() for lora in loras]
            steps[beside] = tiers, batches.prepared(StepKind.MASKED, options.rows, sets), start_ms
        times: dict[int, list[float]] = {beside: [] for beside in steps}
        for turn in range(options.repeats + 1):  # one turn warms up
            for beside, (tiers, step, _) in steps.items():
                began = clock()
                for lora in loras:
                    tiers.find((lora,))
                step(UNTRACED)
                wait_for(rows.family.device)
                if turn:
                    times[beside].append((clock() - began) * 1e3)
        return [_step_line(beside, *steps[beside][::2], times) for beside in steps]


def _none(lora: RowLora, path: Path, ahead: bool) -> None:
    raise RuntimeError(f"the file {lora.digest} is not in the folder")


def _step_line(
    beside: int, tiers: LoraTiers, start_ms: float, times: dict[int, list[float]]
) -> dict[str, Any]:
    ratios = [own / base for own, base in zip(times[beside], times[0], strict=True)]
    began = time.perf_counter()
    tiers.resident()
    return {
        "files beside the rows' own": beside,
        "step ÷": round(statistics.median(ratios), 3),
        "spread": f"{min(ratios):.2f}-{max(ratios):.2f}",
        "step ms": round(statistics.median(times[beside]), 1),
        "tiers open, ms": round(start_ms, 1),
        "residency for telemetry, ms": round((time.perf_counter() - began) * 1e3, 2),
    }


if __name__ == "__main__":
    uvloop.run(main())
