"""A LoRA store in this process on a real NATS server, with prepost's answer scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from giornata.bus import bus, streams
from giornata.bus.bus import Bus, Endpoint
from giornata.config import new_instance
from giornata.deadlines import Deadline
from giornata.lora_files import open_upload
from giornata.records import LoraRecords
from giornata.wire import subjects
from giornata.wire.loras import CanonicalLora, LoraRecord, NormaliseLora, StoredFile
from giornata.wire.workers import ServiceState
from giornata_lora_store.config import LoraStoreConfig
from giornata_lora_store.service import LoraStore
from tests.configs import configured
from tests.patience import HUNG_MS

Answer = Callable[[NormaliseLora], CanonicalLora]


def lora(seed: int = 0, rank: int = 4) -> bytes:
    """A file with one module, of other bytes for each seed."""
    draw = np.random.default_rng(seed)
    down, up = draw.normal(size=(rank, 16)), draw.normal(size=(24, rank))
    name = "transformer.transformer_blocks.0.attn.to_q"
    return save({f"{name}.lora_A.weight": down.astype("f4"), f"{name}.lora_B.weight": up.astype("f4")})


def canonical(_: NormaliseLora) -> CanonicalLora:
    return CanonicalLora(file=StoredFile(sha256="0" * 64, size_bytes=1), model_digest="d", rank=4, modules=1)


@dataclass
class Store:
    """Running stores over one folder, and their records."""

    bus: Bus
    records: LoraRecords
    folder: Path
    nats_url: str
    model: str
    answer: Answer = canonical
    asked: asyncio.Queue[NormaliseLora] = field(default_factory=asyncio.Queue)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by :func:`open_bench`."""

    async def normalise(self, request: NormaliseLora) -> CanonicalLora:
        self.asked.put_nowait(request)
        await self.may_answer.wait()
        return self.answer(request)

    async def send(self, data: bytes, tenant: str, name: str | None = None) -> LoraRecord:
        async with open_upload(self.bus, tenant) as upload:
            await upload.write(data)
            return await upload.finish(tenant, self.model, name)

    async def settled(self, record: LoraRecord) -> LoraRecord:
        deadline = Deadline.after_ms(HUNG_MS)
        return await self.records.until(
            record.tenant, record.lora_id, lambda now: now.state.settled, deadline
        )

    @asynccontextmanager
    async def instance(self, **options: Any) -> AsyncIterator[LoraStore]:
        """One store, ready; it drains on leaving."""
        config = configured(
            LoraStoreConfig,
            nats_url=self.nats_url,
            instance=new_instance("lora-store"),
            lora_folder=self.folder,
            telemetry_hz=20,
            **{"lora_scan_s": 0.1, **options},
        )
        stop = asyncio.Event()
        async with bus.connect(self.nats_url, config.instance) as own:
            store = await LoraStore.open(config, own)
            up = asyncio.Event()
            told = subjects.telemetry("lora-store", config.instance)
            async with self.bus.listen(told, ServiceState, lambda _: up.set()):
                running = asyncio.create_task(store.run(stop))
                waiting = asyncio.ensure_future(up.wait())
                await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                try:
                    yield store
                finally:
                    stop.set()
                    await running


@asynccontextmanager
async def open_bench(nats_url: str, folder: Path) -> AsyncIterator[Store]:
    """No store runs yet. The model's prepost answers with a canonical file that nobody reads."""
    async with AsyncExitStack() as stack:
        connected = await stack.enter_async_context(bus.connect(nats_url, "test"))
        await streams.ensure_shared(connected.jetstream, replicas=1, events_ttl_s=3600)
        model = new_instance("model")
        records = await LoraRecords.open(connected.jetstream)
        bench = Store(connected, records, folder / "loras", nats_url, model)
        bench.may_answer.set()
        endpoint = Endpoint(subjects.prepost("adapter", model), NormaliseLora, bench.normalise)
        await stack.enter_async_context(connected.serve("prepost", endpoint, instance="fake"))
        yield bench
