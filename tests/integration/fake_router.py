"""A router that plays every part behind the gateway by script: real records, events and blobs, painted at once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from giornata import __version__
from giornata.blobs import BlobStore
from giornata.bus.bus import Bus, Endpoint
from giornata.deadlines import Deadline
from giornata.fleet import Fleet
from giornata.records import JobRecordStore, TemplateRecords
from giornata.wire import codec, subjects, templates
from giornata.wire.adapters import ControlCard
from giornata.wire.errors import DeadlineExceeded, GiornataError, JobCancelled, JobNotFound
from giornata.wire.jobs import (
    BlobRef,
    Encoding,
    Job,
    JobState,
    PromptTokens,
    RowRecord,
)
from giornata.wire.messages import (
    CancelMessage,
    CancelRows,
    DoneEvent,
    EventKind,
    JobAck,
    JobEstimate,
    JobEstimateRequest,
    MaskCard,
    PreviewEvent,
    StateEvent,
    StepEvent,
    SubmitRequest,
    TemplateRequest,
)
from giornata.wire.models import ModelCard
from giornata.wire.requests import OutputFormat
from giornata.wire.templates import TemplateRecord
from giornata.wire.values import ComputeTimes, StageTimes
from giornata.wire.workers import (
    FleetPage,
    FleetRequest,
    InstanceReports,
    RowProgress,
    ServiceName,
    ServiceState,
    WorkerState,
)
from giornata_router import job_records
from giornata_router.fleet_reports import StepRates, report, summary
from tests.fakes import fleet
from tests.patience import HUNG_MS

CARD, PAINTER = (card.model_copy(update={"default_steps": 3}) for card in (fleet.CARD, fleet.PAINTER))
STAGES = StageTimes(prepare=10, queue=20, denoise=30, finish=40)
COMPUTE = ComputeTimes(inspect=1, encode=2, denoise=3, decode=4, paste=5)
_NO_BLOB = BlobRef(key="none", size_bytes=0, sha256="0" * 64)
INSPECTION = fleet.INSPECTION.model_copy(
    update={"height": 48, "model_height": 48, "output_height": 48}
    | {"tokens": 12, "compute_tokens": 5, "mask_ratio": 5 / 12, "prepared": _NO_BLOB}
)


def picture_of(index: int, size: int = 1000) -> bytes:
    """What the fake paints: different for every index."""
    return hashlib.sha256(str(index).encode()).digest() * (size // 32)


def preview_of(step: StepEvent) -> PreviewEvent:
    """What the fake shows after a step."""
    image = b"\xff\xd8" + bytes([step.index, step.step])
    return PreviewEvent(
        **step.model_dump(),
        partial_image_index=step.step - 1,
        image=image,
        format=OutputFormat.JPEG,
        box=(0, 0, 64, 48),
        size=(8, 6),
    )


@dataclass
class FakeRouter:
    """Accepts jobs and carries them out as told: writes records, publishes events, stores pictures."""

    bus: Bus
    blobs: BlobStore
    records: JobRecordStore
    cards: tuple[ModelCard, ...] = (CARD,)
    controlnets: dict[str, tuple[ControlCard, ...]] = field(default_factory=dict)
    """By model: each model's are those of one more denoiser."""
    refusals: list[GiornataError] = field(default_factory=list)
    """Raised by the next submissions, one each."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a submission arrives."""
    answer_when: asyncio.Event | None = None
    """Submissions are accepted only then."""
    answer_late: asyncio.Event | None = None
    """Submissions are answered only then, while their jobs go on."""
    silent: int = 0
    """How many submissions are not answered in time."""
    failure: GiornataError | None = None
    row_errors: dict[int, GiornataError] = field(default_factory=dict)
    hold: asyncio.Event | None = None
    """Jobs stay at their first step until it is set, or they are cancelled."""
    leads: bool = True
    """It tells of the fleet."""
    ready: bool = True
    """There are a ready prepost and denoiser."""
    masks: MaskCard | None = None
    """What its prepost makes masks from words with."""
    waits_ms: dict[str, float] = field(default_factory=dict)
    """What it predicts, by model."""
    gateways: Fleet = field(default_factory=Fleet)
    """The gateways that it hears."""
    steps_when: asyncio.Event | None = None
    """Jobs that are running take their first step only then."""
    picture_bytes: int = 1000
    publish_done: bool = True
    submitted: set[str] = field(default_factory=set)
    """Ids of all jobs that were offered, refused ones too."""
    jobs: dict[str, Job] = field(default_factory=dict)
    cancelled: dict[str, asyncio.Event] = field(default_factory=dict)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a job waits at its first step."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    registered: list[TemplateRecord] = field(default_factory=list)
    template_refusal: GiornataError | None = None
    """Raised by registrations."""
    forecast: JobEstimate | None = None
    progress: tuple[RowProgress, ...] = ()
    tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    running_jobs: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.templates = await TemplateRecords.open(self.bus.jetstream)
        async with (
            self.tasks,
            self.bus.listen(subjects.ALL_CANCELS, CancelRows, self._hear_cancel),
            self.bus.listen(
                subjects.telemetry_of(ServiceName.GATEWAY),
                ServiceState,
                lambda state: self.gateways.observe(state, time.monotonic()),
            ),
            self.bus.answer(
                Endpoint(subjects.SUBMIT, SubmitRequest, self._submit),
                Endpoint(subjects.FORECAST, JobEstimateRequest, self._forecast),
                Endpoint(subjects.TEMPLATE, TemplateRequest, self._register),
                Endpoint(subjects.FLEET, FleetRequest, self._page),
            ),
        ):
            yield
            for cancelled in self.cancelled.values():
                cancelled.set()

    async def reset(self) -> None:
        """End all jobs, and be as a router that was just opened."""
        for event in (*self.cancelled.values(), self.answer_when, self.answer_late, self.steps_when):
            if event is not None:
                event.set()
        if self.running_jobs:
            await asyncio.wait(self.running_jobs)
        opened = FakeRouter(self.bus, self.blobs, self.records)
        for each in fields(self):
            if each.name not in {"bus", "blobs", "records", "tasks"}:
                setattr(self, each.name, getattr(opened, each.name))

    def go_on(self) -> None:
        """Let jobs that wait at their first step take the others."""
        assert self.hold is not None
        self.hold.set()

    async def _forecast(self, request: JobEstimateRequest) -> JobEstimate:
        steps = tuple((row.index, row.step) for row in self.progress if row.job_id == request.job_id)
        if self.forecast is None and not steps:
            raise JobNotFound(received=request.job_id)
        return (self.forecast or JobEstimate()).model_copy(update={"steps": steps})

    async def _page(self, _request: FleetRequest) -> FleetPage:
        reports = tuple(report(state, StepRates(), 0.0) for state in self.states())
        return FleetPage(pages=1, packed=codec.encode(InstanceReports(reports=reports)))

    def states(self) -> list[ServiceState]:
        common: dict[str, Any] = {"host": "test", "version": __version__, "ready": True}
        self.gateways.expire(time.monotonic())
        worker = WorkerState(capacity_rows=8, capacity_tokens=9999, running=self.progress, steps_total=7)
        controlled = [
            ServiceState(
                service=ServiceName.DENOISER,
                instance=f"fake-denoiser-{card.name}",
                models=(card,),
                controlnets=self.controlnets[card.name],
                worker=worker,
                **common,
            )
            for card in self.cards
            if card.name in self.controlnets
        ]
        return [
            *controlled,
            ServiceState(service=ServiceName.ROUTER, instance="fake-router", **common),
            ServiceState(
                service=ServiceName.PREPOST,
                instance="fake-prepost",
                models=self.cards,
                masks=self.masks,
                **common,
            ),
            ServiceState(
                service=ServiceName.DENOISER,
                instance="fake-denoiser",
                models=self.cards,
                worker=worker,
                **common,
            ),
            *self.gateways.all(),
        ]

    async def announce(self) -> None:
        """Tell of the fleet; on return the gateway has heard of it."""
        await self.summarise()
        with contextlib.suppress(GiornataError):  # its answer comes after the summary on the same connections
            await self.bus.call(
                subjects.EDIT_CANCEL, CancelMessage(job_id="none"), JobAck, Deadline.after_ms(HUNG_MS)
            )

    async def summarise(self) -> None:
        """Tell what the fleet can do, as the router that leads does."""
        if self.leads:
            states = self.states() if self.ready else []
            await self.bus.publish(subjects.SUMMARY, summary("fake-router", states, wait_ms=self.waits_ms))

    def _hear_cancel(self, message: CancelRows) -> None:
        if message.job_id in self.cancelled:
            self.cancelled[message.job_id].set()

    async def _register(self, request: TemplateRequest) -> TemplateRecord:
        if self.template_refusal is not None:
            raise self.template_refusal
        self.registered.append(request.template)
        return await self.change_template(
            request.template, lambda record: templates.recording(record, "fake-denoiser", INSPECTION)
        )

    async def change_template(
        self, record: TemplateRecord, change: Callable[[TemplateRecord], TemplateRecord | None]
    ) -> TemplateRecord:
        return await self.templates.change(record.tenant, record.template_id, change)

    async def _submit(self, request: SubmitRequest) -> JobAck:
        self.submitted.add(request.job.job_id)
        self.asked.set()
        if self.answer_when is not None:
            await self.answer_when.wait()
        if self.silent:
            self.silent -= 1
            raise DeadlineExceeded
        if self.refusals:
            raise self.refusals.pop(0)
        job = request.job
        record = job_records.accepted(job)
        # A try whose time ended as it wrote the record has left it to the next one.
        if await self.records.create(record) or (
            job.job_id not in self.jobs and await self.records.get(job.job_id) == record
        ):
            self.jobs[job.job_id] = job
            self.cancelled[job.job_id] = asyncio.Event()
            running = self.tasks.create_task(self._carry_out(job))
            self.running_jobs.add(running)
            running.add_done_callback(self.running_jobs.discard)
        if self.answer_late is not None:
            await self.answer_late.wait()
        return JobAck(job_id=job.job_id)

    async def _carry_out(self, job: Job) -> None:
        await self._tell(
            job, EventKind.STATE, StateEvent(job_id=job.job_id, state=JobState.PREPARING, attempt=0)
        )
        encoding = Encoding(
            text=_NO_BLOB, text_tokens=48, rows=(), prompt_tokens=PromptTokens(given=60, read=47)
        )
        rows = (await self.records.get(job.job_id)).rows
        await self._write(
            job,
            state=JobState.RUNNING,
            attempt=1,
            inspection=INSPECTION,
            encoding=encoding,
            rows=tuple(row.model_copy(update={"attempt": 1, "worker": "fake-denoiser"}) for row in rows),
        )
        await self._tell(
            job, EventKind.STATE, StateEvent(job_id=job.job_id, state=JobState.RUNNING, attempt=1)
        )
        if await self._steps(job):
            await self._end(job, JobState.CANCELLED, JobCancelled())
        elif self.failure is not None:
            await self._end(job, JobState.FAILED, self.failure)
        else:
            await self._end(job, JobState.COMPLETED, None, rows=await self._rows(job))
        self.ended.set()

    async def _steps(self, job: Job) -> bool:
        """Whether the job was cancelled meanwhile."""
        cancelled = self.cancelled[job.job_id]
        if self.steps_when is not None:
            await self.steps_when.wait()
        for step in range(1, job.denoising_steps + 1):
            for index in range(job.row_count):
                event = StepEvent(
                    job_id=job.job_id, attempt=1, index=index, step=step, steps=job.denoising_steps
                )
                await self._tell(job, EventKind.STEP, event)
                if step <= job.parameters.partial_images:
                    await self._tell(job, EventKind.PREVIEW, preview_of(event))
            if step == 1 and self.hold is not None:
                self.held.set()
                waits = [asyncio.ensure_future(event.wait()) for event in (self.hold, cancelled)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            if cancelled.is_set():
                return True
        return False

    async def _rows(self, job: Job) -> tuple[RowRecord, ...]:
        rows = []
        for index in range(job.row_count):
            seed = job.seeds[index]
            if index in self.row_errors:
                rows.append(RowRecord(index=index, seed=seed, error=self.row_errors[index].body()))
                continue
            if job.regions and index:  # the first one has the picture of all
                rows.append(RowRecord(index=index, seed=seed))
                continue
            key = f"{job.tenant}/{job.job_id}/out{index}"
            ref = await self.blobs.put(key, picture_of(index, self.picture_bytes), job.result_ttl_s)
            rows.append(RowRecord(index=index, seed=seed, image=ref))
        return tuple(rows)

    async def _end(self, job: Job, state: JobState, error: GiornataError | None, **changes: Any) -> None:
        body = error.body() if error else None
        await self._write(job, state=state, error=body, stage_ms=STAGES, compute_ms=COMPUTE, **changes)
        if self.publish_done:
            event = DoneEvent(job_id=job.job_id, state=state, error=body, stage_ms=STAGES)
            await self._tell(job, EventKind.DONE, event)

    async def _write(self, job: Job, **changes: Any) -> None:
        await self.records.change(job.job_id, lambda record: record.model_copy(update=changes))

    async def _tell(
        self, job: Job, kind: EventKind, event: StateEvent | StepEvent | PreviewEvent | DoneEvent
    ) -> None:
        await self.bus.publish(subjects.event(job.gateway, job.job_id, kind), event)
