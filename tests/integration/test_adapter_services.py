"""ControlNet and LoRA store as processes on a real NATS server: found, ready, answering clearly, drained."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import BaseModel

from giornata import __version__
from giornata.bus import bus
from giornata.config import new_instance
from giornata.deadlines import Deadline
from giornata.runtime import host_name
from giornata.wire import subjects
from giornata.wire.adapters import ControlUse
from giornata.wire.controlnets import DataPath, OpenControl
from giornata.wire.errors import (
    ControlNetNotFound,
    GiornataError,
    LoraNotFound,
    MalformedMessage,
    ServiceUnavailable,
)
from giornata.wire.jobs import BlobRef
from giornata.wire.loras import ReadFile
from giornata.wire.messages import CancelRows, JobAck
from giornata.wire.workers import ServiceName, ServiceState
from tests.contract.messages import BASE, ENCODING, INSPECTION, JOB
from tests.patience import HUNG_MS, HUNG_S

MODULES = {
    ServiceName.CONTROLNET: "giornata_controlnet",
    ServiceName.LORA_STORE: "giornata_lora_store",
}
SHIPPED = Path(__file__).parents[2] / "deploy/model/adapters/controlnets/outline"
REFUSALS: dict[ServiceName, tuple[type[GiornataError], str]] = {
    ServiceName.CONTROLNET: (ControlNetNotFound, "outline"),
    ServiceName.LORA_STORE: (LoraNotFound, "0" * 64),
}
QUESTIONS: dict[ServiceName, BaseModel] = {
    ServiceName.CONTROLNET: OpenControl(
        job=JOB.model_copy(update={"controls": (ControlUse(model="outline", digest="dd"),)}),
        attempt=0,
        index=0,
        inspection=INSPECTION,
        encoding=ENCODING,
        base=BASE,
        grid=(3, 4),
        times=(1000.0, 500.0),
        sequences=1,
        acting=((0, 2),),
        denoiser="denoiser-1",
        host=host_name(),
        paths=(DataPath.UNIX,),
        remaining_ms=HUNG_MS,
    ),
    ServiceName.LORA_STORE: ReadFile(sha256="0" * 64, offset=0, size_bytes=1, remaining_ms=HUNG_MS),
}


@dataclass
class Running:
    """A started service and what is heard of it."""

    bus: bus.Bus
    name: ServiceName
    process: asyncio.subprocess.Process
    subject: str
    instance: str
    states: asyncio.Queue[ServiceState]

    async def state(self, *, draining: bool) -> ServiceState:
        """The next telemetry that says so."""
        async with asyncio.timeout(HUNG_S):
            while (state := await self.states.get()).draining is not draining:
                pass
        return state

    async def ask(self) -> BaseModel:
        return await self.bus.call(self.subject, QUESTIONS[self.name], JobAck, Deadline.after_ms(HUNG_MS))


@asynccontextmanager
async def started(name: ServiceName, nats_url: str, redis_url: str, folder: Path) -> AsyncIterator[Running]:
    """The service, truly started."""
    instance = new_instance(name)
    addressed = subjects.controlnet(instance, "open")
    subject = addressed if name is ServiceName.CONTROLNET else subjects.lora("read")
    states: asyncio.Queue[ServiceState] = asyncio.Queue()
    async with AsyncExitStack() as stack:
        connected = await stack.enter_async_context(bus.connect(nats_url, "test"))
        telemetry = subjects.telemetry(name, instance)
        await stack.enter_async_context(connected.listen(telemetry, ServiceState, states.put_nowait))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULES[name], "--instance", instance),
            env={
                **os.environ,
                "GIORNATA_NATS_URL": nats_url,
                "GIORNATA_BLOBS_URL": redis_url,
                "GIORNATA_LORA_FOLDER": str(folder),
                "GIORNATA_CONTROLNETS": f"shipped={SHIPPED}",
            },
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            yield Running(connected, name, process, subject, instance, states)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize("name", list(MODULES))
async def test_a_service_is_found_answers_clearly_and_drains(
    nats_url: str, redis_url: str, tmp_path: Path, name: ServiceName
) -> None:
    kind, received = REFUSALS[name]
    async with started(name, nats_url, redis_url, tmp_path) as service:
        ready = await service.state(draining=False)
        assert ready.ready, "the first thing it tells is that it is ready: endpoints come before telemetry"
        assert (ready.service, ready.version) == (name, __version__)
        found = await service.bus.client.request(f"$SRV.INFO.giornata-{name}", b"", timeout=HUNG_S)
        assert service.instance.encode() in found.data
        assert service.subject.encode() in found.data

        wrong = CancelRows(job_id="job", attempt=1)
        with pytest.raises(MalformedMessage, match="Field required"):
            await service.bus.call(service.subject, wrong, BlobRef, Deadline.after_ms(HUNG_MS))
        with pytest.raises(kind) as raised:
            await service.ask()
        assert raised.value.received == received

        service.process.terminate()
        assert not (await service.state(draining=True)).ready
        async with asyncio.timeout(HUNG_S):
            assert await service.process.wait() == 0
        with pytest.raises(ServiceUnavailable):
            await service.ask()
