"""What tests of the denoiser's service share: a model that can be held, requests, and workers."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.records import JobRecordStore
from giornata.wire import subjects
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, JobRecord, JobState, Priority, RowRecord
from giornata.wire.messages import DenoisedEvent, PreviewEvent, RunAnswer, RunReply, RunRequest, StepEvent
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import resolve
from giornata.wire.values import CellMap
from giornata.wire.workers import HostDevice, ServiceName, ServiceState
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.network import text_shapes
from giornata_denoiser.service import Denoiser
from giornata_lab.bench.compute.workload import grown
from tests.configs import configured
from tests.fakes.profiles import PROFILE, Steady
from tests.patience import HUNG_MS, HUNG_S

GRID = (3, 4)
STEPS = 4
WAIT_S = HUNG_S
REF = BlobRef(key="none", size_bytes=0, sha256="")


def taken(record: JobRecord, attempt: int, worker: str, rows: Collection[int] = (0,)) -> JobRecord:
    """Some rows have been given to `worker`."""
    given = {"attempt": attempt, "worker": worker}
    changed = tuple(row.model_copy(update=given) if row.index in rows else row for row in record.rows)
    return record.model_copy(update={"attempt": attempt, "rows": changed})


class Gated(FluxInpaint):
    """A network that computes a step for every permit; loses its device on demand."""

    def __init__(self, transformer: Any, permits: int) -> None:
        super().__init__(transformer)
        self.permits = threading.Semaphore(permits)
        self.lost = False

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        assert self.permits.acquire(timeout=WAIT_S)
        if self.lost:
            raise torch.AcceleratorError("the device is gone", 1)
        return super().model_input(latents, conditioning)


@dataclass
class Bench:
    """A test's side of the conversation, and the workers it has started."""

    bus: Bus
    blobs: RedisBlobs
    records: JobRecordStore
    checkpoint: Checkpoint
    urls: tuple[str, str]
    gpus: tuple[HostDevice, ...] = ()
    """GPUs of the workers."""
    steps: asyncio.Queue[StepEvent] = field(default_factory=asyncio.Queue)
    previews: asyncio.Queue[PreviewEvent] = field(default_factory=asyncio.Queue)
    denoised: asyncio.Queue[DenoisedEvent] = field(default_factory=asyncio.Queue)
    states: asyncio.Queue[ServiceState] = field(default_factory=asyncio.Queue)

    @asynccontextmanager
    async def worker(self, *, permits: int = 1000, **options: Any) -> AsyncIterator[Worker]:
        network = Gated(self.checkpoint.family.network.transformer, permits)  # type: ignore[attr-defined]  # of the tiny checkpoint
        config = configured(
            DenoiserConfig,
            model="tiny",
            nats_url=self.urls[0],
            blobs_url=self.urls[1],
            instance=f"denoiser-{secrets.token_hex(3)}",
            telemetry_hz=20,
            **options,
        )
        denoiser = Denoiser(
            config,
            self.bus,
            self.blobs,
            self.records,
            replace(self.checkpoint, family=replace(self.checkpoint.family, network=network)),
            profile=PROFILE,
            costs=Steady.of(PROFILE),
            gpus=self.gpus,
        )
        worker = Worker(config.instance, network, asyncio.Event())
        async with self.bus.listen(
            subjects.telemetry(ServiceName.DENOISER, config.instance), ServiceState, self.states.put_nowait
        ):
            task = asyncio.create_task(denoiser.run(worker.stop))
            worker.ended = task
            while (state := await asyncio.wait_for(self.states.get(), WAIT_S)).instance != config.instance:
                pass  # what an earlier worker said last
            self.states.put_nowait(state)
            try:
                yield worker
            finally:
                worker.stop.set()
                network.permits.release(1000)
                await asyncio.wait([task])
            if not worker.may_fail:
                task.result()

    async def job(
        self,
        worker: Worker,
        *,
        n: int = 1,
        steps: int = STEPS,
        tenant: str = "test",
        painted: Sequence[int] = (),
        **parameters: Any,
    ) -> RunRequest:
        """A job whose record says that `worker` has it, with random inputs; its mask touches the tokens `painted`."""
        card = self.checkpoint.card
        asked = EditParameters(
            prompt="a hat", n=n, num_inference_steps=steps, strength=1.0, guidance_scale=3.5, **parameters
        )
        job = Job(
            job_id=f"job-{secrets.token_hex(4)}",
            tenant=tenant,
            gateway="gateway-test",
            priority=Priority.INTERACTIVE,
            model=card.name,
            model_digest=card.digest,
            parameters=resolve(asked, card, 0),
            image=REF,
            budget_ms=HUNG_MS,
            result_ttl_s=HUNG_S,
        )
        rows = tuple(RowRecord(index=i, seed=i, attempt=1, worker=worker.instance) for i in range(n))
        encoding = await self._encoding(job.job_id, n, painted)
        record = JobRecord(job=job, state=JobState.RUNNING, attempt=1, rows=rows)
        assert await self.records.create(record)
        return RunRequest(
            job=job,
            attempt=1,
            inspection=inspected(painted, asked.halo),
            encoding=encoding,
            rows=rows,
            remaining_ms=HUNG_MS,
        )

    async def _encoding(self, job_id: str, n: int, painted: Sequence[int]) -> Encoding:
        generator = torch.Generator().manual_seed(0)
        text = {
            name: torch.randn(*shape, generator=generator)
            for name, shape in text_shapes(self.checkpoint.family, 6).items()
        }
        text[tensors.PROMPT_MASK] = torch.tensor([1, 1, 0, 0, 0, 0], dtype=torch.uint8)
        refs = []
        for index in range(n):
            channels = self.checkpoint.family.network.conditioning
            row = {name: torch.randn(12, width, generator=generator) for name, width in channels.items()}
            row["mask"] = (row["mask"] > 0).float()
            row["mask"][[token for token in range(12) if painted and token not in painted]] = 0
            refs.append(await self.blobs.put(f"{job_id}/row-{index}", tensors.pack(row), HUNG_S))
        text_ref = await self.blobs.put(f"{job_id}/text", tensors.pack(text), HUNG_S)
        empty = {name: torch.zeros_like(tensor) for name, tensor in text.items()}
        empty_ref = await self.blobs.put(f"{job_id}/empty-text", tensors.pack(empty), HUNG_S)
        return Encoding(text=text_ref, text_tokens=6, rows=tuple(refs), empty_text=empty_ref)

    async def edited(self, worker: Worker, **parameters: Any) -> int:
        """How many tokens an edit of the one template computed; its mask touches one of twelve."""
        asked = {"reuse": "auto", "halo": 0, **parameters}
        request = await self.job(worker, painted=[0], **asked)
        assert await self.run(worker, request) is RunAnswer.ACCEPTED
        await self.report()
        (row,) = (await self.records.get(request.job.job_id)).rows
        assert row.computed_tokens is not None
        return row.computed_tokens

    async def run(self, worker: Worker, request: RunRequest) -> RunAnswer:
        subject = subjects.worker(worker.instance, "run")
        return (await self.bus.call(subject, request, RunReply, Deadline.after_ms(HUNG_MS))).answer

    async def latents(self, request: RunRequest) -> list[Tensor]:
        record = await self.records.get(request.job.job_id)
        refs = [row.latents for row in record.rows]
        return [tensors.unpack(await self.blobs.get(ref))["latents"] for ref in refs if ref is not None]

    async def computed(self, worker: Worker, request: RunRequest) -> Tensor:
        """The final latent of a job of one row, which `worker` is given."""
        await self.run(worker, request)
        await self.report()
        (latent,) = await self.latents(request)
        return latent

    async def report(self) -> DenoisedEvent:
        return await asyncio.wait_for(self.denoised.get(), WAIT_S)

    async def step(self) -> StepEvent:
        return await asyncio.wait_for(self.steps.get(), WAIT_S)

    async def idle(self) -> None:
        """Until a worker's telemetry says that it has nothing."""
        while not self.states.empty():
            self.states.get_nowait()
        while True:
            state = await asyncio.wait_for(self.states.get(), WAIT_S)
            if state.worker is not None and not state.worker.running + state.worker.waiting:
                return


@dataclass
class Worker:
    instance: str
    network: Gated
    stop: asyncio.Event
    ended: asyncio.Task[None] | None = None
    may_fail: bool = False


INSPECTION = Inspection(
    width=64,
    height=48,
    has_alpha=False,
    model_width=16 * GRID[1],
    model_height=16 * GRID[0],
    output_width=64,
    output_height=48,
    tokens=12,
    compute_tokens=6,
    mask_ratio=0.5,
    template_key="t",
    prepared=REF,
)


def inspected(painted: Sequence[int], halo: int) -> Inspection:
    """The inspection of a picture whose mask touches the tokens `painted`; of none, where they are random."""
    touched = torch.zeros(12, dtype=torch.bool)
    touched[list(painted)] = True
    cells = grown(touched.view(GRID), halo).numpy()
    carried = CellMap(height=GRID[0], width=GRID[1], bits=np.packbits(cells).tobytes())
    return INSPECTION.model_copy(update={"compute_set": {1: carried} if painted else None})
