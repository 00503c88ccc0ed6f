"""Rows of a bench whose ControlNets are computed by the denoiser's own code: here, or by a ControlNet service."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.control.networks import ControlNet
from giornata.planning.cost_model import CostModel
from giornata.planning.operations import work_of
from giornata.scheduling.batch import RowKey
from giornata.wire import subjects
from giornata.wire.adapters import ControlUse, control_name
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, Priority, RowRecord
from giornata.wire.messages import RunRequest
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import resolve
from giornata.wire.workers import ServiceName, ServiceState
from giornata_denoiser.attempts.inputs import adapters_of
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import ControlNetExecutor
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.controlnets import DenoiserControlNets, control_room
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.rows import Rows

INSTANCE: Final = "controlnet-bench"
BUDGET_MS: Final = 3_600_000
STARTS_S: Final = 120
REF: Final = BlobRef(key="none", size_bytes=0, sha256="")
INSPECTION: Final = Inspection(
    width=64,
    height=48,
    has_alpha=False,
    model_width=64,
    model_height=48,
    output_width=64,
    output_height=48,
    tokens=12,
    compute_tokens=6,
    mask_ratio=0.5,
    template_key="t",
    prepared=REF,
)
"""Of pictures that nobody paints: the ControlNets' work is that of the rows."""


@dataclass(frozen=True)
class Servers:
    """What everybody talks over."""

    bus: Bus
    blobs: RedisBlobs
    nats_url: str
    blobs_url: str

    async def heard(self) -> ServiceState:
        """The next that the instance tells of itself."""
        states: asyncio.Queue[ServiceState] = asyncio.Queue()
        subject = subjects.telemetry(ServiceName.CONTROLNET, INSTANCE)
        async with self.bus.listen(subject, ServiceState, states.put_nowait), asyncio.timeout(STARTS_S):
            return await states.get()


@asynccontextmanager
async def instance(servers: Servers, controlnets: str, dtype: torch.dtype) -> AsyncIterator[int]:
    """A ControlNet service in a process of its own, which computes in one thread; its process id."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GIORNATA_NATS_URL": servers.nats_url,
        "GIORNATA_BLOBS_URL": servers.blobs_url,
        "GIORNATA_INSTANCE": INSTANCE,
        "GIORNATA_CONTROLNETS": controlnets,
        "GIORNATA_DEVICE": "cpu",
        "GIORNATA_DTYPE": str(dtype).removeprefix("torch."),
        "GIORNATA_DRAIN_S": "0",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "giornata_controlnet", env=environment
    )
    try:
        await servers.heard()
        yield process.pid
    finally:
        process.terminate()
        await process.wait()


@dataclass(frozen=True, eq=False)
class ControlRoom:
    """A denoiser's ControlNets, and where it tells that rows can go on."""

    room: DenoiserControlNets
    resumed: asyncio.Queue[str]


@asynccontextmanager
async def room(
    servers: Servers, checkpoint: Checkpoint, costs: CostModel, executor: ControlNetExecutor
) -> AsyncIterator[ControlRoom]:
    """The ControlNets of a denoiser, which an `executor` computes: where it is the service, it has none itself."""
    if executor is ControlNetExecutor.SERVICE:
        checkpoint = replace(checkpoint, controlnets={})

    class ExecutorConfig(DenoiserConfig):
        """Whatever the link costs, one executor computes."""

        control_executor: ClassVar[ControlNetExecutor] = executor

    config = ExecutorConfig(
        model="bench",
        nats_url=servers.nats_url,
        blobs_url=servers.blobs_url,
        instance=f"denoiser-{executor}",
    )
    resumed: asyncio.Queue[str] = asyncio.Queue()

    def resume(job_id: str, _: int) -> None:
        resumed.put_nowait(job_id)

    async with control_room(config, servers.bus, checkpoint, costs, resume) as made:
        if made is None:
            raise TypeError("the network can have no ControlNets")
        yield ControlRoom(made, resumed)


class Requests:
    """Makes rows under all `nets`, and the request of which they are."""

    def __init__(
        self, servers: Servers, checkpoint: Checkpoint, rows: Rows, nets: Mapping[str, ControlNet]
    ) -> None:
        self._servers, self._checkpoint, self._rows, self._nets = servers, checkpoint, rows, nets
        self._made = 0

    async def made(self, plain: Sequence[Row], *, controlled: bool) -> tuple[RunRequest, list[Row]]:
        """`plain` rows of the template 0 as those of a job, with ControlNets or without."""
        self._made += 1
        uses = tuple(
            ControlUse(model=net.card.name, digest=digest, scale=1.0)
            for digest, net in self._nets.items()
            if controlled
        )
        job = self._job(len(plain), uses)
        works = {digest: work_of(net.card) for digest, net in self._nets.items()}
        rows = [
            replace(
                row,
                key=RowKey(job.job_id, 1, index),
                adapters=adapters_of(job, row.steps, nets=works),
                control_images=self.images if controlled else (),
            )
            for index, row in enumerate(plain)
        ]
        records = tuple(
            RowRecord(index=index, seed=index, attempt=1, worker="bench") for index in range(len(plain))
        )
        request = RunRequest(
            job=job,
            attempt=1,
            inspection=INSPECTION,
            encoding=await self._encoding(len(plain)),
            rows=records,
            remaining_ms=BUDGET_MS,
        )
        return request, rows

    @property
    def images(self) -> tuple[torch.Tensor, ...]:
        """(tokens, channels): the control image of each ControlNet."""
        draw = torch.Generator().manual_seed(5)
        shape = self._rows.tokens, self._rows.channels
        return tuple(torch.randn(*shape, generator=draw) for _ in self._nets)

    def _job(self, rows: int, uses: tuple[ControlUse, ...]) -> Job:
        card = self._checkpoint.card
        asked = EditParameters(prompt="any", n=rows, strength=1.0, guidance_scale=3.5)
        return Job(
            job_id=f"job-{self._made}",
            tenant="bench",
            gateway="gateway-bench",
            priority=Priority.INTERACTIVE,
            model=card.name,
            model_digest=card.digest,
            parameters=resolve(asked, card, 0),
            controls=uses,
            image=REF,
            budget_ms=BUDGET_MS,
            result_ttl_s=60,
        )

    async def _encoding(self, rows: int) -> Encoding:
        named = {control_name(nth): image for nth, image in enumerate(self.images)}
        put = self._servers.blobs.put
        text = await put(f"job-{self._made}/text", tensors.pack(self._rows.text(0)), 3600)
        seen = await put(f"job-{self._made}/controls", tensors.pack(named), 3600)
        return Encoding(text=text, text_tokens=self._rows.text_tokens, rows=(REF,) * rows, controls=(seen,))
