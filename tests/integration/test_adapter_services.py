"""ControlNet and LoRA store as processes on a real NATS server: found, ready, answering clearly, drained."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
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


@pytest.fixture(params=list(MODULES))
async def service(
    request: pytest.FixtureRequest, nats_url: str, redis_url: str, tmp_path: Path
) -> AsyncIterator[Running]:
    module, instance = MODULES[request.param], new_instance(request.param)
    addressed = subjects.controlnet(instance, "open")
    subject = addressed if request.param is ServiceName.CONTROLNET else subjects.lora("read")
    states: asyncio.Queue[ServiceState] = asyncio.Queue()
    async with AsyncExitStack() as stack:
        connected = await stack.enter_async_context(bus.connect(nats_url, "test"))
        telemetry = subjects.telemetry(request.param, instance)
        await stack.enter_async_context(connected.listen(telemetry, ServiceState, states.put_nowait))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, "--instance", instance),
            env={
                **os.environ,
                "GIORNATA_NATS_URL": nats_url,
                "GIORNATA_BLOBS_URL": redis_url,
                "GIORNATA_LORA_FOLDER": str(tmp_path),
                "GIORNATA_CONTROLNETS": f"shipped={SHIPPED}",
            },
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            running = Running(connected, request.param, process, subject, instance, states)
            ready = await running.state(draining=False)
            assert ready.ready, (
                "the first thing it tells is that it is ready: endpoints come before telemetry"
            )
            assert (ready.service, ready.version) == (request.param, __version__)
            yield running
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_the_refusal_reaches_the_caller_as_the_same_error(service: Running) -> None:
    kind, received = REFUSALS[service.name]
    with pytest.raises(kind) as raised:
        await service.ask()
    assert raised.value.received == received


async def test_another_message_is_named_malformed_and_does_no_harm(service: Running) -> None:
    wrong = CancelRows(job_id="job", attempt=1)
    with pytest.raises(MalformedMessage, match="Field required"):
        await service.bus.call(service.subject, wrong, BlobRef, Deadline.after_ms(HUNG_MS))
    with pytest.raises(REFUSALS[service.name][0]):
        await service.ask()


async def test_it_is_discovered_as_a_micro_service(service: Running) -> None:
    message = await service.bus.client.request(f"$SRV.INFO.giornata-{service.name}", b"", timeout=HUNG_S)
    assert service.instance.encode() in message.data
    assert service.subject.encode() in message.data


async def test_sigterm_says_draining_and_ends_with_status_0(service: Running) -> None:
    service.process.terminate()
    last = await service.state(draining=True)
    assert not last.ready
    async with asyncio.timeout(HUNG_S):
        assert await service.process.wait() == 0
    with pytest.raises(ServiceUnavailable):
        await service.ask()
