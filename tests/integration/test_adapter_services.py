"""ControlNet and LoRA store as processes on a real NATS server: found, ready, answering clearly, drained."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
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
from tests.forked_programs import program
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


@pytest.mark.parametrize("name", list(MODULES))
async def test_it_is_ready_when_heard_of_answers_clearly_and_drains(
    name: ServiceName, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    instance = new_instance(name)
    asked = subjects.controlnet(instance, "open") if name is ServiceName.CONTROLNET else subjects.lora("read")
    states: asyncio.Queue[ServiceState] = asyncio.Queue()
    env = {
        "GIORNATA_NATS_URL": nats_url,
        "GIORNATA_BLOBS_URL": redis_url,
        "GIORNATA_LORA_FOLDER": str(tmp_path),
        "GIORNATA_CONTROLNETS": f"shipped={SHIPPED}",
    }
    async with AsyncExitStack() as stack:
        connected = await stack.enter_async_context(bus.connect(nats_url, "test"))
        telemetry = subjects.telemetry(name, instance)
        await stack.enter_async_context(connected.listen(telemetry, ServiceState, states.put_nowait))
        running = program(MODULES[name], "--instance", instance, env=env, log=tmp_path / "log")
        process = await stack.enter_async_context(running)

        async def ask() -> None:
            await connected.call(asked, QUESTIONS[name], JobAck, Deadline.after_ms(HUNG_MS))

        ready = await asyncio.wait_for(states.get(), HUNG_S)
        assert ready.ready, "the first thing it tells is that it is ready: endpoints come before telemetry"
        assert (ready.service, ready.version) == (name, __version__)
        info = await connected.client.request(f"$SRV.INFO.giornata-{name}", b"", timeout=HUNG_S)
        assert instance.encode() in info.data
        assert asked.encode() in info.data
        wrong = CancelRows(job_id="job", attempt=1)
        with pytest.raises(MalformedMessage, match="Field required"):
            await connected.call(asked, wrong, BlobRef, Deadline.after_ms(HUNG_MS))
        kind, received = REFUSALS[name]
        with pytest.raises(kind) as raised:
            await ask()
        assert raised.value.received == received, "the refusal reaches the caller as the same error"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(HUNG_S):
            while not (last := await states.get()).draining:
                pass
            assert not last.ready
            assert await process.wait() == 0
        with pytest.raises(ServiceUnavailable):
            await ask()
